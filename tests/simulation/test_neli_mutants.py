"""Proof that the oracle of NELI sees: it notices each mutant.

The switches exist here only: a mutant replaces small methods of the product while the seeds of a profile are
scanned, from seed 0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rebalanser.core.neli.member import NeliMember
from rebalanser.core.neli.messages import ClientEvent, CommitAnswered, HeartbeatRead
from rebalanser.core.neli.settings import NeliSettings
from rebalanser.core.neli.succession import Succession
from rebalanser.core.neli.tenure import Tenure
from simulation.kernel.mutants import Caught, Mutant, Switch, always, scan
from simulation.neli import PROFILES, run_seed, run_seeds

pytestmark = pytest.mark.full_size


def _taken_for_accepted(original: Callable[..., None]) -> Any:
    return lambda self, answer: original(self, CommitAnswered(answer.commit))


def _just_now(_: Any) -> Any:
    return lambda self, tenure: self._handled_at


def _stale_ones_renew(_: Any) -> Any:
    """A heartbeat of any tenure, whenever it was sent, counts as if it had just been sent."""

    def read(self: Tenure, record: HeartbeatRead, now: float) -> bool:
        stamp = record.stamp
        if stamp is not None:
            self.heard_at = now
            self.token_found = record.offset if self.token_found is None else self.token_found
        self.position = record.offset + 1
        return self.succession.read(record, bool(stamp and self._is_own(stamp)), now)

    return read


def _received_now(_: Any) -> Any:
    return lambda self, record, now: self._vector.hear(record.partition, now)


def _without_drift(_: Any) -> Any:
    return property(lambda self: 1.0)


def _own_wait_only(_: Any) -> Any:
    return staticmethod(lambda settings, last, note: settings.wait_s)


def _while_handlers_run(original: Callable[..., None]) -> Any:
    def let_go_of_lapsed(self: NeliMember, now: float) -> None:
        for tenure in self._tenures.values():
            tenure.let_go_by = now if tenure.is_lapsing else None
        original(self, now)

    return let_go_of_lapsed


def _count_taken_for_granted(original: Callable[..., None]) -> Any:
    def handle_client_event(self: NeliMember, event: ClientEvent, now: float) -> None:
        self._counted_at = now
        original(self, event, now)

    return handle_client_event


MUTANTS = (
    Mutant(
        "checked commit",
        "leadership needs an accepted commit, not only heartbeats that come back",
        (Switch(NeliMember, "_commit_answered", _taken_for_accepted),),
        frozenset({"NE-10", "NE-15", "NE-4"}),
        "zombies",
    ),
    Mutant(
        "own heartbeat",
        "leadership needs a heartbeat that came back",
        (Switch(NeliMember, "_heard_at", _just_now),),
        frozenset({"NE-9", "NE-7"}),
    ),
    Mutant(
        "stale heartbeats renew nothing",
        "a heartbeat counts for its tenure, from before it was sent",
        (Switch(Tenure, "read", _stale_ones_renew),),
        frozenset({"NE-9", "NE-15"}),
    ),
    Mutant(
        "successor waits",
        "who is newly assigned waits until a predecessor's evidence is too old",
        (Switch(Succession, "is_over", always(True)),),
        frozenset({"NE-4"}),
        "zombies",
    ),
    Mutant(
        "drift of both clocks",
        "a wait by a fast clock outlasts a deadline by a slow one",
        (Switch(NeliSettings, "drift_factor", _without_drift),),
        frozenset({"NE-4"}),
        "bad clocks",
    ),
    Mutant(
        "longer deadline of a predecessor",
        "a successor waits as long as its predecessor may lead",
        (Switch(Succession, "_longest_wait_s", _own_wait_only),),
        frozenset({"NE-4"}),
        "roll-outs",
    ),
    Mutant(
        "revoke waits for handlers",
        "a partition goes to others once the work on it has ended",
        (Switch(NeliMember, "_let_go_of_lapsed", _while_handlers_run),),
        frozenset({"NE-9"}),
        "hand-overs",
    ),
    Mutant(
        "broker's timestamps",
        "a backlog of heartbeats makes nobody a leader",
        (Switch(NeliMember, "_hear", _received_now),),
        frozenset({"NE-7"}),
        "backlogs",
    ),
    Mutant(
        "partition count confirmed",
        "who goes by another partition count stops leading before others begin",
        (
            Switch(NeliMember, "_handle_client_event", _count_taken_for_granted),
            Switch(NeliMember, "_counted", always(None)),
        ),
        frozenset({"NE-4"}),
        "growing topic",
    ),
)

LIMIT = 300
"""How many seeds may be needed at most."""


@pytest.mark.lesson(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_oracle_sees_every_mutant(mutant: Mutant, caught: Callable[[Caught], None]) -> None:
    found = scan(mutant, run_seed, PROFILES, LIMIT)
    assert found is not None, f"{LIMIT} seeds, and no check of these rules saw it: {sorted(mutant.rules)}"
    caught(found)


@pytest.mark.parametrize("profile", PROFILES)
def test_without_a_mutant_every_profile_is_clean(profile: str) -> None:
    report = run_seeds(0, 60, PROFILES[profile])
    assert not report.violations
    assert report.inductions > 60
