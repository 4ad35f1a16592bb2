"""`run_schedule`: Megatron's forward-backward schedules over packed micro-batches.

One rank runs forward and backward in turn. Several stages run 1F1B (Narayanan et al., arXiv:2104.04473), or its
interleaved form if a rank holds several chunks. Micro-batches may differ in length.

Without interleaving, stages send each other the shapes. With interleaving, micro-batches are padded to one length for
the time of the schedule: Megatron-Core 0.16 exchanges shapes with both neighbours at once, and on two stages both
neighbours are one rank, so shapes change places or both ranks wait for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_utils.grid import MegatronGrid
from megatron_utils.optimizer.build import gradient_buffers
from megatron_utils.router_replay import router_replay, spread_experts
from parallel_layers import LogProbs, PackedSequence
from parallel_layers.data import pad_to
from parallel_layers.head import SamplingMask
from parallel_layers.inference import SequenceCache
from parallel_layers.moe import RouterReplay

Output = LogProbs | Tensor
Loss = Callable[[Any, int], Tensor]
T = TypeVar("T")


def run_schedule(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[PackedSequence],
    grid: MegatronGrid,
    *,
    labels: Sequence[Tensor] | None = None,
    temperature: float = 1.0,
    sampling_masks: Sequence[SamplingMask] | None = None,
    entropy: bool = True,
    next_token: bool = False,
    loss: Loss | None = None,
    grad_scale: Callable[[Tensor], Tensor] | None = None,
    routing: Sequence[RouterReplay] | None = None,
    caches: Sequence[SequenceCache] | None = None,
    broadcast: bool = True,
) -> list[Output] | None:
    """Run a model forward, and with a `loss` also backward, over packed micro-batches.

    Every rank of the grid calls this function. Ranks of one data-parallel replica pass the same micro-batches, and all
    replicas pass equally many (`split_micro_batches(..., group=grid.groups.dp)`); interleaving needs a multiple of pp.

    The loss of the step is the sum of `loss` over micro-batches; gradients are averaged over data-parallel replicas. On
    return every gradient is complete (Megatron's `finalize_model_grads`: data parallelism, norms under sequence
    parallelism, embeddings tied over stages). Gradients are in `parameter.main_grad`, added to the gradients of calls
    since `Optimizer.zero_grad`; a second call before `zero_grad` needs the memory of the gradients twice.

    Args:
        chunks: The chunks of `build_gpt`; for a backward, wrapped by `optimizer.wrap_data_parallel`.
        micro_batches: At least one. A micro-batch without sequences is a dummy and adds nothing to the gradient.
        grid: The active grid.
        labels: `[T]` for each micro-batch, already shifted; the model then returns log-probs.
        temperature: Divides the logits.
        sampling_masks: The mask of T rows of each micro-batch; see `parallel_layers.linear_log_probs` (default: none).
        entropy: Whether to return entropies with the log-probs.
        next_token: Without labels, return logits after the last token of each sequence only.
        loss: A function of the last stage's output and the number of the micro-batch that returns a scalar; None runs
            the forward only, without a graph. The last stage calls `loss` for each micro-batch that is no dummy. An
            error in `loss` leaves this rank at once, without new gradients, while other ranks wait for it. So catch
            errors inside, return a zero with a graph (`output.sum() * 0`), then clear the gradients and raise on every
            rank.
        grad_scale: Multiplies the loss before the backward (fp16: `optimizer.scale_loss`).
        routing: For a mixture model, one replay for each micro-batch (see `router_replay`).
        caches: With `next_token`, one cache for each chunk (`PackedGPTModel.new_cache`). The only micro-batch that is
            no dummy continues the sequences of the caches.
        broadcast: Send the outputs to all stages; False keeps them on the last stage.

    Returns:
        The detached output of each micro-batch: `LogProbs` of `[T]`, or values `[T]` (`[T, L]` of L labels); None on
            stages without outputs.
        Logits (no labels, a language model) stay on the last stage.

    Raises:
        ValueError: There are no micro-batches; their number does not fit interleaving; their tokens do not divide;
            labels differ in number or shape; a loss is given for chunks that are not wrapped; or caches do not fit.
            Every rank raises before any communication.
    """
    _check(chunks, micro_batches, grid, labels, routing, loss, caches)
    outputs: dict[int, Output] = {}
    count = len(micro_batches)
    sizes = [packed.num_tokens for packed in micro_batches]
    run = list(micro_batches)
    if grid.virtual_stages:
        run = [pad_to(packed, max(sizes)) for packed in micro_batches]
        labels = labels and [F.pad(values, (0, max(sizes) - len(values)), value=-100) for values in labels]
        sampling_masks = sampling_masks and [mask.pad(max(sizes)) for mask in sampling_masks]
        routing = routing and [_extended(replay, max(sizes), chunks[0]) for replay in routing]

    def step(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        number = next(numbers)
        options: dict[str, Any] = {"next_token": True} if next_token else {}
        if labels is not None:
            options = {"labels": labels[number], "temperature": temperature, "entropy": entropy}
            options |= {"sampling_mask": sampling_masks[number]} if sampling_masks else {}
        if caches is not None:
            chunk_cache = caches[next(i for i, candidate in enumerate(chunks) if candidate is chunk)]
            dummy = micro_batches[number].num_sequences == 0
            # A dummy needs the same length on every context-parallel rank; its padding is a sequence in a cache of its
            # own.
            options["cache"] = chunk.new_cache(1, run[number].num_tokens) if dummy else chunk_cache
        with (
            session.micro_batch(routing[number], backward=loss is not None)
            if session and routing
            else contextlib.nullcontext()
        ):
            output = chunk_output = chunk(run[number], **options)
        if grid.is_last_stage and not next_token:
            output = _map_tensors(output, lambda rows: rows[: sizes[number]])

        def finish(tensor: Tensor, non_loss_data: bool = False) -> Any:
            outputs[number] = _map_tensors(output, Tensor.detach)
            if non_loss_data or loss is None:
                return tensor
            dummy = micro_batches[number].num_sequences == 0
            # Megatron divides by the number of micro-batches, but the loss of a step is the sum.
            value = tensor.sum() * 0.0 if dummy else loss(output, number) * count
            return value, {}

        return chunk_output[0] if isinstance(chunk_output, tuple) else chunk_output, finish

    with (
        _training(chunks, grad_scale),
        contextlib.nullcontext() if loss is None else _accumulating(chunks),
        router_replay(chunks) if routing else contextlib.nullcontext() as session,
    ):
        get_forward_backward_func(grid.dims.pp, grid.virtual_stages)(
            forward_step_func=step,
            data_iterator=[iter(range(count)) for _ in chunks] if len(chunks) > 1 else iter(range(count)),
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=count,
            # Megatron divides by cp, but with a cache every context-parallel rank works on all tokens.
            seq_length=run[0].num_tokens * (1 if caches is None else grid.dims.cp),
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
            p2p_communicator=P2PCommunicator(grid.groups.pp, get_model_config(chunks[0])),
            pg_collection=grid.groups,
        )
    results = [outputs[number] for number in range(count)] if grid.is_last_stage else None
    chunk = unwrap_model(chunks[0])
    if broadcast and grid.dims.pp > 1 and (labels is not None or chunk.num_labels):  # no logits
        results = _broadcast(results, micro_batches, grid, chunk, entropy)
    return results


@contextlib.contextmanager
def _training(chunks: Sequence[nn.Module], grad_scale: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Tell Megatron's schedule how to delay and complete gradients, for the time of one block."""
    config = get_model_config(chunks[0])
    saved = config.finalize_model_grads_func, config.no_sync_func, config.grad_scale_func
    if all(hasattr(chunk, "ddp_config") for chunk in chunks):
        no_sync = [chunk.no_sync for chunk in chunks]
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    config.grad_scale_func = grad_scale
    try:
        yield
    finally:
        config.finalize_model_grads_func, config.no_sync_func, config.grad_scale_func = saved


