"""Transition tables of state machines. The documentation's diagrams are drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar

from rebalanser.errors import InternalError

StateT = TypeVar("StateT", bound=StrEnum)
TriggerT = TypeVar("TriggerT", bound=StrEnum)


class Table(Generic[StateT, TriggerT]):
    """A transition table: (state, trigger) -> state."""

    def __init__(self, name: str, first: StateT, rows: Mapping[tuple[StateT, TriggerT], StateT]) -> None:
        self.name = name
        self.first = first
        self.rows = MappingProxyType(dict(rows))

    def move(self, state: StateT, trigger: TriggerT) -> StateT:
        """Return the state after ``trigger``.

        Raises:
            InternalError: the table has no such row: an invariant is broken.
        """
        try:
            return self.rows[state, trigger]
        except KeyError:
            raise InternalError(f"{self.name}: {trigger!r} has no meaning in state {state!r}") from None
