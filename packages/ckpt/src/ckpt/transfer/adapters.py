"""Adapters in PEFT's files, `adapter_config.json` and `adapter_model.safetensors`: from any grid, and to any grid."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup

from ckpt.files.atomic import FolderWriter
from ckpt.files.boxio import Staging, write_box
from ckpt.files.contents import ADAPTER, ADAPTER_WEIGHTS
from ckpt.files.disk import room_for, while_unchanged
from ckpt.files.dtypes import is_finite, non_finite
from ckpt.files.header import TensorInfo, read_header
from ckpt.files.mirror import fetch
from ckpt.files.tensor_bytes import check_recorded
from ckpt.files.written_files import FilePlan, create_files, write_json
from ckpt.layout.adapter_config import DROPOUT, SHARED, require_plain_lora
from ckpt.layout.adapters import EXPERTS, HEADS, AdapterLayout, Change, adaptable, file_shape, peft_targets
from ckpt.layout.config import read_json_file
from ckpt.layout.model_layout import Layout
from ckpt.layout.pieces import Canonical, Piece, full_box
from ckpt.transfer.agreement import agree, agree_on_first
from ckpt.transfer.holdings import Places, Tensors, places_of
from ckpt.transfer.load import destinations
from ckpt.transfer.parallel_reads import read_all
from ckpt.transfer.stream import stream_hf
from ckpt.transfer.tensor_files import Source, TensorFiles

_PREFIX = "base_model.model."
_SETTINGS = ("lora_alpha", "use_rslora", "lora_dropout", "base_model_name_or_path")


def whole_adapters(
    tensors: Tensors | Sequence[Tensors], layout: AdapterLayout, place: Places, group: ProcessGroup | None
) -> dict[str, Tensor]:
    """Return all adapters whole, by canonical name, on every rank; every rank calls this."""
    return {name: tensor.clone() for name, tensor in stream_hf(tensors, layout, group, place)}


def in_peft_names(pairs: Iterable[tuple[str, Tensor]], layout: AdapterLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters by canonical name with the names and shapes of PEFT's files, without a value head."""
    for name, tensor in pairs:
        if name not in HEADS:
            yield _PREFIX + name, layout.in_file(name, tensor)


def adapter_shapes(layout: AdapterLayout) -> dict[str, Canonical]:
    """Return the names and shapes of an adapter's tensors in PEFT's files."""
    names = (name for name in layout.canonical if name not in HEADS)
    return {_PREFIX + name: Canonical(file_shape(layout.stored_shape(name))) for name in names}


def adapter_config(layout: AdapterLayout) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    modules, parameters = peft_targets(layout)
    dropout = layout.settings.get("lora_dropout")
    heads = [name.partition(".")[0] for name in HEADS if name in layout.canonical]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if layout.role == "causal_lm" else "TOKEN_CLS" if layout.role == "value" else None,
        "r": layout.rank,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "modules_to_save": sorted(set(heads)) or None,
        "bias": "none",
        "inference_mode": True,
        **layout.settings,
        **({"lora_dropout": 0.0, DROPOUT: dropout} if parameters and dropout else {}),
    }


