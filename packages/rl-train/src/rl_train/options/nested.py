"""`Options`: options in groups; and `Nested`: a group that a dataclass of another package declares."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic import AfterValidator, BaseModel, Field, GetCoreSchemaHandler, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from parallel_layers.model import LoraOptions
from rl_train.options.fields import (
    CONFIG,
    MayChange,
    Number,
    Text,
    lora_targets,
    numbers,
    parse_betas,
    parse_dtype,
    parse_recompute,
)
from rl_train.options.names import SHORT_NAMES, flag, flattened, unflattened

Dtype = Literal["float32", "bfloat16", "float16"]


class Nested:
    """Mark a field of a frozen dataclass: files and command lines give its fields, by name.

    Types come from the dataclass's annotations, help texts from the first sentences of its "Attributes:", and the
    values are checked by its `__post_init__`.

    Args:
        kind: The dataclass.
        hidden: Fields that the run sets and nobody gives.
        fixed: Fields that may not change when a run is resumed.
        defaults: Defaults that differ from the dataclass's.
    """

    def __init__(
        self, kind: type, *, hidden: tuple[str, ...] = (), fixed: tuple[str, ...] = (), **defaults: Any
    ) -> None:
        self.kind, self.hidden, self.fixed, self._defaults = kind, hidden, fixed, defaults

    @cached_property
    def model(self) -> type[BaseModel]:
        """Return the pydantic model of the fields, with the values that a file or a command line gives."""
        names = {"torch": SimpleNamespace(dtype=Any)}  # the options are read without torch
        hints, texts = typing.get_type_hints(self.kind, localns=names), attribute_texts(self.kind)
        fields: dict[str, Any] = {}
        for entry in dataclasses.fields(self.kind):
            form = FORMS[entry.name] if entry.name in FORMS else _form(hints[entry.name])
            default: Any = self._defaults.get(entry.name, entry.default)
            if default is dataclasses.MISSING:
                factory: Any = entry.default_factory
                default = ... if factory is dataclasses.MISSING else factory()
            text = TEXTS.get(entry.name) or texts.get(entry.name)
            fields[entry.name] = (form, Field(default, description=text))
        # The texts are those of the fields: pydantic would look for the class in the source of every module.
        return create_model(self.kind.__name__, __config__={**CONFIG, "use_attribute_docstrings": False}, **fields)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any, check: Callable[[Any], BaseModel]) -> Any:
            return value if value is None or isinstance(value, self.kind) else self.kind(**dict(check(value)))

        return core_schema.no_info_wrap_validator_function(validate, handler.generate_schema(self.model))


# Fields whose values have another form in files and on the command line.
FORMS: dict[str, Any] = {
    "dtype": Annotated[Dtype | None, AfterValidator(parse_dtype)],
    "recompute": Annotated[Text | None, AfterValidator(parse_recompute)],
    "split": Annotated[Text, AfterValidator(numbers)] | None,
    "betas": Annotated[Text, AfterValidator(parse_betas)],
    "targets": Annotated[Text, AfterValidator(lora_targets)],
    "lora": Annotated[LoraOptions | None, Nested(LoraOptions, hidden=("seed",), rank=dataclasses.MISSING)],
}


# Help texts of fields whose default rl-train decides, or whose first sentence names no values.
TEXTS = {
    "rank": "Rank of low-rank adapters, which are trained in place of the weights (default: no adapters).",
    "context_parallel": "Form where cp > 1: ulysses (exchange tokens for heads), ring (send keys and values) or heads.",
    "dtype": "Dtype of the weights: float32, bfloat16, or with megatron float16 (default: as stored; on a CPU without "
    "instructions for bfloat16, float32 in place of it).",
}


class Leaf(NamedTuple):
    """An option: its name with the names of its groups before it, such as `engine.lora.rank`."""

    name: str
    field: FieldInfo
    may_change: bool

    @property
    def flags(self) -> list[str]:
        """Return its flags on the command line, a short one first."""
        short = [name for name, whole_name in SHORT_NAMES.items() if whole_name == self.name]
        return [flag(name) for name in (*short, self.name)]

    @property
    def kinds(self) -> set[Any]:
        """Return the types of its values: the members of a union, and of a literal the types of its values."""
        return _members(self.field.annotation)


class Options(BaseModel):
    """Options in groups; each is given in a mapping of its group, by its whole name, or by a short name.

    `Options(engine={"tiled_mlp": 4})`, `Options(**{"engine.tiled_mlp": 4})` and `Options(tiled_mlp=4)` are the same.
    None stands for the default.
    """

    model_config = CONFIG

    @classmethod
    @cache
    def leaves(cls) -> tuple[Leaf, ...]:
        """Return every option, in the order of the declarations."""
        return tuple(leaf for leaf in _entries(cls) if _group(leaf.field) is None)

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        """Return the whole names of all options."""
        return frozenset(leaf.name for leaf in cls.leaves())

    @classmethod
    @cache
    def groups(cls) -> frozenset[str]:
        """Return the names of the groups, such as "engine" and "engine.lora"."""
        return frozenset(entry.name for entry in _entries(cls)) - cls.names()

    @classmethod
    def filled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values by whole names, with those that follow from others."""
        return values

    @model_validator(mode="before")
    @classmethod
    def _in_groups(cls, values_or_groups: Any) -> Any:
        entries = flattened(values_or_groups, cls.names(), cls.groups())
        values = {name: value for _, name, value in entries if value is not None}
        return unflattened(cls.filled(values))

    def value(self, name: str) -> Any:
        """Return the option with this whole name, such as "engine.lora.rank"; None in a group that is None."""
        value: Any = self
        for step in name.split("."):
            value = None if value is None else getattr(value, step)
        return value

    def to_json(self) -> dict[str, Any]:
        """Return all options as JSON values, by their whole names."""
        return {leaf.name: plain(self.value(leaf.name)) for leaf in self.leaves()}


