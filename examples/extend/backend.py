"""A backend: a transformers model as it is, one sequence at a time. It scores and learns; an engine draws for it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import ckpt
from ckpt import Block, Checkpoint
from ckpt.layout import HubLayout
from parallel_models import CacheOptions, Decoding, Engine, EngineOptions, MicroBatch, Outputs, Role, Shards
from parallel_models.engine import Loss
from parallel_models.optimizers import ShardOptimizer
from parallel_models.training import backward_each, drop_gradients, forward_each
from rl_models import Grid, OptimizerOptions
from rl_models.backends import Backend

ONE_DEVICE = "this backend computes on one device"
NOT_HERE = "this backend runs the model as it is"
LACKS = {
    **dict.fromkeys(("sequence_parallel", "pipeline", "context_parallel"), ONE_DEVICE),
    **dict.fromkeys(("recompute", "tiled_mlp", "offload_activations", "float8", "keep_probabilities"), NOT_HERE),
    **dict.fromkeys(("router_losses", "share_prefixes", "tp_invariant", "mtp_loss_scaling_factor", "lora"), NOT_HERE),
    "megatron": "these options are for backend='megatron'",
}
# The module with `load`, the forms of parallelism, the roles, and the fields of EngineOptions that are refused.
ONE_BY_ONE = Backend(__name__, axes=(), roles=("causal_lm",), lacks=LACKS)


class OneByOne(Engine):
    """A causal language model of transformers on one device."""

    routed_layers: Sequence[int] = ()
    num_experts = 0
    takes_sampling_mask = False

    def __init__(self, checkpoint: Checkpoint, grid: Grid, dtype: torch.dtype | None) -> None:
        self.config, self.grid = checkpoint.config, grid
        self.module = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype or "auto", trust_remote_code=False
        )
        self.module.to(grid.device).eval()
        self.vocab_size = self.module.config.vocab_size
        # A packed batch has no padding: the padding token of transformers learns like any other token.
        self.module.get_input_embeddings().padding_idx = None

    def _outputs(self, micro_batch: MicroBatch) -> Outputs:
        """Return the log-prob of the token after each token, and the entropy of that choice, `[T]` each."""
        log_probs: list[Tensor] = []
        entropies: list[Tensor] = []
        packed = micro_batch.packed
        for ids in packed.split(packed.input_ids):
            logits = self.module(ids[None]).logits[0].float() / micro_batch.temperature
            choices = logits.log_softmax(-1)
            of_next = choices[:-1].gather(1, ids[1:, None])[:, 0]
            log_probs.append(torch.cat([of_next, of_next.new_zeros(1)]))
            entropies.append(-(choices.exp() * choices).sum(-1))
        return torch.cat(log_probs), torch.cat(entropies)

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        return forward_each(self._outputs, self.module, micro_batches)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        backward_each(self._outputs, self.module, micro_batches, loss)

    def drop_gradients(self) -> None:
        drop_gradients(self.module)

    def build_optimizer(self, options: OptimizerOptions) -> ShardOptimizer:
        return ShardOptimizer(self.module, options, shards=self.shards())

    def shards(self) -> Shards:
        """Say which tensors of the checkpoint the parameters are: here each is one whole tensor."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        blocks = {name: Block.whole(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        prefix = type(self.module).__name__.removesuffix("ForCausalLM")
        return Shards(HubLayout(self.config, "causal_lm", prefix, blocks), [(ckpt.Place(), tensors)])

    def decoding(self, options: CacheOptions) -> AbstractContextManager[Decoding]:
        raise ValueError("this backend does not generate; take another engine by --rollouts module:function")


def load(checkpoint: Checkpoint, role: Role, grid: Grid, options: EngineOptions) -> OneByOne:
    """Load a checkpoint; the row above names this module."""
    return OneByOne(checkpoint, grid, options.dtype)