def save_adapter(
    path: str | os.PathLike[str],
    tensors: Tensors | Sequence[Tensors],
    layout: AdapterLayout,
    place: Places = None,
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Write adapters as PEFT does, the same bytes from every grid; the first rank writes, and the folder appears whole.

    Raises:
        ValueError: Tensors do not fit the layout or are not finite, or the target is no checkpoint; on every rank.
        OSError: The folder cannot be written; the old folder is intact; on every rank.
    """
    whole = whole_adapters(tensors, layout, place, group)
    agree_on_first(lambda: _write(Path(path), whole, layout), group)


def _write(target: Path, whole: Mapping[str, Tensor], layout: AdapterLayout) -> None:
    stored = {_PREFIX + name: layout.in_file(name, tensor.cpu()).contiguous() for name, tensor in sorted(whole.items())}
    if broken := [name for name, tensor in stored.items() if not is_finite(tensor)]:
        raise ValueError(f"{non_finite(broken)}, so nothing is saved; go back to the last checkpoint")
    plan = FilePlan({ADAPTER_WEIGHTS: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}})
    staging = Staging()
    with room_for(plan.nbytes, target), FolderWriter(target) as folder:
        create_files(folder, plan)
        with open(folder / ADAPTER_WEIGHTS, "r+b", buffering=0) as file:
            for name, tensor in stored.items():
                write_box(file.fileno(), plan.tensors[name][1], full_box(tuple(tensor.shape)), tensor, staging)
        plan.complete(folder)
        write_json(folder / ADAPTER, adapter_config(layout))


def open_adapter(
    path: str | os.PathLike[str], base: Layout, config: Mapping[str, Any] | None = None
) -> tuple[TensorFiles, AdapterLayout]:
    """Open a folder of PEFT with the layout of the model that it adapts; `config` is its adapter_config.json, if read.

    Raises:
        ValueError: The folder is no adapter, its adapters are not plain LoRA (DoRA, biases, several ranks, a changed
            base), or its tensors do not fit adapters of this model; names the field or the tensor.
    """
    folder = Path(path)
    if not (folder / ADAPTER).is_file():
        raise ValueError(f"{folder} has no {ADAPTER}; pass a folder that peft's save_pretrained or save_adapter wrote")
    config = read_json_file(folder / ADAPTER) if config is None else config
    require_plain_lora(config, folder / ADAPTER)
    file = folder / ADAPTER_WEIGHTS
    header = read_header(file)
    infos = {
        name.removeprefix(_PREFIX): info for name, info in header.tensors.items() if ".base_layer.weight" not in name
    }
    settings = {name: config.get(name) for name in _SETTINGS} | ({SHARED: True} if config.get(SHARED) else {})
    settings["lora_dropout"] = config.get(DROPOUT) or config.get("lora_dropout")
    layout = AdapterLayout(base, _chosen(infos, config, base), config["r"], settings)
    expected = {name: file_shape(layout.stored_shape(name)) for name in layout.canonical}
    missing = [name for name in expected if name not in infos and not layout.canonical[name].optional]
    odd = [f"{name} {info.shape}" for name, info in infos.items() if expected.get(name) != info.shape]
    if missing or odd:
        raise ValueError(
            f"{file} does not hold adapters of rank {layout.rank} of this model: missing {missing[:3]} "
            f"({len(missing)}), unexpected {odd[:3]} ({len(odd)})"
        )
    files = TensorFiles({file: header})
    stored = _tensors_of(file) if layout.repeated else {}
    for name, info in infos.items():
        if name in layout.repeated:
            layout.from_file(name, stored[_PREFIX + name])
        shape = layout.canonical[name].shape
        files.tensors[name] = file, TensorInfo(info.dtype, layout.stored_shape(name), info.offset)
        files.pieces[name] = [(name, Piece.whole(name, shape))]
    return files, layout


def read_adapter(path: str | os.PathLike[str], base: Layout, config: Mapping[str, Any]) -> Change:
    """Return the function that merges an adapter of PEFT into a model's weights, after comparing recorded checksums.

    Raises:
        ValueError: As `open_adapter`, or the adapter's bytes are damaged.
    """
    files, layout = open_adapter(path, base, config)
    check_recorded(files.headers)
    stored = _tensors_of(Path(path) / ADAPTER_WEIGHTS)
    return layout.merging({name: layout.from_file(name, stored[_PREFIX + name]) for name in layout.canonical})


def _tensors_of(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, also of a mirror."""
    fetch(file)
    return load_file(file)


class _StoredLayout(Layout):
    """The tensors of an adapter as they are in its file, without the model that it adapts."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        canonical = {name: Canonical(shape) for name, shape in shapes.items()}
        for name, value in {"config": dict(config), "canonical": canonical, "kept": {}}.items():
            object.__setattr__(self, name, value)


def adapter_source(path: str | os.PathLike[str]) -> Source:
    """Open an adapter of PEFT without the model that it adapts, to describe and to compare it."""
    folder = Path(path)
    header = read_header(folder / ADAPTER_WEIGHTS)
    shapes = {name: info.shape for name, info in header.tensors.items()}
    layout = _StoredLayout(read_json_file(folder / ADAPTER), shapes)
    file = folder / ADAPTER_WEIGHTS
    tensors = {name: (file, info) for name, info in header.tensors.items()}
    pieces = {name: [(name, Piece.whole(name, shape))] for name, shape in shapes.items()}
    return Source({file: header}, tensors, pieces, layout=layout)


def _chosen(infos: Mapping[str, TensorInfo], config: Mapping[str, Any], base: Layout) -> list[str]:
    """Return the names of the adapted layers, by the names of the tensors."""
    paths = {name.partition(".lora_")[0] for name in infos if ".lora_" in name}
    chosen = []
    for name in (name for names in adaptable(base)[0].values() for name in names):
        module, _, last = name.rpartition(".")
        if name in paths:
            chosen.append(name)
        elif name.endswith(EXPERTS) and module in paths:
            # With one parameter alone only the config says which.
            wraps_both = f"{module}.base_layer" in paths
            targets = config.get("target_parameters") or []
            if wraps_both or any(name.endswith(str(target)) or str(target).endswith(f".{last}") for target in targets):
                chosen.append(name)
    return chosen


def load_adapter(
    adapter: str | os.PathLike[str] | TensorFiles,
    layout: AdapterLayout,
    place: Places = None,
    *,
    into: Tensors | Sequence[Tensors],
    group: ProcessGroup | None = None,
) -> None:
    """Read this rank's parts of an adapter of PEFT into its tensors, which may be DTensors.

    `adapter` is the folder, or its files as `open_adapter` returned them with the layout's layers.

    Raises:
        ValueError: As `open_adapter`, or the adapter is of other layers or another rank; on every rank.
    """
    sets = [into] if isinstance(into, Mapping) else list(into)

    def read() -> None:
        files = adapter if isinstance(adapter, TensorFiles) else _files_of(adapter, layout)
        with while_unchanged(files.files):
            for at, tensors in zip(places_of(place), sets, strict=True):
                local_blocks = layout.at(at).items()
                stored_blocks = {name: block for name, block in local_blocks if files.pieces.keys() >= {*block.names}}
                blocks, local = destinations(stored_blocks, tensors, layout)
                read_all(read for name, block in blocks.items() for read in files.reads(local[name], block))

    agree(read, group)


def _files_of(adapter: str | os.PathLike[str], layout: AdapterLayout) -> TensorFiles:
    """Open an adapter, and refuse adapters of other layers or of another rank than the model's."""
    files, stored = open_adapter(adapter, layout.base)
    if (stored.chosen, stored.rank, stored.repeated) != (layout.chosen, layout.rank, layout.repeated):
        raise ValueError(
            f"{adapter} has adapters of rank {stored.rank} on {len(stored.chosen)} layers, and the model of rank "
            f"{layout.rank} on {len(layout.chosen)}; load the model with the options of the adapter"
        )
    return files
