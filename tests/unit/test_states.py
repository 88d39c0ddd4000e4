"""The transition tables: every row happens, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from rebalanser.errors import InternalError
from rebalanser.protocol.rebalancing import Rebalancing
from rebalanser.protocol.states import MEMBERSHIP, ROLE, STEPS, Life, Membership, Role, Step, Table, Vote
from rebalanser.protocol.types import Mode
from rebalanser.testing.simulation import PROFILES, run_seeds

NOT_BY_CHANCE = {
    ("membership", Membership.OUT, Life.STOP),
    ("membership", Membership.LAPSING, Life.SESSION_LOST),
    ("steps", Step.STOPPING, Step.ADDING),
}
"""Stopping what never started does nothing, and the others are too rare; ``test_node`` feeds them."""


@contextmanager
def _recorded() -> Iterator[set[tuple[Any, ...]]]:
    seen: set[tuple[Any, ...]] = set()
    move, observe = Table.move, Rebalancing.observe_step

    def recording_move(table: Table[Any, Any], state: Any, trigger: Any) -> Any:
        seen.add((table.name, state, trigger))
        return move(table, state, trigger)

    def recording_observe(rebalancing: Rebalancing, everything: bool) -> None:
        before = rebalancing.step
        observe(rebalancing, everything)
        if rebalancing.step is not before:
            seen.add(("steps", before, rebalancing.step))

    with (
        mock.patch.object(Table, "move", recording_move),
        mock.patch.object(Rebalancing, "observe_step", recording_observe),
    ):
        yield seen


def _rows() -> set[tuple[Any, ...]]:
    moves = {(table.name, *row) for table in (MEMBERSHIP, ROLE) for row in table.rows}
    return moves | {("steps", before, after) for before, following in STEPS.items() for after in following}


@pytest.mark.full_size
@pytest.mark.rule("RB-11", "RB-14")
def test_every_row_of_the_tables_happens_in_the_simulator() -> None:
    with _recorded() as seen:
        run_seeds(0, 150)
        run_seeds(0, 100, PROFILES["short lives"])
    assert _rows() - seen <= NOT_BY_CHANCE
    assert seen <= _rows()


def test_a_pair_that_is_not_in_the_table_is_a_broken_invariant() -> None:
    with pytest.raises(InternalError, match="role"):
        ROLE.move(Role.LEADER, Vote.ELECTED)


def test_every_state_can_be_left_but_the_last() -> None:
    assert {state for state, _ in MEMBERSHIP.rows} == set(Membership) - {Membership.STOPPED}
    assert {state for state, _ in ROLE.rows} == set(Role)
    assert set(STEPS) == set(Step)
    assert all(reason for following in STEPS.values() for reason in following.values())


@pytest.mark.rule("RB-11")
def test_a_step_that_may_not_follow_is_a_broken_invariant() -> None:
    rebalancing = Rebalancing(Mode.COOPERATIVE, start_in_batches=True)
    with (
        mock.patch.object(Rebalancing, "_step", return_value="nowhere"),
        pytest.raises(InternalError, match="may not follow"),
    ):
        rebalancing.observe_step(everything=False)