@contextlib.contextmanager
def _accumulating(chunks: Sequence[Any]) -> Iterator[None]:
    """Complete the new gradients alone, then add the gradients of earlier calls, which are complete.

    Completing both together would sum the earlier gradients over the ranks a second time. A failed call adds nothing.
    """
    gradients = gradient_buffers(chunks)
    earlier = [gradient.clone() if gradient.any() else None for gradient in gradients]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    try:
        yield
    except BaseException:
        for gradient in gradients:
            gradient.zero_()
        raise
    finally:
        for gradient, earlier_gradient in zip(gradients, earlier, strict=True):
            if earlier_gradient is not None:
                gradient.add_(earlier_gradient)


def _extended(replay: RouterReplay, num_tokens: int, chunk: nn.Module) -> RouterReplay:
    """Return the replay for a batch with more padding."""
    if replay.recording:
        return replay
    num_experts = get_model_config(chunk).num_moe_experts
    longer = replay.replaying()
    longer.experts = {
        layer: torch.cat([experts, spread_experts(num_tokens - len(experts), num_experts, experts)])
        for layer, experts in replay.experts.items()
    }
    return longer


def _check(
    chunks: Sequence[nn.Module],
    micro_batches: Sequence[PackedSequence],
    grid: MegatronGrid,
    labels: Sequence[Tensor] | None,
    routing: Sequence[RouterReplay] | None,
    loss: Loss | None,
    caches: Sequence[SequenceCache] | None,
) -> None:
    if not micro_batches:
        raise ValueError("no micro-batches; give every rank at least one (a dummy where it has no samples)")
    if grid.virtual_stages and len(micro_batches) % grid.dims.pp:
        raise ValueError(
            f"{len(micro_batches)} micro-batches do not divide into groups of pp={grid.dims.pp}, which interleaving "
            f"needs; split with count_multiple_of={grid.dims.pp}"
        )
    # Check all micro-batches first: an error in the middle of a schedule leaves other stages waiting.
    multiple = getattr(unwrap_model(chunks[0]), "tokens_multiple_of", 1)
    for number, packed in enumerate(micro_batches):
        if packed.num_tokens % multiple:
            raise ValueError(
                f"micro-batch {number} has {packed.num_tokens} tokens, not a multiple of {multiple} (tp under sequence "
                f"parallelism, cp); pack with multiple_of={multiple}"
            )
    if labels is not None:
        if len(labels) != len(micro_batches):
            raise ValueError(f"{len(labels)} labels for {len(micro_batches)} micro-batches")
        for number, (batch_labels, packed) in enumerate(zip(labels, micro_batches, strict=True)):
            if batch_labels.shape != packed.input_ids.shape:
                raise ValueError(
                    f"labels of micro-batch {number} have shape {list(batch_labels.shape)}, not [{packed.num_tokens}]"
                )
    if routing is not None and len(routing) != len(micro_batches):
        raise ValueError(f"{len(routing)} replays for {len(micro_batches)} micro-batches")
    if loss is not None and not all(hasattr(chunk, "ddp_config") for chunk in chunks):
        raise ValueError("a backward needs chunks wrapped by optimizer.wrap_data_parallel, which hold the gradients")
    if caches is not None:
        running = sum(packed.num_sequences > 0 for packed in micro_batches)
        if len(caches) != len(chunks) or running != 1:
            raise ValueError(
                f"{len(caches)} caches for {len(chunks)} chunks, and {running} micro-batches that continue them; "
                "give one cache for each chunk, and one micro-batch with sequences (the rest dummies)"
            )


