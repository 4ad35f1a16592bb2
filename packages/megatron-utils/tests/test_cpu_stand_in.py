import torch

from megatron_utils.testing import cpu_stand_in


def test_torch_compile_can_be_used_first_inside_it() -> None:
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()
    with cpu_stand_in():
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(())) == 1
    trace_rules.clear_lru_cache()
