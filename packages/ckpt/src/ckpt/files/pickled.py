"""Find the tensors in a file that `torch.save` wrote, without running code and without reading the tensors.

The file is a zip archive of a pickle, whose tensors name records of plain bytes. `weights_only=True` unpickles nothing
but tensors and containers.
"""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from ckpt.files.contents import refuse_pointer
from ckpt.files.header import Header, TensorInfo
from ckpt.files.mirror import fetch


def read_pickled(path: Path) -> Header:
    """Return where the tensors of a file lie; the file has no checksums.

    Raises:
        ValueError: The file is missing, damaged, older than torch 1.6, or holds anything but tensors by name; names the
            file and the fix.
    """
    # `torch.load` says where each tensor lies if tensors are fake. The import takes as long as torch.
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        fetch(path)
        modified_ns = path.stat().st_mtime_ns
        with open(path, "rb") as file:
            refuse_pointer(path, file.read(32))
        with FakeTensorMode():
            held = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
        # torch's first lines are advice to run code; the cause follows them.
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        raise ValueError(
            f"{path} is damaged, or holds more than tensors: {reason:.200}; download it again, or save the model's "
            "state_dict() alone"
        ) from None
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in held.items() if isinstance(held, dict) else [("the file", held)]:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path}: {name} is a {type(tensor).__name__}, not a tensor; save the model's state_dict() alone"
            )
        start = tensor.untyped_storage()._checkpoint_offset
        if start is None or not tensor.is_contiguous():
            what = "is in the format of before torch 1.6" if start is None else f"holds {name} in another order"
            raise ValueError(
                f"{path} {what}; write it anew: torch.save({{name: tensor.contiguous() for name, tensor in "
                "torch.load(FILE, weights_only=True).items()}, FILE)"
            )
        offset = start + int(tensor.storage_offset()) * tensor.element_size()
        tensors[str(name)] = TensorInfo(tensor.dtype, tuple(tensor.shape), offset)
    return Header(tensors, 0, modified_ns, {})
