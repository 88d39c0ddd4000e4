"""Nodes of a group share out resources so that every resource has exactly one owner.

A group needs little of the library, so importing it loads little: names that a group does without are loaded
when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rebalanser.admin import Admin
from rebalanser.group import Group
from rebalanser.runtime.owned import Owned
from rebalanser.settings import Settings

if TYPE_CHECKING:
    from rebalanser.async_group import AsyncGroup
    from rebalanser.feed import ResourceFeed

__all__ = ["Admin", "AsyncGroup", "Group", "Owned", "ResourceFeed", "Settings"]


_ON_DEMAND = {"AsyncGroup": "rebalanser.async_group", "ResourceFeed": "rebalanser.feed"}


def __getattr__(name: str) -> object:
    """Load a name on its first use (PEP 562)."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
