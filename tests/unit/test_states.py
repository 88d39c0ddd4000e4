"""The transition tables: every row happens, and nothing else does."""

from __future__ import annotations

from unittest import mock

import pytest

from rebalanser.core.group.rebalancing import Rebalancing, Releases
from rebalanser.core.group.states import MEMBERSHIP, ROLE, STEPS, Membership, Role, Step, Vote
from rebalanser.core.group.types import Mode
from rebalanser.errors import InternalError
from simulation.group import PROFILES, run_seeds
from simulation.group.coverage import ANSWERS, NOT_BY_CHANCE, TRANSITIONS

RARE = {*NOT_BY_CHANCE, "step: 1 stopping → 3 adding barriers"}
"""A few hundred seeds may not meet these."""


@pytest.mark.full_size
@pytest.mark.rule("RB-11", "RB-14")
def test_every_row_of_the_tables_happens_in_the_simulator() -> None:
    met = run_seeds(0, 150).met
    for profile in ("short lives", "isolation"):
        met += run_seeds(0, 100, PROFILES[profile]).met
    assert TRANSITIONS - met.keys() <= RARE
    assert met.keys() <= TRANSITIONS | ANSWERS


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
    rebalancing = Rebalancing(Mode.COOPERATIVE, start_in_batches=True, releases=Releases())
    with (
        mock.patch.object(Rebalancing, "_step", return_value="nowhere"),
        pytest.raises(InternalError, match="may not follow"),
    ):
        rebalancing.observe_step(everything=False)
