"""Match a checkpoint's tensors with the canonical tensors of a layout, by name and shape."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from ckpt.files.folder import Checkpoint
from ckpt.files.header import TensorInfo
from ckpt.files.tensor_bytes import same_bytes
from ckpt.layout.families.table import Family, Role
from ckpt.layout.labels import stored_labels
from ckpt.layout.model_layout import EMBEDDING, Layout, layout_for
from ckpt.layout.pieces import Piece, Shape, full_box, other_order
from ckpt.layout.place import Place

Sources = dict[str, list[tuple[str, Piece]]]
HEAD = "lm_head.weight"


def in_canonical_order(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return a checkpoint whose matrices have the layout's order of dimensions, where files may have another order."""
    names = [name for name, entry in layout.canonical.items() if entry.transposable and name in checkpoint.tensors]
    plain = all(type(checkpoint.tensors[name][1]) is TensorInfo for name in names)
    return checkpoint.transposed(names) if plain and other_order(layout.canonical, checkpoint.shapes) else checkpoint


def match(checkpoint: Checkpoint, layout: Layout) -> Sources:
    """Describe a checkpoint's tensors as pieces of the layout's canonical tensors.

    A file may hold a tensor under an alias, or several tensors fused as on the native layers and in transformers'
    memory: stacked experts, `mlp.experts.gate_up_proj` `[E, 2M, H]`.

    Returns:
        Canonical name -> [(file tensor, piece)], for every canonical tensor that the checkpoint holds.

    Raises:
        ValueError: A tensor is missing, unexpected, of another shape, empty or of integers, or a stored head differs
            from the embedding that it is tied to; names the tensor and the likely cause.
    """
    shapes = checkpoint.shapes
    unread = dict(shapes)
    _refuse_classifier(checkpoint, layout)
    sources: Sources = {}
    missing: list[str] = []
    wrong: dict[str, str] = {}
    for name, canonical in layout.canonical.items():
        # An alias counts where its shape fits.
        aliases = (alias for alias in canonical.aliases if shapes.get(alias) == canonical.shape)
        stored_name = name if name in shapes else next(aliases, None)
        if stored_name is None:
            missing.append(name)
            continue
        unread.pop(stored_name, None)
        file, _ = checkpoint.tensors[stored_name]
        if not math.prod(canonical.shape):
            raise ValueError(
                f"{checkpoint.path}: {stored_name} has shape {shapes[stored_name]} in {file.name}, no elements, so "
                "no rank could hold a part of it; save the checkpoint again without it"
            )
        if shapes[stored_name] == canonical.shape:
            sources[name] = [(stored_name, Piece.whole(name, canonical.shape))]
        else:
            wrong[name] = f"{stored_name} has shape {shapes[stored_name]} in {file.name}, expected {canonical.shape}"
    for names in _in_equal_parts(layout, shapes, sources) if wrong else ():
        wrong = {name: text for name, text in wrong.items() if name not in names}
    missing = _match_fused(layout, missing, unread, sources)
    missing = [name for name in missing if not layout.canonical[name].optional]
    carried = {name: layout.family.file_names(name) for name in layout.missing_carried()}
    missing += [name for name, spellings in carried.items() if not unread.keys() & spellings]
    unexpected = [name for name in unread if not _ignored(name, layout)]
    if missing or unexpected:
        raise ValueError(_report(checkpoint, layout, missing, unexpected))
    if wrong:
        raise ValueError(
            f"{checkpoint.path}: {_some([*wrong.values()])}; the sizes in config.json and the files disagree"
        )
    refuse_integers(
        checkpoint,
        (tensor for name, pieces in sources.items() if not layout.canonical[name].carried for tensor, _ in pieces),
    )
    for head in unread.keys() & layout.family.file_names(HEAD) if layout.tied and layout.role != "value" else ():
        _refuse_other_head(checkpoint, sources[layout.family.file_names(EMBEDDING)[0]][0][0], head)
    return sources


