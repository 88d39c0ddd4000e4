"""Nodes of a group share out resources so that every resource has exactly one owner.

Importing the package loads nothing else: each public name or package is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rebalanser.admin import Admin
    from rebalanser.async_admin import AsyncAdmin
    from rebalanser.async_group import AsyncGroup
    from rebalanser.core.group import Fact, FactKind, Mode, OnOverrun
    from rebalanser.feed import ResourceFeed
    from rebalanser.group import Group, leader
    from rebalanser.owners import Owners
    from rebalanser.runtime.owned import Owned
    from rebalanser.settings import Settings
    from rebalanser.state import GroupState

    __version__: str

__all__ = [
    "Admin",
    "AsyncAdmin",
    "AsyncGroup",
    "Fact",
    "FactKind",
    "Group",
    "GroupState",
    "Mode",
    "OnOverrun",
    "Owned",
    "Owners",
    "Policy",
    "ResourceFeed",
    "Settings",
    "SpreadOver",
    "leader",
]

_MODULES = {
    "Admin": "rebalanser.admin",
    "AsyncAdmin": "rebalanser.async_admin",
    "AsyncGroup": "rebalanser.async_group",
    "Fact": "rebalanser.core.group",
    "FactKind": "rebalanser.core.group",
    "Group": "rebalanser.group",
    "GroupState": "rebalanser.state",
    "Mode": "rebalanser.core.group",
    "OnOverrun": "rebalanser.core.group",
    "Owned": "rebalanser.runtime.owned",
    "Owners": "rebalanser.owners",
    "Policy": "rebalanser.core.group",
    "ResourceFeed": "rebalanser.feed",
    "Settings": "rebalanser.settings",
    "SpreadOver": "rebalanser.core.group",
    "leader": "rebalanser.group",
}

_PACKAGES = frozenset({"errors", "history", "neli", "shiva", "tasks", "testing"})
"""Those that need no extra: ``help`` and ``dir`` of the package load them."""


def __getattr__(name: str) -> object:
    """Load a public name or package on its first use (PEP 562)."""
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loaded: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = loaded
    return loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, "__version__"})
