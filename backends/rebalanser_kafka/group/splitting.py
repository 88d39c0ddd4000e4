"""Splits commands for many resources into smaller ones that take effect one after the other.

Every follower of the log executes every command while heartbeats wait, so a command must be short.
The contract lets such a command take effect in parts. If a part fails after others took effect, the outcome
of the whole is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from rebalanser.core.group.messages import (
    AddBarriers,
    BarriersAdded,
    BarriersRead,
    BarriersRemoved,
    Command,
    Failed,
    Outcome,
    ReadBarriers,
    RemoveBarriers,
)
from rebalanser.errors import InternalError

RESOURCES_PER_COMMAND: Final = 1_000

Divisible: TypeAlias = AddBarriers | RemoveBarriers | ReadBarriers
ItemT = TypeVar("ItemT")


def batches(items: Sequence[ItemT], size: int = RESOURCES_PER_COMMAND) -> Iterator[Sequence[ItemT]]:
    """Yield the items, ``size`` at a time."""
    for at in range(0, len(items), size):
        yield items[at : at + size]


def divided(command: Divisible) -> list[Divisible]:
    """Return the command itself if it is small, else commands that together do the same."""
    match command:
        case RemoveBarriers(barriers=barriers):
            parts = batches(sorted(barriers))
            divisions: list[Divisible] = [
                replace(command, barriers={name: barriers[name] for name in part}) for part in parts
            ]
        case AddBarriers(resources=resources) | ReadBarriers(resources=resources):
            divisions = [replace(command, resources=frozenset(part)) for part in batches(sorted(resources))]
    return divisions if len(divisions) > 1 else [command]


def in_turn(command: Divisible, perform: Callable[[Command], Outcome]) -> Outcome:
    """Execute a command in as many parts as it needs; return the outcome."""
    first, *others = divided(command)
    whole = perform(first)
    for part in others:
        if not isinstance(whole, BarriersAdded | BarriersRemoved | BarriersRead):
            return whole
        if isinstance(whole, BarriersAdded) and whole.superseded:
            return whole
        answer = perform(part)
        if isinstance(whole, BarriersAdded) and isinstance(part, AddBarriers) and isinstance(answer, Failed):
            return replace(whole, unknown=part.resources if answer.unknown else frozenset())
        whole = _together(whole, answer)
    return whole


def _together(before: BarriersAdded | BarriersRemoved | BarriersRead, after: Outcome) -> Outcome:
    match before, after:
        case BarriersAdded(), BarriersAdded():
            added, blocked = {**before.added, **after.added}, {**before.blocked, **after.blocked}
            return BarriersAdded(before.revision, added, blocked, after.superseded)
        case BarriersRemoved(), BarriersRemoved():
            removed_at = {**before.removed_at, **after.removed_at}
            return BarriersRemoved(before.resources | after.resources, after.revision, removed_at)
        case BarriersRead(), BarriersRead():
            return BarriersRead({**before.mine, **after.mine})
        case _, Failed():
            return replace(after, unknown=after.unknown or not isinstance(before, BarriersRead))
        case _, (BarriersAdded() | BarriersRemoved() | BarriersRead()):
            raise InternalError(f"one part was answered with {before!r} and another with {after!r}")
        case _:
            return after
