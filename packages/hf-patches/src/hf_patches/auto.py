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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_patches.backbone import decoder_layers, find_backbone
from hf_patches.probe import ordinary_ids
from hf_patches.proofs import TOLERANCE, normal
from hf_patches.reduced import reduced_copy
from hf_patches.report import Proof
from parallel_layers import PackedSequence, next_token_labels

_LENGTHS = (9, 1, 14, 6)
_HERE = Path(__file__).parent
# Gradients that only rounding makes nonzero (of biases of keys) are measured against the largest gradient.
_GRADIENT_FLOOR = 1e-6


def prove(model: PreTrainedModel, patch_copy: Callable[[PreTrainedModel], Any]) -> Proof:
    """Prove on a reduced copy that a patched model gives the same results as unpatched.

    Args:
        model: The unpatched model; it stays unchanged.
        patch_copy: Patches the copy and returns its `Patch`.

    Raises:
        ValueError: The patched copy computes something else, or cannot run; says what differed.
    """
    try:
        return _prove(reduced_copy(model), patch_copy)
    except Exception as error:  # a model's code may fail with any error, which must not end the caller's program
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file = Path(frame.filename)
        raised = f"{type(error).__name__} in {file.name}, line {frame.lineno}: "
        raise ValueError(
            f"family='auto' refuses {type(model).__name__} (model_type={model.config.model_type!r}), of which a small "
            f"copy was patched and compared with itself: {'' if file.parent == _HERE else raised}{error}"
        ) from error


def _prove(small: PreTrainedModel, patch_copy: Callable[[PreTrainedModel], Any]) -> Proof:
    backbone: Any = find_backbone(small)
    ids = ordinary_ids((backbone.config, small.config), sum(_LENGTHS))
    sequences = list(ids.split(_LENGTHS))
    packed = PackedSequence.from_sequences(sequences)
    parameters = {name: x for name, x in small.named_parameters() if x.requires_grad}

    def one_by_one() -> Tensor:
        return torch.cat([small(input_ids=x[None], use_cache=False).logits[0].float() for x in sequences])

    def at_once() -> Tensor:
        return _columns([x for x in small(packed=packed) if x is not None], packed)

    logits_TV = one_by_one()
    expected_Tn = _columns([logits_TV], packed)
    expected_gradients = _gradients(expected_Tn, parameters)
    patched = patch_copy(small)
    actual_Tn = at_once()
    output_error = _error(actual_Tn, expected_Tn)
    if not output_error <= TOLERANCE:
        outputs = _module_outputs(backbone, at_once)
        patched.remove()
        different = _first_difference(_module_outputs(backbone, one_by_one), outputs) or "the head"
        raise RuntimeError(
            f"{_where(actual_Tn, expected_Tn, packed)}; the first module with another output in the packed batch is "
            f"{different}"
        )
    gradient_error = _gradient_error(_gradients(actual_Tn, parameters), expected_gradients)
    if patched.state.can_decode:
        decoded_error = _error(_continued(small, patched, sequences), logits_TV[packed.cu_seqlens[1:].long() - 1])
        if not decoded_error <= TOLERANCE:
            raise RuntimeError(f"logits after decoding with a cache differ by {decoded_error:.3g} of the largest")
    return Proof(len(decoder_layers(backbone)), len(ids), output_error, gradient_error)


def _where(actual_Tn: Tensor, expected_Tn: Tensor, packed: PackedSequence) -> str:
    """Say which token differs most."""
    difference_T = (actual_Tn - expected_Tn).abs().nan_to_num(torch.inf).amax(dim=1)
    token = int(difference_T.argmax())
    sequence = int(torch.searchsorted(packed.cu_seqlens, token, right=True)) - 1
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


def _columns(outputs: Sequence[Tensor], packed: PackedSequence) -> Tensor:
    """Return log-probs and entropies `[T, 2]` from logits `[T, V]`, and other outputs as `[T, n]`."""
    if len(outputs) > 1 or outputs[0].dim() == 1 or outputs[0].shape[1] == 1:
        return torch.cat([x.reshape(packed.num_tokens, -1).float() for x in outputs], dim=1)
    distribution_TV = outputs[0].float().log_softmax(dim=-1)
    labels_T = next_token_labels(packed)
    log_probs_T = distribution_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0] * (labels_T >= 0)
    return torch.stack([log_probs_T, -(distribution_TV.exp() * distribution_TV).sum(dim=1)], dim=1)


def _gradients(columns_Tn: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of all numbers, so that no wrong gradient cancels."""
    weights_Tn = normal(tuple(columns_Tn.shape), torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((weights_Tn * columns_Tn).sum(), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
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
