"""`patch(model, family="auto")`: the proof for a model type that the table of families does not name.

A reduced copy of the model (`hf_patches.reduced`) scores a few sequences one by one, unpatched, and then as one packed
batch, patched. Log-probs, entropies and the gradients of all parameters must agree, and a cache must continue the
sequences with the same logits. Everything runs on the CPU, in fp32, without dropout and router noise. The proof covers
the code and the shapes of the model; the start-up probe then covers the model itself, with its own weights.

Shapes: T tokens of all sequences, N sequences, V vocabulary, n numbers per token.
"""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_patches.backbone import decoder_layers, find_backbone
from hf_patches.probe import ordinary_ids
from hf_patches.proofs import TOLERANCE, normal
from hf_patches.reduced import reduced_copy
from hf_patches.report import Proof
from hf_patches.tensor_parallel import TensorParallel
from parallel_layers import PackedSequence, next_token_labels

_LENGTHS = (9, 1, 14, 6)
_HERE = Path(__file__).parent
# Gradients that only rounding makes nonzero (of biases of keys) are measured against the largest gradient.
_GRADIENT_FLOOR = 1e-6


T = TypeVar("T")


class Agree(Protocol):
    """Runs a step without collectives on every rank; a failure on one rank raises on all ranks."""

    def __call__(self, step: Callable[[], T]) -> T:
        """Return the result of the step."""


class _Reference(NamedTuple):
    """An unpatched copy of a model and its results, on the CPU."""

    small: PreTrainedModel
    sequences: list[Tensor]
    logits_TV: Tensor
    columns_Tn: Tensor
    gradients: dict[str, Tensor]


def prove(
    model: PreTrainedModel, patch_copy: Callable[[PreTrainedModel], Any], tensor_parallel: TensorParallel | None = None
) -> Proof:
    """Prove on a reduced copy that a patched model gives the same results as unpatched.

    Args:
        model: The unpatched model; it stays unchanged.
        patch_copy: Patches the copy, shards the copy, and returns its `Patch`.
        tensor_parallel: The ranks over which the copy is sharded; all of them call this function.

    Raises:
        ValueError: The patched copy computes something else, or cannot run; says what differed.
    """
    asked, advice, device = "family='auto'", "", "cpu"
    agree: Agree = _alone
    if tensor_parallel is not None:
        agree, device = tensor_parallel.agree, tensor_parallel.mesh.device_type
        asked = f"tp={tensor_parallel.mesh.size()} with transformers {transformers.__version__}"
        advice = "; leave out tp, and shard the model by FSDP2"
    try:
        return _prove(agree(lambda: _reference(reduced_copy(model))), patch_copy, agree, device)
    except Exception as error:  # a model's code may fail with any error, which must not end the caller's program
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(frame.filename)
        raised = f"{type(error).__name__} in {file.name}, line {frame.lineno}: "
        raise ValueError(
            f"{asked} refuses {type(model).__name__} (model_type={model.config.model_type!r}), of which a small "
            f"copy was patched and compared with itself: {'' if file.parent == _HERE else raised}{error}{advice}"
        ) from error


def _alone(step: Callable[[], T]) -> T:
    return step()


def _reference(small: PreTrainedModel) -> _Reference:
    """Score the sequences one by one."""
    backbone: Any = find_backbone(small)
    sequences = list(ordinary_ids((backbone.config, small.config), sum(_LENGTHS)).split(_LENGTHS))
    logits_TV = _one_by_one(small, sequences)
    columns_Tn = _columns(small, [logits_TV], PackedSequence.from_sequences(sequences))
    return _Reference(small, sequences, logits_TV, columns_Tn, _gradients(columns_Tn, small))


def _one_by_one(small: PreTrainedModel, sequences: Sequence[Tensor]) -> Tensor:
    return torch.cat([small(input_ids=x[None], use_cache=False).logits[0].float() for x in sequences])


def _prove(reference: _Reference, patch_copy: Callable[[PreTrainedModel], Any], agree: Agree, device: str) -> Proof:
    """Compare the patched copy on a device with the results of the unpatched copy; the ranks agree on each result."""
    small, sequences = reference.small.to(device), [x.to(device) for x in reference.sequences]
    packed = PackedSequence.from_sequences(sequences)
    patched = patch_copy(small)

    def at_once() -> Tensor:
        return _columns(small, [x for x in small(packed=packed) if x is not None], packed)

    actual_Tn = at_once()
    output_error = agree(lambda: _output_error(actual_Tn, packed, reference, patched, at_once))
    gradients = _gradients(actual_Tn, small)
    gradient_error = agree(lambda: _gradient_error(gradients, reference.gradients))
    if patched.state.can_decode and not patched.state.is_recurrent:
        logits_NV = _continued(small, patched, sequences).cpu()
        agree(lambda: _require_same_logits(logits_NV, reference.logits_TV[packed.cu_seqlens[1:].long().cpu() - 1]))
    return Proof(len(decoder_layers(patched.backbone)), packed.num_tokens, output_error, gradient_error)


