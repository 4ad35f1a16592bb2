"""A journal of the changes made to a model: each is written down with what undoes it.

Only three kinds of change exist: an entry of one module's own ``__dict__`` (a config, a replaced ``forward``), a new
submodule (a value head), and a hook of one module. None touches a class, so another model of the same class never
notices.
"""

from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One change: the module's name in the model ("" is the model itself), and what was done to it."""

    where: str
    what: str


@dataclass
class _Attribute:
    owner: nn.Module
    name: str
    had: bool
    before: object

    def remove(self) -> None:
        if self.had:
            self.owner.__dict__[self.name] = self.before
        else:
            self.owner.__dict__.pop(self.name, None)


@dataclass
class _Submodule:
    owner: nn.Module
    name: str

    def remove(self) -> None:
        self.owner._modules.pop(self.name, None)


@dataclass
class Journal:
    """Changes in the order they were made; `undo` takes them back in the opposite order."""

    changes: list[Change] = field(default_factory=list)
    _undo: list[_Attribute | _Submodule | RemovableHandle] = field(default_factory=list)

    def set_attribute(self, owner: nn.Module, name: str, value: object, where: str, what: str) -> None:
        """Set `name` in `owner`'s own `__dict__`, where it shadows the class and whatever it held before."""
        before = owner.__dict__.get(name, _ABSENT)
        self._undo.append(_Attribute(owner, name, before is not _ABSENT, before))
        owner.__dict__[name] = value
        self.changes.append(Change(where, what))

    def add_submodule(self, owner: nn.Module, name: str, module: nn.Module, where: str, what: str) -> None:
        """Register a new submodule."""
        owner.register_module(name, module)
        self._undo.append(_Submodule(owner, name))
        self.changes.append(Change(where, what))

    def add_hook(self, handle: RemovableHandle, where: str, what: str) -> None:
        """Write down a hook that was just registered."""
        self._undo.append(handle)
        self.changes.append(Change(where, what))

    def undo(self) -> None:
        """Take every change back, the last one first."""
        while self._undo:
            self._undo.pop().remove()
        self.changes.clear()
