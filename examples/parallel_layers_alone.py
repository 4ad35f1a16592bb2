"""Train a small decoder of parallel-layers with tensor and sequence parallelism, on packed sequences.

    torchrun --nproc-per-node 4 examples/parallel_layers_alone.py

This program needs torch and parallel-layers only. The task: token t + 1 follows token t.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_layers import (
    DecoderConfig,
    DecoderLayer,
    PackedSequence,
    ParallelDims,
    Placement,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    clip_grad_norm_,
    initialize_,
    next_token_labels,
)

VOCAB, HIDDEN = 64, 64
CONFIG = DecoderConfig(hidden_size=HIDDEN, num_heads=4, num_kv_heads=4, head_dim=16, intermediate_size=128)


# --8<-- [start:model]
class Model(nn.Module):
    """Two layers; each rank of the group holds its shards of them, and T/tp tokens between them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        options = {"group": group, "sequence_parallel": True}
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, **options)
        self.layers = nn.ModuleList(DecoderLayer(CONFIG, placement=Placement(group, True)) for _ in range(2))
        self.norm = RMSNorm(HIDDEN, **options)
        self.rotary = RotaryEmbedding(16)
        self.head = VocabParallelHead(HIDDEN, VOCAB, allocate_weight=False, **options)  # tied to the embedding

    def forward(self, packed: PackedSequence) -> Tensor:
        """Log-probability of each token's successor, `[T]`; 0 at the end of a sequence."""
        rotary = self.rotary(packed.position_ids)
        hidden = self.embedding(packed.input_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, packed.cu_seqlens, packed.max_seqlen)
        # The head computes log-probs without the logits [T, V].
        return self.head(self.norm(hidden), next_token_labels(packed), self.embedding.weight, entropy=False).log_probs


# --8<-- [end:model]


def main(steps: int = 30) -> None:
    # --8<-- [start:group]
    mesh = ParallelDims(tp=dist.get_world_size()).build_mesh("cpu")
    group = mesh.get_group("tp")
    model = Model(group)
    initialize_(model, seed=0, std=0.1)  # the same weights on every grid
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # --8<-- [end:group]
    generator = torch.Generator().manual_seed(0)  # the same batch on every rank of the group
    # --8<-- [start:step]
    for step in range(steps):
        starts = torch.randint(VOCAB, (8,), generator=generator).tolist()
        rows = [(start + torch.arange(length)) % VOCAB for start, length in zip(starts, range(5, 13), strict=True)]
        packed = PackedSequence.from_sequences(rows, multiple_of=group.size())
        loss = -model(packed).sum() / sum(len(row) - 1 for row in rows)
        loss.backward()
        clip_grad_norm_(model, 1.0, groups=[group])
        optimizer.step()
        optimizer.zero_grad()
        # --8<-- [end:step]
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