def _refuse_classifier(checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuse a classifier of other labels than the layout has, such as one that is read as a language model."""
    hidden = layout.text.get("hidden_size")
    for name in _value_heads(layout.family) - {HEAD}:
        if name not in checkpoint.tensors:
            continue
        file, info = checkpoint.tensors[name]
        if len(info.shape) == 2 and info.shape[0] != layout.num_labels and info.shape[1] == hidden:
            raise ValueError(
                f"{checkpoint.path}: {name} has shape {info.shape} in {file.name}: a classifier of {info.shape[0]} "
                f"labels, and the layout has {layout.num_labels}. A language model has none; load a classifier with "
                "role='value', with the layout of its folder"
            )


def _refuse_other_head(checkpoint: Checkpoint, embedding: str, stored: str) -> None:
    """Refuse a stored head that differs in any bit from the embedding that it is tied to; reads both."""
    (_, info), (_, head) = checkpoint.tensors[embedding], checkpoint.tensors[stored]
    if not same_bytes(checkpoint.tensors[embedding], checkpoint.tensors[stored]):
        raise ValueError(
            f"{checkpoint.path}: {stored} {head.shape} of {head.dtype} differs from {embedding} {info.shape} of "
            f"{info.dtype}, and config.json ties them; set tie_word_embeddings to false in config.json, in its "
            f"text_config, too, where it has one, or remove {stored} if the head is the embedding"
        )


def refuse_integers(checkpoint: Checkpoint, weights: Iterable[str]) -> None:
    """Refuse weights of integers."""
    for tensor in weights:
        file, info = checkpoint.tensors[tensor]
        if not info.dtype.is_floating_point:
            raise ValueError(
                f"{checkpoint.path}: {tensor} is of type {info.dtype} in {file.name}, and weights are floating-point "
                "numbers; save the checkpoint again in a type such as bfloat16"
            )


def _match_fused(layout: Layout, missing: list[str], unread: dict[str, Shape], sources: Sources) -> list[str]:
    """Find missing tensors inside fused tensors of the files; return the names that are still missing."""
    if not missing or not unread:
        return missing
    family = layout.family
    whole = dataclasses.replace(layout, target="parallel", layers=None)
    for local, block in whole.at(Place()).items():
        predicted = local.replace(f"mtp.layers.{layout.num_layers}.", family.prediction) if family.prediction else local
        spelled = (*family.file_names(local), predicted)
        stored_name = next((name for name in spelled if unread.get(name) == block.shape), None)
        if stored_name is not None and not any(name in sources for name in block.names):
            del unread[stored_name]
            for piece in block.pieces:
                sources.setdefault(piece.name, []).append((stored_name, piece))
    return [name for name in missing if name not in sources]


def _in_equal_parts(layout: Layout, shapes: Mapping[str, Shape], sources: Sources) -> Iterator[list[str]]:
    """Find tensors whose rows files divide in parts of one size (`Row.equal_parts`); yield the names of each row."""
    rows = [row for row in layout.family.rows if row.equal_parts]
    expected = {name: canonical.shape for name, canonical in layout.canonical.items()}
    for layer, row in itertools.product(range(layout.num_layers), rows):
        names = [layout.family.file_names(f"model.layers.{layer}.{source}")[0] for source in row.sources]
        if not all(name in shapes and name in layout.canonical for name in names):
            continue
        wanted, stored = ([table[name] for name in names] for table in (expected, shapes))
        total = sum(shape[0] for shape in wanted)
        size = -(-total // len(names))
        if stored != [(min(size, total - size * part), *shape[1:]) for part, shape in enumerate(wanted)]:
            continue
        first = 0
        for name, shape in zip(names, wanted, strict=True):
            sources[name] = []
            for part, held in enumerate(stored):
                start, stop = max(first, size * part), min(first + shape[0], size * part + held[0])
                if start < stop:
                    rest = full_box(shape[1:])
                    box, local = (((start - base, stop - base), *rest) for base in (first, size * part))
                    sources[name].append((names[part], Piece(name, box, local)))
            first += shape[0]
        yield names


def _ignored(name: str, layout: Layout) -> bool:
    # A value model has no language-model head, and a tied head is the embedding.
    if name in layout.family.file_names(HEAD) and (layout.role == "value" or layout.tied):
        return True
    # A language model ignores a value head where the config names a causal language model.
    if layout.role == "causal_lm" and _is_causal_lm(layout) and name in _value_heads(layout.family):
        return True
    return _is_prediction_layer(name, layout) or any(re.search(pattern, name) for pattern in layout.family.ignored)


def _is_causal_lm(layout: Layout) -> bool:
    """Return whether the configuration names a causal language model's class."""
    return any(str(name).endswith("ForCausalLM") for name in layout.config.get("architectures") or ())


def _value_heads(family: Family) -> set[str]:
    """Return the names of tensors that only models with a value head have."""
    rows = [row for row in family.rows if "causal_lm" not in row.roles]
    return {name for row in rows for name in (*row.sources, *row.aliases)}


def _is_prediction_layer(name: str, layout: Layout) -> bool:
    """Return whether a tensor belongs to multi-token-prediction layers, which the layout leaves out."""
    if layout.prediction_layers:
        return False
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    extra = layout.predictions
    if layout.family.prediction:
        return name.startswith("mtp.")
    return layer is not None and layout.num_layers <= int(layer[1]) < layout.num_layers + extra


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _report(checkpoint: Checkpoint, layout: Layout, missing: list[str], unexpected: list[str]) -> str:
    problems = []
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if unexpected:
        files = sorted({checkpoint.tensors[name][0].name for name in unexpected})
        problems.append(f"unexpected: {_some(unexpected)} (in {_some(files)})")
    carried = layout.family.carried_prefixes
    lacks_tower = any(name.startswith(carried) for name in missing)
    modules = {module for prefix in carried for module in prefix.split(".")} - {"", "model"}
    if lacks_tower and unexpected and all(modules.intersection(name.split(".")) for name in unexpected):
        fix = (
            "the files hold the vision tower under the names that transformers has in memory "
            "(save_original_format=False); save a new model with the same weights: from transformers import "
            f"AutoModelForImageTextToText as Auto; old = Auto.from_pretrained({str(checkpoint.path)!r}); "
            "new = Auto.from_config(old.config); new.load_state_dict(old.state_dict()); new.save_pretrained('OUT')"
        )
    elif lacks_tower:
        fix = (
            "download the whole checkpoint; or save a checkpoint of the language model alone, with the text model's "
            "class and config"
        )
    elif unexpected and all(name.startswith(carried) for name in unexpected):
        fix = "make the layout from the checkpoint, layout_for(folder), so that it carries the vision tower"
    elif missing == [layout.family.file_names(HEAD)[0]]:
        fix = "set tie_word_embeddings=true in config.json if the head is the embedding, or load it with role='value'"
    else:
        fix = f"the files do not belong to this config ({layout.family.name}, role={layout.role!r})"
    return f"{checkpoint.path}: {'; '.join(problems)}; {fix}"


def detect_role(checkpoint: Checkpoint) -> Role:
    """Return the role that a checkpoint's heads and configuration show.

    A value head makes a value model, or a model of both roles if there is a language-model head, too, and the
    configuration names a causal language model.
    """
    shapes = checkpoint.shapes
    layout = layout_for(checkpoint.config, role="causal_lm_with_value", num_labels=stored_labels(shapes))
    score = layout.canonical["score.weight"]
    if not any(shapes.get(name) == score.shape for name in ("score.weight", *score.aliases)):
        return "causal_lm"
    names = layout.family.file_names(HEAD)
    head = layout.canonical.get(names[0])
    has_head = head is None or any(shapes.get(name) == head.shape for name in names)
    return "causal_lm_with_value" if has_head and _is_causal_lm(layout) else "value"
