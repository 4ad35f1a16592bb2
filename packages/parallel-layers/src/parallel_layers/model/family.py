"""`Family`: one row of the table of model families, which turns a Hugging Face config into fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel_layers.model.fields import (
    Config,
    Field,
    count,
    count_or_zero,
    flag,
    indices,
    name,
    names,
    number,
    read,
)
from parallel_layers.rotary.rope_types import stated_parameters

# Every family's entries, unless its row has others.
_DECODER: dict[str, Any] = {
    "hidden_size": count("hidden_size"),
    "num_heads": count("num_attention_heads"),
    "num_kv_heads": count("num_key_value_heads", default=count("num_attention_heads")),
    "head_dim": count("head_dim", default=None),
    "intermediate_size": count("intermediate_size"),
    "norm_eps": number("rms_norm_eps"),
    "activation": name("hidden_act", default="silu"),
}
# Beside the base and the parameters of the rotation.
_ROPE_FIELDS = (
    *("head_dim", "hidden_size", "num_attention_heads", "qk_rope_head_dim"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)


@dataclass(frozen=True)
class SlidingWindow:
    """The rule by which the configs of a family give layers a sliding window.

    Attributes:
        default: Tokens where a config has no `sliding_window`; None: full attention.
        switched: The window exists only with `use_sliding_window`.
        layers: A function of a config and the number of layers, which says for each layer whether it has the window
            where the config has no `layer_types`. None: all layers have the window, and `layer_types` is ignored.
        full_last: The last layer has full attention, even if the config says otherwise (Gemma 4).
    """

    default: int | None = None
    switched: bool = False
    layers: Callable[[Config, int], Sequence[bool]] | None = None
    full_last: bool = False


@dataclass(frozen=True)
class Sections:
    """The rule by which positions of three axes (time, height, width) rotate queries and keys (M-RoPE).

    Attributes:
        sizes: The frequencies of each axis where a config has no `mrope_section`.
        interleaved: The axes alternate from frequency to frequency (Qwen3-VL), instead of one block each.
    """

    sizes: tuple[int, int, int]
    interleaved: bool = False

    def axes(self, parameters: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the axis of each frequency, under the rope parameters of a config."""
        sizes = indices("mrope_section", default=self.sizes)(parameters)
        if len(sizes) != 3 or min(sizes) < 0:
            raise ValueError(f"mrope_section={[*sizes]} must be three sizes: time, height and width")
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(sizes) for _ in range(size))
        axes = [0] * sum(sizes)
        for axis in (1, 2):
            turns = slice(axis, 3 * sizes[axis], 3)
            axes[turns] = [axis] * len(axes[turns])
        return tuple(axes)


def _every_interval(config: Config, num_layers: int) -> list[bool]:
    """Give each `full_attention_interval`th layer full attention, as Qwen3-Next."""
    period = count("full_attention_interval", default=4)(config)
    return [(i + 1) % period == 0 for i in range(num_layers)]


