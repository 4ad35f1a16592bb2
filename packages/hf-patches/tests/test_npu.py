"""The Ascend adapter, with a stand-in for torch_npu that records its calls and computes the same mathematics."""

import sys
from types import SimpleNamespace

import pytest
import torch
from comparing import OLD, assert_gradients_equal, gradients, scalar_loss
from torch.nn import functional

from hf_patches import patch
from hf_patches.testing.tiny_models import (
    one_by_one,
    random_sequences,
    tiny_model,
)
from parallel_layers import PackedSequence

LENGTHS = (11, 1, 17, 6)


class Recorder:
    """A stand-in that computes what the operators document; `calls` holds the names of the called ones."""

    def __init__(self):
        self.calls = []

    def npu_rms_norm(self, x, gamma, epsilon=1e-6):
        self.calls.append("npu_rms_norm")
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
        return (x.float() * inverse * gamma.float()).to(x.dtype), inverse

    def npu_swiglu(self, x, dim=-1):
        self.calls.append("npu_swiglu")
        gate, up = x.chunk(2, dim=dim)
        return functional.silu(gate) * up

    def npu_rotary_mul(self, x, cos, sin):
        self.calls.append("npu_rotary_mul")
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def npu_grouped_matmul(self, x, weight, *, bias, group_list, group_list_type, split_item, group_type):
        assert bias is None
        assert group_list_type == 1
        (x,), (weight,) = x, weight
        sizes = group_list.tolist()
        if group_type == 0:
            self.calls.append("npu_grouped_matmul")
            assert split_item == 2
            return [torch.cat([rows @ w for rows, w in zip(x.split(sizes), weight, strict=True)])]
        assert (group_type, split_item) == (2, 3)
        self.calls.append("npu_grouped_matmul of a weight's gradient")
        return [torch.stack([a @ b for a, b in zip(x.split(sizes, dim=1), weight.split(sizes), strict=True)])]

    def npu_fusion_attention(
        self,
        query,
        key,
        value,
        head_num,
        input_layout,
        *,
        atten_mask,
        scale,
        keep_prob,
        actual_seq_qlen,
        actual_seq_kvlen,
        sparse_mode,
        pre_tockens=2147483647,
        next_tockens=2147483647,
    ):
        self.calls.append("npu_fusion_attention")
        assert (input_layout, head_num, keep_prob) == ("TND", query.shape[1], 1.0)
        assert atten_mask.shape == (2048, 2048)
        assert atten_mask[0, 1]
        assert not atten_mask[1, 1]
        outputs, q_start, k_start = [], 0, 0
        repeats = head_num // key.shape[1]
        for q_end, k_end in zip(actual_seq_qlen, actual_seq_kvlen, strict=True):
            q = query[q_start:q_end].transpose(0, 1)
            k, v = (x[k_start:k_end].repeat_interleave(repeats, dim=1).transpose(0, 1) for x in (key, value))
            distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
            hidden = distance < 0 if sparse_mode == 3 else (distance > pre_tockens) | (distance < -next_tockens)
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
            q_start, k_start = q_end, k_end
        return torch.cat(outputs), None


@pytest.fixture
def recorder(monkeypatch):
    stand_in = Recorder()
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    return stand_in


COMMON = {"npu_rms_norm", "npu_fusion_attention"}
EXPERTS = {"npu_grouped_matmul", "npu_grouped_matmul of a weight's gradient"}


@pytest.mark.parametrize(
    ("model_type", "operators"),
    [
        ("llama", COMMON | {"npu_swiglu", "npu_rotary_mul"}),
        ("qwen2", COMMON | {"npu_swiglu", "npu_rotary_mul"}),
        ("phi3", COMMON | {"npu_swiglu", "npu_rotary_mul"}),
        ("glm4", COMMON | {"npu_swiglu"}),  # its rotation is interleaved
        ("gemma3_text", COMMON | {"npu_rotary_mul"}),  # its gate is a GELU
        ("qwen3_moe", COMMON | {"npu_swiglu", "npu_rotary_mul"} | EXPERTS),
        ("deepseek_v3", COMMON | {"npu_swiglu"} | EXPERTS),
    ][: 5 if OLD else None],  # older experts do not say which form they have, and keep their code
)
def test_the_same_numbers_through_the_operators(recorder, model_type, operators):
    model = tiny_model(model_type)
    sequences = random_sequences(LENGTHS, 61)
    expected = one_by_one(model, sequences)
    scalar_loss(expected).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    assert recorder.calls == []
    patched = patch(model, npu=True)
    recorder.calls.clear()
    output = model(packed=PackedSequence.from_sequences(sequences))
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=3e-5, rtol=0)
    scalar_loss(output).backward()
    assert_gradients_equal(gradients(model), expected_gradients)
    assert set(recorder.calls) == operators
    assert recorder.calls.count("npu_fusion_attention") == model.config.num_hidden_layers
    assert "npu_rms_norm" in str(patched.report())
    patched.remove()
    recorder.calls.clear()
    model(input_ids=sequences[0][None])
    assert recorder.calls == []


def test_another_instance_is_left_alone(recorder):
    model, other = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    patch(model, npu=True)
    recorder.calls.clear()
    patch(other)
    other(packed=PackedSequence.from_sequences(random_sequences(LENGTHS, 61)))
    assert recorder.calls == []


def test_refused_by_name_without_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    model = tiny_model("llama")
    with pytest.raises(ImportError, match="npu=True needs the package torch_npu"):
        patch(model, npu=True)
    patch(model)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_swiglu=None, npu_rms_norm=None))
    with pytest.raises(ImportError, match="torch_npu has no npu_rotary_mul, npu_grouped_matmul"):
        patch(tiny_model("llama"), npu=True)


def test_an_operator_that_computes_something_else_is_found(recorder):
    recorder.npu_swiglu = lambda x, dim=-1: x.chunk(2, dim=dim)[0]
    with pytest.raises(RuntimeError, match="the NPU operator for LlamaMLP is off by"):
        patch(tiny_model("llama"), npu=True)


def test_what_the_operators_lack_is_refused(recorder):
    with pytest.raises(ValueError, match="neither soft-cap nor sinks"):
        patch(tiny_model("gemma2"), npu=True)
    with pytest.raises(ValueError, match="npu=True brings its own packed attention"):
        patch(tiny_model("llama"), npu=True, packed=False)
    with pytest.raises(ValueError, match="give the parameters values first"):
        patch(tiny_model("llama").to("meta"), npu=True)
