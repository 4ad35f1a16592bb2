"""RotaryEmbedding against transformers' own rotary modules."""

import math

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from parallel_layers.rotary import apply_rotary, rotate_queries_and_keys, yarn_softmax_scale
from parallel_layers.rotary.embedding import RotaryEmbedding

HEAD_DIM = 16
MAX_POSITION = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PARAMETERS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-exact-range": YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn-deepseek": YARN | {"factor": None, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.5},
}


def config_of(parameters: dict, theta: float = 500.0) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(parameters) | {"rope_theta": theta},
    )


def ours_of(parameters: dict, theta: float = 500.0) -> RotaryEmbedding:
    return RotaryEmbedding(HEAD_DIM, theta, parameters, max_position_embeddings=MAX_POSITION)


@pytest.mark.parametrize("case", PARAMETERS)
def test_equals_transformers_for_one_sequence(case: str) -> None:
    rotary, theirs = ours_of(PARAMETERS[case]), LlamaRotaryEmbedding(config_of(PARAMETERS[case]))
    for length in (1, 20, 50, 64, 65, 300):
        position_ids = torch.arange(length)
        for mine, expected in zip(rotary(position_ids), theirs(torch.zeros(1), position_ids[None]), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PARAMETERS)
def test_equals_transformers_on_a_gpu(case: str) -> None:
    """For a model in bf16, and under autocast."""
    position_ids = torch.tensor([7, 0, 63, 64, 65, 299, 7], device="cuda")
    theirs, ours = LlamaRotaryEmbedding(config_of(PARAMETERS[case])).cuda(), ours_of(PARAMETERS[case]).cuda().bfloat16()
    expected = theirs(torch.zeros(1, device="cuda"), position_ids[None])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        tables = ours(position_ids)
    for mine, table in zip(tables, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, table[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", PARAMETERS)
def test_explicit_positions_equal_transformers(case: str) -> None:
    """Late positions, positions in any order, and positions far beyond the maximum."""
    rotary = ours_of(PARAMETERS[case])
    for position_ids in (range(40, 80), [90, 3, 3, 0, 64, 5], range(131052, 131072), [1_000_000, 7, 999_999]):
        positions = torch.tensor(position_ids)
        theirs = LlamaRotaryEmbedding(config_of(PARAMETERS[case]))(torch.zeros(1), positions[None])
        for mine, expected in zip(rotary(positions), theirs, strict=True):
            torch.testing.assert_close(mine, expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", PARAMETERS)
def test_cos_and_sin_are_fp32_for_every_default_dtype(case: str) -> None:
    """Build the module under another default dtype and call it under autocast: the same bits."""
    positions = torch.arange(90)
    expected = ours_of(PARAMETERS[case])(positions)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                tables = ours_of(PARAMETERS[case]).to(dtype)(positions)
        finally:
            torch.set_default_dtype(torch.float32)
        for mine, table in zip(tables, expected, strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, table)


def test_position_ids_are_honoured_in_any_order() -> None:
    rotary = ours_of(LLAMA3)
    position_ids = torch.tensor([5, 0, 1000, 5, 63])
    cos, _ = rotary(position_ids)
    table, _ = rotary(torch.arange(1001))
    assert torch.equal(cos, table[position_ids])


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_partial_rotary(rope_type: str) -> None:
    parameters = PARAMETERS[rope_type] | {"partial_rotary_factor": 0.5}
    config = PhiConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=parameters | {"rope_theta": 500.0},
    )
    config.head_dim = HEAD_DIM
    position_ids = torch.arange(100)
    expected = PhiRotaryEmbedding(config)(torch.zeros(1), position_ids[None])
    cos, sin = ours_of(parameters)(position_ids)
    assert cos.shape == (100, HEAD_DIM // 2)
    torch.testing.assert_close(cos, expected[0][0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(sin, expected[1][0], rtol=1e-6, atol=1e-5)

    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial

    q, k = torch.randn(100, 4, HEAD_DIM), torch.randn(100, 2, HEAD_DIM)
    their_q, their_k = apply_partial(q[None], k[None], expected[0], expected[1], unsqueeze_dim=2)
    torch.testing.assert_close(apply_rotary(q, cos, sin), their_q[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(apply_rotary(k, cos, sin), their_k[0], rtol=1e-6, atol=1e-5)


def test_the_original_length_may_stand_beside_the_rope_parameters() -> None:
    config = {"head_dim": HEAD_DIM, "max_position_embeddings": MAX_POSITION, "rope_theta": 500.0}
    config["original_max_position_embeddings"] = 16
    for inside in (None, 16):
        scaling = YARN | {"original_max_position_embeddings": inside}
        ours = RotaryEmbedding.from_config(config | {"rope_scaling": scaling})
        assert torch.equal(ours.inv_freq, ours_of(YARN).inv_freq)
    with pytest.raises(
        ValueError, match="embeddings=48 and original_max_position_embeddings=16, two names of one value"
    ):
        RotaryEmbedding.from_config(config | {"rope_scaling": YARN | {"original_max_position_embeddings": 48}})


@pytest.mark.parametrize("case", ["yarn", "llama3"])
def test_without_an_original_length_the_maximum_is_it(case: str) -> None:
    parameters = {name: value for name, value in PARAMETERS[case].items() if name != "original_max_position_embeddings"}
    config = config_of(parameters)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(100)[None])
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITION}
    as_in_file = sizes | {"rope_parameters": parameters | {"rope_theta": 500.0}}
    for mine, table in zip(RotaryEmbedding.from_config(as_in_file)(torch.arange(100)), expected, strict=True):
        torch.testing.assert_close(mine, table[0], rtol=1e-6, atol=1e-6)


def test_rotation_equals_transformers() -> None:
    cos, sin = ours_of(LLAMA3)(torch.arange(12))
    q, k = torch.randn(12, 4, HEAD_DIM), torch.randn(12, 2, HEAD_DIM)
    their_q, their_k = apply_rotary_pos_emb(q[None], k[None], cos[None], sin[None], unsqueeze_dim=2)
    torch.testing.assert_close(apply_rotary(q, cos, sin), their_q[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(apply_rotary(k, cos, sin), their_k[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("family", "partial"), [("glm", 0.5), ("glm", 1.0), ("cohere", 1.0)])
def test_interleaved_rotation_equals_transformers(family: str, partial: float) -> None:
    cos, sin = ours_of(LLAMA3 | {"partial_rotary_factor": partial})(torch.arange(12))
    q, k = torch.randn(12, 4, HEAD_DIM), torch.randn(12, 2, HEAD_DIM)
    tables = (cos, sin)
    if family == "cohere":
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply

        tables = tuple(table[:, : HEAD_DIM // 2].repeat_interleave(2, dim=-1) for table in tables)
    else:
        from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply
    theirs = apply(q[None], k[None], *(table[None] for table in tables), unsqueeze_dim=2)
    for mine, expected in zip(rotate_queries_and_keys(q, k, cos, sin, interleaved=True), theirs, strict=True):
        torch.testing.assert_close(mine, expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_computed_in_fp32_and_rounded_once(interleaved: bool) -> None:
    cos, sin = ours_of(LLAMA3)(torch.arange(100, 112))
    x = torch.randn(12, 4, HEAD_DIM, dtype=torch.bfloat16)
    rounded = apply_rotary(x.float(), cos, sin, interleaved=interleaved).bfloat16()
    assert torch.equal(apply_rotary(x, cos, sin, interleaved=interleaved), rounded)
    assert apply_rotary(x.double(), cos, sin).dtype == torch.float64


def test_frequencies_survive_casts_moves_and_materialisation() -> None:
    expected = ours_of(LLAMA3).inv_freq
    with torch.device("meta"):
        built_on_meta = ours_of(LLAMA3)
    for rotary in (ours_of(LLAMA3).bfloat16(), ours_of(LLAMA3).to_empty(device="cpu"), built_on_meta):
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, expected)
    assert ours_of(LLAMA3).to("meta").inv_freq.is_meta
    assert torch.equal(ours_of(LLAMA3).to("meta").to_empty(device="cpu").inv_freq, expected)
    assert not ours_of(LLAMA3).state_dict()


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}},
        },
    ],
)
def test_from_config(config: dict) -> None:
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": MAX_POSITION}
    rotary = RotaryEmbedding.from_config(sizes | config)
    assert torch.equal(rotary.inv_freq, ours_of(LLAMA3).inv_freq)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {"rope_type": "default"},
        YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
        YARN | {"factor": 0.5, "mscale_all_dim": 1.0},
        YARN,
    ],
)
def test_deepseek_scale_and_rotary_dims(parameters: dict | None) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=4,
        qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=4, rope_parameters=parameters and dict(parameters),
    )  # fmt: skip
    assert yarn_softmax_scale(16, parameters) == pytest.approx(DeepseekV3Attention(config, 0).scaling, rel=1e-12)
    as_in_file = {name: value for name, value in config.to_dict().items() if name != "head_dim"}
    assert RotaryEmbedding.from_config(as_in_file).inv_freq.shape == (2,)


def test_tables_of_other_tokens_are_refused() -> None:
    """As on CUDA: a table of one token would turn all of them alike."""
    x, (cos, sin) = torch.randn(3, 2, HEAD_DIM), RotaryEmbedding(HEAD_DIM)(torch.arange(3))
    for tables in ((cos[:1], sin[:1]), (cos[:2], sin[:2]), (cos, sin[:1]), (cos[:, :5], sin[:, :5])):
        with pytest.raises(ValueError, match=r"must be \[3, D\] with one even D <= 16"):
            apply_rotary(x, *tables)
        with pytest.raises(ValueError, match=r"must be \[3, D\] with one even D <= 16"):
            rotate_queries_and_keys(x, x, *tables)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"mscale_all_dim=1.0 needs the rope parameter 'factor'"):
        yarn_softmax_scale(16, {"rope_type": "yarn", "mscale_all_dim": 1.0})
    with pytest.raises(ValueError, match=r"rope_type='nope' is unknown; known types: default, linear, llama3, longr"):
        RotaryEmbedding(HEAD_DIM, parameters={"rope_type": "nope"})
    with pytest.raises(ValueError, match=r"short_factor=\[1.0, 1.0, 1.0\] must be 8 numbers, because 16 dims rotate"):
        RotaryEmbedding(HEAD_DIM, parameters={"rope_type": "su", "short_factor": [1.0] * 3})
    for parameters, message in (
        ({"rope_type": ["linear"]}, r"rope_type=\['linear'\] is unknown"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2' must be a number above 0; write factor as a number"),
        ({"rope_type": "linear", "factor": 0}, "factor=0 must be a number above 0"),
        ({"rope_type": "linear", "factor": math.nan}, "factor=nan must be a number above 0"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": "1"}, "mscale='1' must be a number of at least 0"),
        ({"rope_type": "longrope", "short_factor": "2"}, "short_factor='2' must be 8 numbers"),
        ({"rope_type": "longrope", "short_factor": ["2"] * 8}, "must be 8 numbers, because 16 dims rotate"),
        ({"partial_rotary_factor": 2.0}, "= 32 rotary dims; need an even number > 0, at most head_dim"),
    ):
        with pytest.raises(ValueError, match=message):
            RotaryEmbedding(HEAD_DIM, parameters=parameters)
    with pytest.raises(ValueError, match="max_position_embeddings='64' must be a number above 0"):
        RotaryEmbedding(HEAD_DIM, max_position_embeddings="64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="factor='4' must be a number above 0"):
        yarn_softmax_scale(16, {"rope_type": "yarn", "mscale_all_dim": 1.0, "factor": "4"})
    with pytest.raises(ValueError, match=r"rope_type='linear' needs 'factor'"):
        RotaryEmbedding(HEAD_DIM, parameters={"rope_type": "linear"})
    with pytest.raises(ValueError, match=r"needs 'original_max_position_embeddings'"):
        RotaryEmbedding(HEAD_DIM, parameters={"rope_type": "yarn"})
    with pytest.raises(ValueError, match=r"theta=1.0 but the rope parameters say rope_theta=2.0"):
        RotaryEmbedding(HEAD_DIM, 1.0, {"rope_theta": 2.0})
    with pytest.raises(ValueError, match=r"= 7 rotary dims"):
        RotaryEmbedding(7)
    with pytest.raises(ValueError, match=r"position_ids \[3, 4\] must be \[T\]"):
        RotaryEmbedding(HEAD_DIM)(torch.zeros(3, 4, dtype=torch.int64))
    by_type = {"full_attention": LLAMA3, "sliding_attention": {"rope_theta": 1.0}}
    with pytest.raises(ValueError, match=r"by layer type, full_attention, sliding_attention; build one module from"):
        RotaryEmbedding.from_config({"head_dim": HEAD_DIM, "rope_parameters": by_type})


def test_each_frequency_rotates_by_its_own_axis() -> None:
    rotary = RotaryEmbedding(8, axes=[0, 2, 1, 0])
    positions = torch.tensor([[3, 4], [10, 11], [20, 22]])
    angles = rotary.angles(positions)
    for frequency, axis in enumerate([0, 2, 1, 0]):
        own = rotary.angles(positions[axis])
        assert torch.equal(angles[:, [frequency, frequency + 4]], own[:, [frequency, frequency + 4]])
    with torch.device("meta"):
        moved = RotaryEmbedding(8, axes=[0, 2, 1, 0])
    assert torch.equal(moved.to_empty(device="cpu").angles(positions), angles)
    with pytest.raises(ValueError, match="given for 3 frequencies, and 8 rotary dims have 4"):
        RotaryEmbedding(8, axes=[0, 1, 2])
    with pytest.raises(ValueError, match=r"position_ids \[3, 2\] must be \[T\]"):
        RotaryEmbedding(8)(positions)
