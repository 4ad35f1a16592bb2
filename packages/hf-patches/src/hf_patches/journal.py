"""A journal of the changes to a model, each with its undo.

Three kinds of change exist: an entry in the `__dict__` of one module (a config, a replaced `forward`), a new submodule
(a value head), and a hook of one module. Classes stay unchanged, and so do other models of the same class.
"""

from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A change: the name of the module in the model ("" for the model itself), and a description of the change."""

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
    """Changes in the order of making; `undo` reverts them in the opposite order."""

    changes: list[Change] = field(default_factory=list)
    _undo: list[_Attribute | _Submodule | RemovableHandle] = field(default_factory=list)

    def set_attribute(self, owner: nn.Module, name: str, value: object, where: str, what: str) -> None:
        """Set `name` in the `__dict__` of `owner`, where it shadows the attribute of the class."""
        original = owner.__dict__.get(name, _ABSENT)
        self._undo.append(_Attribute(owner, name, original is not _ABSENT, original))
        owner.__dict__[name] = value
        self.changes.append(Change(where, what))

    def add_submodule(self, owner: nn.Module, name: str, module: nn.Module, where: str, what: str) -> None:
        """Register a new submodule."""
        owner.register_module(name, module)
        self._undo.append(_Submodule(owner, name))
        self.changes.append(Change(where, what))

    def add_hook(self, handle: RemovableHandle, where: str, what: str) -> None:
        """Record a hook that was just registered."""
        self._undo.append(handle)
        self.changes.append(Change(where, what))

    def undo(self) -> None:
        """Revert every change, the last change first."""
        while self._undo:
            self._undo.pop().remove()
        self.changes.clear()