def _map_tensors(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Return an output with each of its tensors changed."""
    if isinstance(output, Tensor):
        return change(output)
    return LogProbs(change(output.log_probs), None if output.entropy is None else change(output.entropy))


def _broadcast(
    results: list[Output] | None, micro_batches: Sequence[PackedSequence], grid: MegatronGrid, chunk: Any, entropy: bool
) -> list[Output]:
    """Send the last stage's numbers per token to all stages, in one broadcast."""
    group = grid.groups.pp
    columns = chunk.num_labels or 1 + entropy
    sizes = [packed.num_tokens for packed in micro_batches]
    numbers = torch.empty(columns, sum(sizes), dtype=torch.float32, device=micro_batches[0].input_ids.device)
    if results is not None:
        rows = [
            result.T if isinstance(result, Tensor) else torch.stack([r for r in result if r is not None])
            for result in results
        ]
        torch.cat([row.view(columns, -1) for row in rows], dim=1, out=numbers)
    dist.broadcast(numbers, dist.get_process_group_ranks(group)[-1], group=group)
    if results is not None:
        return results
    per_batch = numbers.split(sizes, dim=1)
    if chunk.num_labels:
        return [columns_[0] if columns == 1 else columns_.T for columns_ in per_batch]
    return [LogProbs(columns_[0], columns_[1] if entropy else None) for columns_ in per_batch]