@dataclass(frozen=True)
class Family:
    """A row of `FAMILIES`: an architecture.

    Attributes:
        name: The `model_type` of its configs.
        class_prefix: "Llama" stands for LlamaForCausalLM, LlamaForTokenClassification, ...
        decoder: Fields of `DecoderConfig`, which add to `_DECODER` and override it.
        latent: Fields of `LatentConfig` (multi-head latent attention); None: ordinary attention.
        moe: Fields of `MoEConfig`; None: no layer is a mixture of experts.
        mixtures: A function of a config and the number of layers, which says for each layer whether it is a mixture of
            experts; None: the layers that `experts` names.
        window: The sliding windows; None: full attention in all layers.
        rope_theta: The base of the rotation where a config has none.
        rope_parameters: The rope parameters where a config has none.
        partial_rotary_factor: The rotated part of a head where a config has none; None: the whole head, also where a
            config says otherwise, which is refused.
        linear: A function of a config, which gives the fields of `DecoderConfig` in which layers with linear attention
            differ; None: there are none.
        one_mixer: Each layer has one mixer, by its type in `layer_types`: attention, linear attention, "mlp" or "moe".
        attends: With `linear`, a function of a config and the number of layers, which says for each layer whether it
            has full attention where the config has no `layer_types`.
        sliding_rope: The rope parameters of the layers with sliding attention, where a config has one set for all
            layers; None: that set.
        rotated: A function of a config and the windows of the layers, which says for each layer whether it rotates
            queries and keys; None: all do.
        of_layers: A function of a config and of `sliding`, which gives for each layer the fields of `DecoderConfig`
            that differ from the others; None: there are none.
        model: Fields of `ModelConfig`: `embedding_scale`, `logit_scale`, `logit_softcap`, `per_layer_vocab_size`.
        tied: The head is the embedding where a config does not say.
        sections: The text part of a vision-language model, whose fields are read from `text_config` before the outer
            fields, and the sections of its rotation; None: a model of text alone.
        nested: As `sections`, for a vision-language model whose text part is a text model.
        ties: With `sections` or `nested`, the config whose `tie_word_embeddings` counts. "either": the config and its
            `text_config` can both tie the embeddings. "outer": only the config can. "first": the config, or else its
            `text_config`.
        also_read: Further fields of configs that functions of the row read.
        derived: A function of a config, which gives fields that the config states in another way.
    """

    name: str
    class_prefix: str
    decoder: Mapping[str, Any] = field(default_factory=dict)
    latent: Mapping[str, Any] | None = None
    moe: Mapping[str, Any] | None = None
    mixtures: Callable[[Config, int], Sequence[bool]] | None = None
    window: SlidingWindow | None = None
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary_factor: Any = None
    linear: Callable[[Config], Mapping[str, Any]] | None = None
    one_mixer: bool = False
    attends: Callable[[Config, int], Sequence[bool]] = _every_interval
    sliding_rope: Callable[[Config], Mapping[str, Any]] | None = None
    rotated: Callable[[Config, Sequence[int | None]], Sequence[bool]] | None = None
    of_layers: Callable[[Config, Sequence[bool]], Sequence[Mapping[str, Any]]] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    sections: Sections | None = None
    nested: bool = False
    ties: Literal["either", "outer", "first"] = "either"
    also_read: tuple[str, ...] = ()
    derived: Callable[[Config], Mapping[str, Any]] = lambda config: {}

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoder", {**_DECODER, **self.decoder})

    @property
    def has_vision(self) -> bool:
        """True if the row describes the text part of a vision-language model."""
        return self.nested or self.sections is not None

    @property
    def reads(self) -> frozenset[str]:
        """The config fields that the row reads."""
        rows = (self.decoder, self.latent or {}, self.moe or {}, self.model)
        entries = [entry for row in rows for entry in row.values()]
        return frozenset(self.also_read).union(*(entry.names for entry in entries if isinstance(entry, Field)))

    def fields(self, config: Config) -> Config:
        """Return the fields of the language model."""
        text = config.get("text_config")
        if not self.has_vision or not isinstance(text, Mapping):
            return {**config, **self.derived(config)}
        outer, inner = (fields.get("tie_word_embeddings") for fields in (config, text))
        either = outer if inner is None else outer or inner
        stated = {"either": either, "outer": outer, "first": inner if outer is None else outer}
        return {**config, **text, "tie_word_embeddings": stated[self.ties]}

    def sliding(self, config: Config, num_layers: int) -> tuple[bool, ...]:
        """Return for every layer whether it is one of sliding attention.

        Raises:
            ValueError: A layer type that the family does not have, or a number of types other than the number of
                layers.
        """
        other = () if self.window is None else ("sliding_attention",)
        kinds = ("full_attention", *other, *(() if self.linear is None else ("linear_attention",)))
        kinds += ("mlp", "moe") if self.one_mixer else ()
        types = _of_layers("layer_types", kinds, self.name, config, num_layers)
        if self.window is None:
            return (False,) * num_layers
        if self.window.layers is None:
            return (True,) * num_layers
        sliding = tuple(self.window.layers(config, num_layers) if types is None else types)
        return (*sliding[:-1], False) if self.window.full_last else sliding

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the sliding window of every layer in tokens, None for full attention; raise as `sliding`."""
        sliding = self.sliding(config, num_layers)
        rule = self.window
        # A null window is none.
        if rule is None or config.get("sliding_window", rule.default) is None:
            return (None,) * num_layers
        if rule.switched and not flag("use_sliding_window")(config):
            return (None,) * num_layers
        window = count("sliding_window", default=rule.default)(config)
        return tuple(window if slides else None for slides in sliding)

    def own_fields(self, config: Config, num_layers: int) -> tuple[Mapping[str, Any], ...]:
        """Return for every layer the fields of `DecoderConfig` that differ from the others; raise as `sliding`."""
        sliding = self.sliding(config, num_layers)
        if self.linear is not None:
            types = names("layer_types")(config)
            if self.one_mixer:
                attention: dict[str, Any] = {"mixer": "attention"}
                fields = {"full_attention": attention, "linear_attention": {**attention, **self.linear(config)}}
                return tuple(fields.get(kind, {"mixer": "mlp"}) for kind in types)
            full = [kind == "full_attention" for kind in types] or self.attends(config, num_layers)
            linear = self.linear(config)
            return tuple({} if attends else linear for attends in full)
        return ({},) * num_layers if self.of_layers is None else tuple(self.of_layers(config, sliding))

    def experts(self, config: Config, num_layers: int) -> tuple[dict[str, Any] | None, ...]:
        """Return the fields of `MoEConfig` for every layer, None for an MLP.

        Without `mixtures` these are the "sparse" layers of `mlp_layer_types`, or without it the layers from
        `first_k_dense_replace` on, every `decoder_sparse_step`th of them, without `mlp_only_layers`.
        """
        if self.moe is None or not read(self.moe["num_experts"], config):
            return (None,) * num_layers
        mixtures: Sequence[bool] | None
        if self.mixtures is not None:
            mixtures = self.mixtures(config, num_layers)
        else:
            mixtures = _of_layers("mlp_layer_types", ("dense", "sparse"), self.name, config, num_layers)
        if mixtures is None:
            num_dense, step = (count_or_zero(name)(config) for name in ("first_k_dense_replace", "decoder_sparse_step"))
            dense = indices("mlp_only_layers")(config)
            mixtures = [i >= num_dense and i not in dense and (i + 1) % (step or 1) == 0 for i in range(num_layers)]
        fields = values(self.moe, config)
        return tuple(fields if mixture else None for mixture in mixtures)

    def ropes(self, config: Config, num_layers: int) -> tuple[dict[str, Any] | None, ...]:
        """Return for every layer the fields that `RotaryEmbedding.from_config` reads, stated or not; None: no rotation.

        Raises:
            ValueError: A rope parameter has an unusable value, the config states a parameter twice with different
                values or a part of a head that the family does not have, or the rope parameters are by layer type, and
                the family has no layer types.
        """
        stated = stated_parameters(config) or self.rope_parameters
        kinds: list[Mapping[str, Any]]
        if self.sliding_rope is None:
            kinds = [stated] * 2
        elif "full_attention" in stated or "sliding_attention" in stated:
            by_kind = (stated.get(kind) for kind in ("full_attention", "sliding_attention"))
            kinds = [stated_parameters({"rope_parameters": parameters}) for parameters in by_kind]
        else:
            kinds = [stated, self.sliding_rope(config)]
        windows = self.windows(config, num_layers)
        rotated = [True] * num_layers if self.rotated is None else self.rotated(config, windows)
        layers = zip(self.sliding(config, num_layers), rotated, self.own_fields(config, num_layers), strict=True)
        return tuple(
            self._rope({**config, **fields}, kinds[slides]) if rotates and "linear_attention" not in fields else None
            for slides, rotates, fields in layers
        )

    def _rope(self, config: Config, parameters: Mapping[str, Any]) -> dict[str, Any]:
        default = 1.0 if self.partial_rotary_factor is None else self.partial_rotary_factor
        partial = number("partial_rotary_factor", default=number("partial_rotary_factor", default=default)(config))(
            parameters
        )
        if self.partial_rotary_factor is None and partial != 1:
            raise ValueError(
                f"the config's partial_rotary_factor={partial} changes the numbers, and {self.name} rotates whole "
                "heads; remove partial_rotary_factor"
            )
        theta = number("rope_theta", default=number("rope_theta", default=self.rope_theta)(config))(parameters)
        rotation: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": partial}
        if self.sections is not None:
            rotation["position_axes"] = self.sections.axes(parameters)
            if parameters.get("rope_type", parameters.get("type")) == "mrope":
                parameters = {**parameters, "rope_type": "default"}
        rotation["rope_parameters"] = dict(parameters)
        return {name: config.get(name) for name in _ROPE_FIELDS} | rotation


def values(entries: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the entries of a row under a config."""
    return {name: read(value, config) for name, value in entries.items()}


def _of_layers(field: str, kinds: tuple[str, ...], family: str, config: Config, num_layers: int) -> list[bool] | None:
    """Say for each layer whether `field` gives it the last known type; None if the config has no such field."""
    types = names(field)(config)
    if unknown := sorted(set(types) - set(kinds)):
        raise ValueError(f"the config's {field} {unknown} are not known for {family}; use {sorted(kinds)}")
    if types and len(types) != num_layers:
        raise ValueError(
            f"the config's {field} name {len(types)} layers, but num_hidden_layers={num_layers}; write one type for "
            "each layer"
        )
    return [kind == kinds[-1] for kind in types] if types else None