def _entries(
    model: type[BaseModel], prefix: str = "", nested: Nested | None = None, free: bool = False
) -> Iterator[Leaf]:
    """Yield every option and every group of a model, which a dataclass declares if there is a mark `nested`."""
    for name, field in model.model_fields.items():
        if nested is not None and name in nested.hidden:
            continue
        may_change = MayChange in field.metadata if nested is None else free and name not in nested.fixed
        yield Leaf(prefix + name, field, may_change)
        if (group := _group(field)) is not None:
            yield from _entries(group[0], f"{prefix}{name}.", group[1], may_change)


def _group(field: FieldInfo) -> tuple[type[BaseModel], Nested | None] | None:
    """Return the model of a group of options, and its mark if a dataclass declares it; None for one option."""
    nested = next((mark for mark in field.metadata if isinstance(mark, Nested)), None)
    if nested is not None:
        return nested.model, nested
    kind = field.annotation
    return (kind, None) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def attribute_texts(kind: type) -> dict[str, str]:
    """Return the first sentence of each entry under "Attributes:" in the docstrings of a dataclass and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        block = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", inspect.getdoc(base) or "", re.M)
        for names, text in re.findall(
            r"^    (\w+(?:, \w+)*): ((?:.*\n?)(?:(?:     +.*)\n?)*)", block[1] if block else "", re.M
        ):
            sentence = re.split(r"(?<=\.)\s+(?=[A-Z0-9\"])", " ".join(text.split()))[0]
            texts |= dict.fromkeys(names.split(", "), sentence.replace("`", "").replace("(None: ", "(default: "))
    return texts


def plain(value: Any) -> Any:
    """Return an option's value as JSON has it: names of dtypes, texts of paths, and lists."""
    if isinstance(value, Mapping | bool | int | float | str | NoneType):
        return value
    if isinstance(value, list | tuple | set | frozenset | range):
        return list(value)
    return str(value).removeprefix("torch.")


def _form(hint: Any) -> Any:
    """Return the annotation of an option from a dataclass's: nested dataclasses are groups, numbers may be texts."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return Annotated[hint, Nested(hint, hidden=HIDDEN.get(hint.__name__, ()))]
    if typing.get_origin(hint) in (Union, UnionType):
        return Union[tuple(_form(member) for member in typing.get_args(hint))]  # noqa: UP007  # made at run time
    return {float: Number, str: Text}.get(hint, hint)


# Fields of nested dataclasses that the run sets.
HIDDEN = {"Schedule": ("total_steps",)}


def _members(kind: Any) -> set[Any]:
    if typing.get_origin(kind) is Literal:
        return {type(value) for value in typing.get_args(kind)}
    members = typing.get_args(kind)
    return set().union(*(_members(member) for member in members)) if members else {kind}
