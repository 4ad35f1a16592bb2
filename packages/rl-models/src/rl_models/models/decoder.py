"""`Decoder`: embedding, layers and final norm, whole or as the chunks of a pipeline stage.

Shape legend: T tokens of a packed batch (with its padding), H hidden, D rotary dims, V vocabulary; T': this rank's part
of the tokens under sequence and context parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel_layers import DecoderLayer, Execution, PackedSequence, Placement, RMSNorm, VocabParallelEmbedding
from parallel_layers.attention.context_parallel import Layout, split_sequence
from parallel_layers.inference import SequenceCache
from parallel_layers.invariant import tp_invariant
from parallel_layers.memory.recompute import checkpoint
from parallel_layers.model import ModelConfig
from parallel_layers.moe import RoutingContext

Recompute = Literal["full", "selective"] | Collection[int] | None


@dataclass(frozen=True)
class Chunk:
    """The consecutive layers that one pipeline stage runs.

    Attributes:
        layers: their numbers in the whole model.
        first: the chunk begins with the embedding.
        last: the chunk ends with the final norm and the head.
    """

    layers: tuple[int, ...]
    first: bool = True
    last: bool = True


class ModelOptions(TypedDict, total=False):
    """How a model is divided, by keyword; what is left out is not divided.

    Attributes:
        group: tensor-parallel group.
        sequence_parallel: keep `[T/tp, H]` between the blocks.
        execution: how the linear layers compute and communicate; default `Execution()`.
        context_group: context-parallel group, over which the tokens of every pack are divided.
        expert_group: the ranks that share the experts of a mixture of experts.
        expert_tensor_parallel: every expert is divided over `group`; default True. See `parallel_layers.moe.MoE`.
        chunks: what this rank holds of a pipeline; default the whole model.
        recompute: what is computed again in the backward instead of saved: "full", every layer from its input;
            "selective", every MLP or mixture of experts; or the numbers of the layers that are; None: nothing.
        keep_probabilities: of the head, see `parallel_layers.linear_log_probs`; not of the decoder itself.
        tp_invariant: what `parallel_layers.invariant.tp_invariant` makes of the layers, in their place.
        dtype, device: of the parameters.
    """

    group: ProcessGroup | None
    sequence_parallel: bool
    execution: Execution
    context_group: ProcessGroup | None
    expert_group: ProcessGroup | None
    expert_tensor_parallel: bool
    chunks: Sequence[Chunk]
    recompute: Recompute
    keep_probabilities: bool
    tp_invariant: bool
    dtype: torch.dtype | None
    device: torch.device | str | None


class Decoder(nn.Module):
    """Embedding, layers and final norm: ids [T] -> hidden [T', H].

    Each rank holds its shards of every layer. Communication: the embedding's reduction, then per layer one gather and
    one scatter forward and their conjugates backward for attention and for the MLP (all-reduces without sequence
    parallelism), and what context and expert parallelism send.
    """

    def __init__(self, config: ModelConfig, **options: Unpack[ModelOptions]) -> None:
        super().__init__()
        require_layers(options.get("recompute"), config.num_layers)
        group, dtype, device = options.get("group"), options.get("dtype"), options.get("device")
        sequence_parallel = options.get("sequence_parallel", False)
        self.context_group = options.get("context_group")
        self.context_layout: Layout = "zigzag" if config.decoder.context_parallel == "ring" else "contiguous"
        self.chunks = tuple(options.get("chunks") or [Chunk(tuple(range(config.num_layers)))])
        hidden = config.decoder.hidden_size
        if any(chunk.first for chunk in self.chunks):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, hidden, group=group, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )
        # Keyed by the layer's number in the whole model, which is its name in checkpoints.
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(
                    config.layer(i),
                    placement=Placement(group, sequence_parallel),
                    execution=options.get("execution", Execution()),
                    context_group=self.context_group,
                    layer_number=i,
                    expert_group=options.get("expert_group"),
                    expert_tensor_parallel=options.get("expert_tensor_parallel", True),
                    dtype=dtype,
                    device=device,
                )
                for chunk in self.chunks
                for i in chunk.layers
            }
        )
        if any(chunk.last for chunk in self.chunks):
            self.norm = RMSNorm(
                hidden,
                eps=config.decoder.norm_eps,
                group=group,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                device=device,
            )
        self.rotary = config.rotary(device)
        if options.get("tp_invariant"):
            for name, child in list(self.named_children()):
                setattr(self, name, tp_invariant(child))
        for name, layer in self.layers.items():
            _recompute(layer, int(name), options.get("recompute"))

    def forward(
        self,
        packed: PackedSequence,
        hidden: Tensor | None = None,
        *,
        chunk: Chunk | None = None,
        cache: SequenceCache | None = None,
        routing: RoutingContext | None = None,
    ) -> Tensor:
        """Hidden states of every token; with a cache, of the tokens that follow what it holds.

        Args:
            packed: the batch, the same on every rank of the tensor-, context- and pipeline-parallel groups.
            hidden: `[T', H]`, what the chunk before has returned; None in the first.
            chunk: which of this rank's; default the only one.
            cache: of all layers of this rank. Context-parallel ranks then all work on all tokens.
            routing: for the routers of a mixture of experts.

        Returns:
            `[T', H]`: after the final norm in the last chunk, else what the next takes.
        """
        chunk = self.chunks[0] if chunk is None else chunk
        cos, sin = self.rotary(packed.position_ids, packed.cu_seqlens)
        rotary = (self.split(cos), self.split(sin)) if cache is None else (cos, sin)
        if chunk.first:
            hidden = self.embed_tokens(packed.input_ids if cache is not None else self.split(packed.input_ids))
        if routing is not None and routing.segments is not None and cache is None:
            routing = replace(routing, segments=self.split(routing.segments))
        for number, layer in self._numbered(chunk):
            layer_cache = None if cache is None else cache.layer(number)
            hidden = layer(hidden, rotary, packed.cu_seqlens, packed.max_seqlen, layer_cache, routing)
        if cache is not None and chunk is self.chunks[-1]:
            cache.advance(packed.cu_seqlens)
        assert hidden is not None
        return self.norm(hidden) if chunk.last else hidden

    def split(self, per_token: Tensor) -> Tensor:
        """This rank's tokens of a `[T, ...]` tensor under context parallelism."""
        return split_sequence(per_token, self.context_group, layout=self.context_layout)

    def _numbered(self, chunk: Chunk) -> Iterator[tuple[int, nn.Module]]:
        """The layers of a chunk, each with its number among this rank's."""
        for number, (name, layer) in enumerate(self.layers.items()):
            if int(name) in chunk.layers:
                yield number, layer


def require_layers(recompute: Recompute, num_layers: int) -> None:
    """Raise ValueError for numbers of layers that the model does not have."""
    if not isinstance(recompute, str | None) and (beyond := set(recompute) - set(range(num_layers))):
        raise ValueError(f"recompute: there are no layers {sorted(beyond)}; the model has 0..{num_layers - 1}")


def _recompute(layer: nn.Module, number: int, recompute: Recompute) -> None:
    """Let a layer, or its MLP, save its input alone.

    Inside the module's hooks: FSDP2 gathers its parameters once for the backward, the second run included.
    """
    if recompute is None:
        return
    if recompute == "selective":
        layer = layer.get_submodule("mlp")
    elif recompute != "full" and number not in recompute:
        return
    layer.forward = partial(checkpoint, layer.forward)
