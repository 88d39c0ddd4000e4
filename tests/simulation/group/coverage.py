"""What runs met of the core: how each command ended, and each row of the transition tables.

An oracle that never saw a row happen says nothing about it. So a long soak must meet each of them often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rebalanser.core.group.messages import OUTCOMES, Command, Deposed, Failed, Outcome, Publish, ReadGroup
from rebalanser.core.group.rebalancing import Rebalancing
from rebalanser.core.group.states import MEMBERSHIP, ROLE, STEPS, Life, Membership, Step
from rebalanser.core.transitions import Table
from simulation.kernel.mutants import Switch, switched

ENOUGH = 100
"""How often a soak must have met each answer and each transition."""


def answer_name(command: type[Command], outcome: type[Outcome], unknown: bool = False) -> str:
    """How a summary calls the end of a command; ``unknown``: it failed, and may have had an effect."""
    return f"{command.__name__} → {outcome.__name__}{' (unknown)' if unknown else ''}"


def _transition(table: str, before: object, why: object) -> str:
    return f"{table}: {before}, {why}"


def _step(before: Step, after: Step) -> str:
    return f"step: {before} → {after}"


ANSWERS = frozenset(
    answer_name(command, outcome, unknown)
    for command, outcomes in OUTCOMES.items()
    for outcome in outcomes
    for unknown in ({False, True} if outcome is Failed else {False})
)
"""Every end of every command."""
TRANSITIONS = frozenset(
    {
        *(_transition(table.name, *row) for table in (MEMBERSHIP, ROLE) for row in table.rows),
        *(_step(before, after) for before, row in STEPS.items() for after in row),
    }
)
"""Every row of the tables."""
NOT_BY_CHANCE = frozenset(
    {
        answer_name(ReadGroup, Deposed),
        answer_name(Publish, Deposed),
        _transition(MEMBERSHIP.name, Membership.LAPSING, Life.SESSION_LOST),
    }
)
"""What seeds meet never or hardly ever, and unit tests feed.

A leader loses its term with its session, or by a ``Resign`` of its own, after which it reads and
publishes nothing until it knows. The last one needs a heartbeat under way while OnStop raises.
"""


@contextmanager
def counting(met: Counter[str]) -> Iterator[None]:
    """Count the transitions of every node that runs in here."""

    def move(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(table: Table[Any, Any], state: Any, trigger: Any) -> Any:
            met[_transition(table.name, state, trigger)] += 1
            return original(table, state, trigger)

        return counted

    def observe_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(rebalancing: Rebalancing, everything: bool) -> None:
            before = rebalancing.step
            original(rebalancing, everything)
            if rebalancing.step is not before:
                met[_step(before, rebalancing.step)] += 1

        return counted

    with switched((Switch(Table, "move", move), Switch(Rebalancing, "observe_step", observe_step))):
        yield


def seldom(met: Counter[str]) -> dict[str, int]:
    """What was met less than ``ENOUGH`` times, and how often."""
    return {name: met[name] for name in sorted((ANSWERS | TRANSITIONS) - NOT_BY_CHANCE) if met[name] < ENOUGH}
