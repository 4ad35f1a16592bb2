"""The parts of a family's table.

A table is a tuple of `Row`s. A row says which canonical (Hugging Face) tensors exist, what their shapes are in the
config's symbols and how each is split, and what the fused local tensor is called on each target:

    Row({"model.layers.{i}.self_attn.q_proj.weight": "Q/tp H",
         "model.layers.{i}.self_attn.k_proj.weight": "KV/tp H",
         "model.layers.{i}.self_attn.v_proj.weight": "KV/tp H"},
        parallel="model.layers.{i}.self_attn.qkv_proj.weight",
        megatron="decoder.layers.{l}.self_attention.linear_qkv.weight", megatron_order="groups")

A shape is its dimensions, separated by spaces. A dimension is a symbol of the family's `sizes`, or a sum of symbols
("C+R"); `/tp`, `/etp` after a symbol splits it over that axis. The sources of one row are concatenated along dimension
0. In names `{i}` is the layer in the model, `{l}` the layer in its pipeline chunk, `{e}` the expert in the model, `{j}`
the expert on its rank. A row whose sources have `{e}` and whose local name has no `{j}` stacks its experts in a leading
dimension.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["causal_lm", "value", "causal_lm_with_value"]
Target = Literal["parallel", "megatron", "megatron_te"]
# What decides a flag of a family: a constant, a config field (absent: False), or a field and its default.
Flags = Mapping[str, bool | str | tuple[str, bool]]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Size:
    """A symbol: `count` units of `unit` elements; sharding never cuts a unit.

    Attributes:
        count: a sum of products of config fields, such as "n_shared_experts * moe_intermediate_size", or "1".
        unit: likewise, one unit's length.
        replicate: with more ranks than units, neighbouring ranks hold the same unit (key-value heads).
        pad: counts that do not divide are padded with zeros up to a multiple of the ranks (the vocabulary).
    """

    count: str
    unit: str = "1"
    replicate: bool = False
    pad: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The config fields that this size reads."""
        return tuple(word for word in re.findall(r"\w+", f"{self.count} {self.unit}") if not word.isdigit())


@dataclass(frozen=True)
class Row:
    """One local tensor of a layer, an expert, or an end of the model, and the canonical tensors it is made of.

    Attributes:
        sources: canonical name -> shape, in the order in which the local tensor concatenates them.
        parallel: local name for the native layers.
        megatron: local name in a Megatron-Core GPTModel of the local spec; empty: Megatron-Core has no such tensor, and
            a layout for it is refused.
        megatron_te: local name in the Transformer Engine spec, where it differs.
        megatron_order: "parts": each source's shard follows the one before; "groups": Megatron's order of queries, keys
            and values, where each key-value group's query heads, key head and value head lie together.
        where: "layers", or the pipeline end that holds the row: "first", "last".
        layers: "all", or only the "dense" or the "moe" layers.
        when: a flag of the family that must hold, or "not FLAG".
        roles: those that have this row.
        tied: "any", "yes": only with tied embeddings (at the last of several stages, the copy there), "no".
        optional: may be absent from a checkpoint and from a rank's tensors (all of them, or none).
        aliases: other names under which a file may hold the (only) source.
        keep_dtype: never cast: fp32 whatever the weights are.
        targets: those that split the sources as this row says; another row speaks for the rest.
    """

    sources: Mapping[str, str]
    parallel: str
    megatron: str = ""
    megatron_te: str | None = None
    megatron_order: Literal["parts", "groups"] = "parts"
    where: Literal["layers", "first", "last"] = "layers"
    layers: Literal["all", "dense", "moe"] = "all"
    when: str | None = None
    roles: tuple[Role, ...] = ROLES
    tied: Literal["any", "yes", "no"] = "any"
    optional: bool = False
    aliases: tuple[str, ...] = ()
    keep_dtype: bool = False
    targets: tuple[Target, ...] = ("parallel", "megatron", "megatron_te")

    def local_name(self, target: Target) -> str:
        """The template of the local name on `target`."""
        if target == "parallel":
            return self.parallel
        return self.megatron_te or self.megatron if target == "megatron_te" else self.megatron


@dataclass(frozen=True)
class Family:
    """One architecture: its rows, its symbols, and which config fields decide what.

    Attributes:
        name: as in messages; also the `model_type` of its configs.
        class_prefix: "Llama" knows LlamaForCausalLM, LlamaForTokenClassification, ...
        rows: the table.
        sizes: the symbols.
        flags: what decides each flag that rows name in `when`.
        aliases: further `model_type`s.
        inner_tie: whether `tie_word_embeddings` of the config's `text_config` ties them, too, whatever the outer one
            says, as transformers' classes of the family have it.
        experts: whether the family has routed experts; `num_experts` says how many.
        prefix: what files have in place of the rows' "model." for the language model's tensors.
        other_prefixes: what other files of this family have there.
        carried: prefixes of tensors that are carried whole, on the first stage (a vision tower), whatever they are; the
            one that transformers saves comes first.
        tower: what a checkpoint must hold under that prefix (`ckpt.layout.families.towers`).
        ignored: regular expressions of tensors that files may hold and no model reads (rotary buffers).
        reads: further config fields that the family understands without needing them for the layout.
    """

    name: str
    class_prefix: str
    rows: tuple[Row, ...]
    sizes: Mapping[str, Size]
    flags: Flags = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    inner_tie: bool = True
    experts: bool = False
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    tower: tuple[str, ...] = ()
    ignored: tuple[str, ...] = (r"(^|\.)rotary_emb\.inv_freq$",)
    reads: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Every config field that this table reads."""
        read = {field for size in self.sizes.values() for field in size.fields} | set(self.reads)
        read |= {_deciding(flag)[0] for flag in self.flags.values() if not isinstance(flag, bool)}
        if self.experts:
            read |= {"num_experts", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"}
        return frozenset(read)

    def flag(self, name: str, config: Mapping[str, Any]) -> bool:
        """Return whether a flag holds under `config`."""
        value = self.flags[name]
        if isinstance(value, bool):
            return value
        field, default = _deciding(value)
        return default if config.get(field) is None else bool(config[field])

    def canonical_name(self, template: str, prefix: str | None = None) -> str:
        """A row's source as files call it."""
        return (prefix or self.prefix) + template.removeprefix("model.") if template.startswith("model.") else template

    def carried_names(self, name: str) -> tuple[str, ...]:
        """Return the names that files may give a tensor that is carried whole; the first is the canonical name."""
        rest = next((name.removeprefix(prefix) for prefix in self.carried if name.startswith(prefix)), None)
        return (name,) if rest is None else tuple(prefix + rest for prefix in self.carried)


def _deciding(flag: str | tuple[str, bool]) -> tuple[str, bool]:
    return (flag, False) if isinstance(flag, str) else flag