def _output_error(
    actual_Tn: Tensor, packed: PackedSequence, reference: _Reference, patched: Any, at_once: Callable[[], Tensor]
) -> float:
    """Return the error of the outputs; raise if it is too large, and name the first different module of one rank."""
    error = _error(actual_Tn.cpu(), reference.columns_Tn)
    if error <= TOLERANCE:
        return error
    where = _where(actual_Tn.cpu(), reference.columns_Tn, packed)
    if patched.is_sharded:
        raise RuntimeError(where)
    outputs = _module_outputs(patched.backbone, at_once)
    patched.remove()
    expected = _module_outputs(patched.backbone, lambda: _one_by_one(reference.small, reference.sequences))
    different = _first_difference(expected, outputs) or "the head"
    raise RuntimeError(f"{where}; the first module with another output in the packed batch is {different}")


def _require_same_logits(actual_NV: Tensor, expected_NV: Tensor) -> None:
    if not (error := _error(actual_NV, expected_NV)) <= TOLERANCE:
        raise RuntimeError(f"logits after decoding with a cache differ by {error:.3g} of the largest")


def _where(actual_Tn: Tensor, expected_Tn: Tensor, packed: PackedSequence) -> str:
    """Say which token differs most."""
    difference_T = (actual_Tn - expected_Tn).abs().nan_to_num(torch.inf).amax(dim=1)
    token = int(difference_T.argmax())
    sequence = int(torch.searchsorted(packed.cu_seqlens.cpu(), token, right=True)) - 1
    place = token - int(packed.cu_seqlens[sequence])
    return f"the output of token {place} of sequence {sequence} differs by {difference_T[token].item():.3g}"


def _gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error of a gradient in parts of its largest element; raise if one differs."""
    floor = max(x.abs().max().item() for x in expected.values()) * _GRADIENT_FLOOR / TOLERANCE
    errors = {
        name: (actual[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), floor)
        for name, gradient in expected.items()
    }
    if wrong := [name for name, error in errors.items() if not error <= TOLERANCE]:
        raise RuntimeError(
            f"the gradients of {len(wrong)} parameters differ; the gradient of {wrong[0]} differs by "
            f"{errors[wrong[0]]:.3g} of its largest element"
        )
    return max(errors.values())


def _columns(small: PreTrainedModel, outputs: Sequence[Tensor], packed: PackedSequence) -> Tensor:
    """Return log-probs and entropies `[T, 2]` from logits `[T, V]`, and other outputs as `[T, n]`."""
    if len(outputs) > 1 or outputs[0].dim() == 1 or small.get_output_embeddings() is None:
        return torch.cat([x.reshape(packed.num_tokens, -1).float() for x in outputs], dim=1)
    distribution_TV = outputs[0].float().log_softmax(dim=-1)
    labels_T = next_token_labels(packed)
    log_probs_T = distribution_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0] * (labels_T >= 0)
    return torch.stack([log_probs_T, -(distribution_TV.exp() * distribution_TV).sum(dim=1)], dim=1)


def _gradients(columns_Tn: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients, on the CPU, of a weighted sum of all numbers, so that no wrong gradient cancels."""
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    weights_Tn = normal(tuple(columns_Tn.shape), torch.Generator().manual_seed(1)).to(columns_Tn)
    gradients = torch.autograd.grad((weights_Tn * columns_Tn).sum(), list(parameters.values()), allow_unused=True)
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return {
        name: torch.zeros(parameter.shape) if gradient is None else gradient.cpu()
        for (name, parameter), gradient in zip(parameters.items(), whole, strict=True)
    }


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in parts of the largest element."""
    return (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)


@torch.no_grad()
def _continued(small: PreTrainedModel, patched: Any, sequences: Sequence[Tensor]) -> Tensor:
    """Return the logits `[N, V]` after the last tokens, decoded with a cache: first all but two tokens, then each."""
    cache = patched.new_cache(len(sequences), max(_LENGTHS))
    logits_NV = torch.empty(0)
    for section in (slice(None, -2), slice(-2, -1), slice(-1, None)):
        logits_NV = small(packed=PackedSequence.from_sequences([x[section] for x in sequences]), cache=cache).logits
    return logits_NV


@torch.no_grad()
def _module_outputs(backbone: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the outputs `[1, T, ...]` of all modules that give one, in the order in which they return."""
    outputs_of: dict[str, list[Tensor]] = {}

    def reader(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: object, output: object) -> None:
            tensor = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim() > 1), None)
            outputs_of.setdefault(name, []).extend([] if tensor is None else [tensor])

        return record

    hooks = [module.register_forward_hook(reader(name)) for name, module in backbone.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: torch.cat(outputs, dim=1)
        for name, outputs in outputs_of.items()
        if [tuple(x.shape[:2]) for x in outputs] in ([(1, n) for n in _LENGTHS], [(1, sum(_LENGTHS))])
    }


def _first_difference(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> str | None:
    for name, output in expected.items():
        if name in actual and actual[name].shape == output.shape and not _error(actual[name], output) <= TOLERANCE:
            return name
    return None
