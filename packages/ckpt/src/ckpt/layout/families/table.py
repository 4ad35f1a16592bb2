"""The dataclasses of a family's entry.

A `Row` lists canonical (Hugging Face) tensors with their shapes in the config's symbols, how each is split, and the
name of the local tensor on each target:

    Row({"self_attn.q_proj.weight": "Q/tp H",
         "self_attn.k_proj.weight": "KV/tp H",
         "self_attn.v_proj.weight": "KV/tp H"},
        "self_attention.linear_qkv.weight", parallel="self_attn.qkv_proj.weight", megatron_order="groups")

Names in a layer count from `model.layers.I.` in files and on the native layers, and from `decoder.layers.I.` on
Megatron-Core; multi-token-prediction layers have the next numbers in files, and `mtp.layers.I.` on the native layers. A
shape is its dimensions, separated by spaces. A dimension is a symbol of `SIZES`, or a sum of symbols
("I+I"); `/tp`, `/etp`, `/ep` after a symbol splits it over that axis. The sources of one row are concatenated along
dimension 0. In names `{e}` is the expert in the model, `{j}` the expert on its rank. A row whose sources have `{e}` and
whose local name has no `{j}` stacks its experts in a leading dimension. A row whose local name alone has `{j}` has one
local tensor for each index of the source's leading dimension.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Role = Literal["causal_lm", "value", "causal_lm_with_value"]
Target = Literal["parallel", "megatron", "megatron_te"]
Layers = Literal["all", "dense", "wide", "moe", "sliding", "full", "linear", "reusing sliding", "reusing full"]
# What decides a flag of a family: a constant, a config field (absent: False), or a field and its default.
Flags = Mapping[str, bool | str | tuple[str, bool]]
ROLES: tuple[Role, ...] = get_args(Role)
TARGETS: tuple[Target, ...] = get_args(Target)
ROTARY_BUFFERS = r"(^|\.)rotary_emb\.inv_freq$"


@dataclass(frozen=True)
class Size:
    """A symbol: `count` units of `unit` elements; sharding never cuts a unit.

    Attributes:
        count: A sum of products of config fields, such as "n_shared_experts * moe_intermediate_size", or "1".
        unit: One unit's length, an expression like `count`.
        replicate: With more ranks than units, neighbouring ranks hold the same unit (key-value heads).
        pad: Counts that do not divide are padded with zeros up to a multiple of the ranks (the vocabulary).
    """

    count: str
    unit: str = "1"
    replicate: bool = False
    pad: bool = False

    @property
    def fields(self) -> set[str]:
        """The config fields that this size reads."""
        return {word for word in re.findall(r"\w+", f"{self.count} {self.unit}") if not word.isdigit()}


# The symbols of all families.
SIZES = {
    "V": Size("vocab_size", pad=True),
    "H": Size("hidden_size"),
    "HH": Size("hidden_size", unit="2"),
    "L": Size("num_labels"),  # the rows of a value head
    "ONE": Size("1"),
    # Attention: heads, queries, keys or values.
    "D": Size("head_dim"),
    "N": Size("num_attention_heads"),
    "Q": Size("num_attention_heads", unit="head_dim"),
    "KV": Size("num_key_value_heads", unit="head_dim", replicate=True),
    # Latent attention: latents of queries, and of keys and values; queries, keys and values, outputs.
    "A": Size("q_lora_rank"),
    "C": Size("kv_lora_rank"),
    "CR": Size("kv_lora_rank + qk_rope_head_dim"),
    "LQ": Size("num_attention_heads", unit="qk_nope_head_dim + qk_rope_head_dim"),
    "LKV": Size("num_attention_heads", unit="qk_nope_head_dim + v_head_dim"),
    "LO": Size("num_attention_heads", unit="v_head_dim"),
    # MLPs, experts and shared experts.
    "I": Size("intermediate_size"),
    "I2": Size("intermediate_size", unit="2"),
    "E": Size("num_experts"),
    "M": Size("moe_intermediate_size"),
    "S": Size("n_shared_experts * moe_intermediate_size"),
    "SE": Size("shared_expert_intermediate_size"),
    # Gated attention: queries with their gates, head by head.
    "Q2": Size("num_attention_heads", unit="2 * head_dim"),
    # Gated delta networks: queries or keys, values, value heads, a value head's size, the convolution's window.
    "DK": Size("linear_num_key_heads", unit="linear_key_head_dim"),
    "DV": Size("linear_num_value_heads", unit="linear_value_head_dim"),
    "DH": Size("linear_num_value_heads"),
    "DE": Size("linear_value_head_dim"),
    "DW": Size("linear_conv_kernel_dim"),
    # Kimi's delta attention: queries, keys or values, heads, a head's size; the shared experts.
    "KQ": Size("linear_num_heads", unit="linear_head_dim"),
    "KH": Size("linear_num_heads"),
    "KD": Size("linear_head_dim"),
    "KS": Size("num_shared_experts * moe_intermediate_size"),
    # Mamba-2: values, keys (B) or queries (C) of the groups, heads, the convolution's window; Granite's shared MLP.
    "MX": Size("mamba_num_heads", unit="mamba_head_dim"),
    "MG": Size("n_groups", unit="ssm_state_size", replicate=True),
    "MH": Size("mamba_num_heads"),
    "MW": Size("conv_kernel"),
    "SI": Size("shared_intermediate_size"),
    # Nemotron-H: inputs of routed experts, and shared experts.
    "MI": Size("moe_input_size"),
    "MS": Size("moe_shared_expert_intermediate_size"),
    # Gemma 4: layers with full attention, and embeddings of each layer.
    "GD": Size("global_head_dim"),
    "GQ": Size("num_attention_heads", unit="global_head_dim"),
    "GKV": Size("num_global_key_value_heads", unit="global_head_dim", replicate=True),
    "P": Size("hidden_size_per_layer_input"),
    "LP": Size("num_hidden_layers * hidden_size_per_layer_input"),
    "VP": Size("vocab_size_per_layer_input", pad=True),
}


@dataclass(frozen=True)
class Row:
    """A local tensor of a layer, an expert, or an end of the model, and the canonical tensors from which it is made.

    Attributes:
        sources: Canonical name -> shape, in the order in which the local tensor concatenates them.
        megatron: Local name in a Megatron-Core GPTModel of the local spec; empty: Megatron-Core has no such tensor, and
            a layout for Megatron-Core is refused.
        parallel: Local name on the native layers; empty: the only source's.
        megatron_te: Local name in the Transformer Engine spec; empty: as in the local spec.
        megatron_order: "parts": each source's shard follows the one before; "groups": Megatron's order of queries, keys
            and values, where each key-value group's query heads, key head and value head lie together.
        interleaved: A symbol: a source of several symbols ("I+I") has the rows of all of them for each unit of this
            symbol, and the local tensor has the rows of one symbol behind those of another. Empty: so has the source.
        where: "layers", or the pipeline end that holds the row: "first", "last". "chunk": every chunk holds the columns
            of its layers; `{first}` in the local name is the chunk's first layer. A row of each multi-token-prediction
            layer: "predicting", at the last end, or "predicting_first", at the first.
        layers: "all"; or only the layers that are "dense", "moe" or "wide" (an MLP of twice the width); or whose
            attention is "sliding", "full" or "linear", and "reusing" keys and values of an earlier layer.
        when: A flag of the family that must hold, or "not FLAG".
        roles: The roles that have this row.
        tied: "any", "yes": only with tied embeddings (at the last of several stages, the copy there), "no".
        optional: Whether a checkpoint and all ranks may lack the tensor.
        aliases: Other names under which a file may hold the (only) source, in a layer from the layer on.
        transposable: Whether files may hold the (only) source with its last two dimensions exchanged.
        equal_parts: Whether transformers divides the joined sources into parts of one size when it saves them, whatever
            sizes it has read (the convolutions of OLMo Hybrid).
        flat: The number of the source's first dimensions, all of them 1, that the local tensor lacks.
        keep_dtype: Whether casts leave this tensor as it is: fp32 beside weights of any dtype.
        targets: The targets that split the sources in this way; another row describes the other targets.
        copy_of: The canonical tensor that a model shares for the (only) source: files hold its values a second time.
    """

    sources: Mapping[str, str]
    megatron: str = ""
    parallel: str = ""
    megatron_te: str = ""
    megatron_order: Literal["parts", "groups"] = "parts"
    interleaved: str = ""
    where: Literal["layers", "first", "last", "chunk", "predicting", "predicting_first"] = "layers"
    layers: Layers = "all"
    when: str | None = None
    roles: tuple[Role, ...] = ROLES
    tied: Literal["any", "yes", "no"] = "any"
    optional: bool = False
    aliases: tuple[str, ...] = ()
    transposable: bool = False
    equal_parts: bool = False
    flat: int = 0
    keep_dtype: bool = False
    targets: tuple[Target, ...] = TARGETS
    copy_of: str | None = None

    def predicting(self, prefix: str) -> "Row":
        """Return the row of a multi-token-prediction layer, whose sources have this prefix."""
        sources = {prefix + name: shape for name, shape in self.sources.items()}
        local = self.parallel or next(iter(self.sources))
        return replace(self, where="predicting", sources=sources, parallel=local)

    @property
    def in_layer(self) -> bool:
        """Return whether names of the row begin with the number of a layer."""
        return self.where not in ("first", "last", "chunk")

    @property
    def of_experts(self) -> bool:
        """Return whether the row describes each routed expert."""
        return any("{e}" in source for source in self.sources)

    def local_name(self, target: Target, layer: int, index: int) -> str:
        """Return the local name on `target` in a layer of the model, the `index`th of its chunk; empty: none."""
        if target == "parallel":
            prefix = f"model.layers.{layer}." if self.where == "layers" else f"mtp.layers.{layer}."
            name = self.parallel or next(iter(self.sources))
        else:
            prefix = f"decoder.layers.{index}."
            name = self.megatron_te or self.megatron if target == "megatron_te" else self.megatron
        return prefix + name if name and self.in_layer else name.replace("{first}", str(layer))


@dataclass(frozen=True)
class Family:
    """An architecture: its rows and its config fields.

    Attributes:
        name: The name in messages, and the `model_type` of its configs.
        class_prefix: "Llama" knows LlamaForCausalLM, LlamaForTokenClassification, ...
        rows: The tensors of a layer and of both ends.
        flags: What decides each flag that rows name in `when`; a flag that is left out does not hold.
        one_mixer: Each layer has one mixer, by its type in `layer_types`: attention, linear attention, "mlp" or "moe".
        attends: A function of a config, a layer and the number of layers: whether a layer has full attention where the
            config has no `layer_types`; None: as `Layout.kinds` says.
        tied: Whether the embeddings are tied where the config does not say.
        ties: The config whose `tie_word_embeddings` counts, as in `parallel_layers.model`. "either": the config and its
            `text_config` can both tie the embeddings. "outer": only the config can. "first": the config, or else its
            `text_config`.
        experts: A config field that must be true for routed experts; empty: none. `num_experts` says how many.
        prefixes: The prefixes of the language model's tensors in files, which replace the rows' "model."; the first is
            the canonical prefix.
        layers: Further prefixes of the layers' tensors in files, which replace "model.layers.".
        modules: Modules of transformers' layers, and other names that files may give them.
        ends: Prefixes of the rows at both ends, such as "lm_head.", and the prefixes in files that replace them; the
            first is canonical, and the last transformers' module.
        without_adapter: The ends of the names in files of linear layers to which PEFT gives no adapter.
        expert_module: The module of transformers' layers that has the experts.
        carried: Modules whose tensors are carried whole on the first stage (a vision tower), each with the prefixes of
            its tensors in files; transformers saves the first prefix.
        tower: The tensors that a checkpoint must hold in these modules (`ckpt.layout.families.towers`).
        predicting: The further rows of a multi-token-prediction layer, which also has the last decoder layer's rows.
        prediction: The prefix in files of these decoder rows, for a family with one such layer, which configs need not
            count; empty: such layers have the next numbers.
        ignored: Regular expressions of tensors that files may hold and no model reads (rotary buffers).
    """

    name: str
    class_prefix: str
    rows: tuple[Row, ...]
    flags: Flags = field(default_factory=dict)
    one_mixer: bool = False
    attends: Callable[[Mapping[str, Any], int, int], bool] | None = None
    tied: bool = False
    ties: Literal["either", "outer", "first"] = "either"
    experts: str = ""
    prefixes: tuple[str, ...] = ("model.",)
    layers: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_adapter: tuple[str, ...] = ()
    expert_module: str = "mlp"
    carried: tuple[tuple[str, ...], ...] = ()
    tower: tuple[str, ...] = ()
    predicting: tuple[Row, ...] = ()
    prediction: str = ""
    ignored: tuple[str, ...] = (ROTARY_BUFFERS,)

    @property
    def fields(self) -> frozenset[str]:
        """Every config field that this entry reads."""
        read = {field for symbol in self.symbols for field in SIZES[symbol].fields}
        read |= {_deciding(flag)[0] for flag in self.flags.values() if not isinstance(flag, bool)}
        if self.has_experts:
            read |= {"num_experts", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"}
            read |= {"mlp_layer_types", *filter(None, (self.experts,))}
        return frozenset(read)

    @property
    def symbols(self) -> set[str]:
        """The symbols in the shapes of the rows."""
        shapes = (shape for row in self.rows for shape in row.sources.values())
        return {symbol for shape in shapes for symbol in re.findall(r"(?<![/\w])\w+", shape)}

    @property
    def has_experts(self) -> bool:
        """Whether layers of the family may have routed experts, which a router tells apart."""
        return "E" in self.symbols

    @property
    def has_linear_attention(self) -> bool:
        """Whether layers of the family may have linear attention."""
        return any(row.layers == "linear" for row in self.rows)

    @property
    def carried_prefixes(self) -> tuple[str, ...]:
        """The prefixes of all tensors that are carried whole."""
        return tuple(prefix for spelled in self.carried for prefix in spelled)

    def flag(self, name: str, config: Mapping[str, Any]) -> bool:
        """Return whether a flag holds under `config`."""
        value = self.flags.get(name, False)
        if isinstance(value, bool):
            return value
        field, default = _deciding(value)
        return default if config.get(field) is None else bool(config[field])

    def ties_embeddings(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config ties the head to the embedding."""
        text = config.get("text_config")
        sections = (config, text if isinstance(text, Mapping) else {})
        outer, inner = (section.get("tie_word_embeddings") for section in sections)
        either = outer if inner is None else outer or inner
        stated = {"either": either, "outer": outer, "first": inner if outer is None else outer}[self.ties]
        return self.tied if stated is None else bool(stated)

    def file_names(self, name: str) -> tuple[str, ...]:
        """Return the names that files may give the tensor that rows or a vision tower call `name`.

        The first is the canonical name.
        """
        spelled = self._with_prefixes(name)
        renamed = (each.replace(f".{a}.", f".{b}.") for a, b in self.modules.items() for each in spelled)
        return tuple(dict.fromkeys((*spelled, *renamed)))

    def _with_prefixes(self, name: str) -> tuple[str, ...]:
        modules = ((prefix, spelled) for spelled in self.carried for prefix in spelled)
        layers = "model.layers.", (*(f"{prefix}layers." for prefix in self.prefixes), *self.layers)
        for prefix_of_rows, spelled in (*modules, *self.ends.items(), layers, ("model.", self.prefixes)):
            if name.startswith(prefix_of_rows):
                return tuple(prefix + name.removeprefix(prefix_of_rows) for prefix in spelled)
        return (name,)

    def module_name(self, name: str) -> str:
        """Return the name in a model of transformers of the tensor that files or the native layers call `name`."""
        inner = "model.language_model." if "model.language_model." in self.prefixes else "model."
        spelled = dict.fromkeys((*self.prefixes, "model."), inner)
        for prefix_of_rows, of_files in self.ends.items():
            spelled |= dict.fromkeys((*of_files, prefix_of_rows), of_files[-1])
        spelled |= dict.fromkeys(self.layers, f"{inner}layers.")
        longest = max((prefix for prefix in spelled if name.startswith(prefix)), key=len, default="")
        name = spelled.get(longest, "") + name.removeprefix(longest)
        for module, other in self.modules.items():
            name = name.replace(f".{other}.", f".{module}.")
        return name


def _deciding(flag: str | tuple[str, bool]) -> tuple[str, bool]:
    return (flag, False) if isinstance(flag, str) else flag
