"""The engine on parallel-layers: FSDP2, tensor, context, expert and pipeline parallelism."""
