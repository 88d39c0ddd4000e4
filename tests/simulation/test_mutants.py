"""Proof that the oracle sees: it notices each mutant of the protocol.

The switches exist here only: a mutant replaces small methods of the product while the seeds of a profile are
scanned, from seed 0 on. ``make mutants`` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rebalanser.protocol.leading import Leading
from rebalanser.protocol.node import Node
from rebalanser.protocol.rebalancing import Rebalancing
from rebalanser.protocol.types import Group, Timings
from rebalanser.registry.contract import Delete, Transaction
from rebalanser.registry.dialogue import Answer, Reading
from rebalanser.registry.translation import Translation
from rebalanser.testing.simulation import PROFILES, Process, run_seed, run_seeds
from rebalanser.testing.simulation.mutants import Caught, Mutant, Switch, always, scan, switched

pytestmark = pytest.mark.full_size


def _guard(method: str) -> tuple[Switch, ...]:
    return (Switch(Translation, method, always(())),)


def _remove_while_started(_: Any) -> Any:
    def to_remove(self: Rebalancing, everything: bool) -> dict[str, int]:
        return {r: token for r, token in self.held.items() if everything or r not in self.wanted}

    return to_remove


def _keep_after_lost_lease(original: Callable[[Rebalancing], None]) -> Any:
    def forget(self: Rebalancing) -> None:
        held = dict(self.held)
        original(self)
        self.held.update(held)

    return forget


def _as_if_stopped_once_it_overruns(original: property) -> Any:
    return property(lambda self: not self._overran and original.__get__(self))


def _barriers_go_with_the_resource(original: Callable[..., Reading[int]]) -> Any:
    def remove_resources(self: Translation, resources: Sequence[str], progress: Any) -> Reading[int]:
        removed = yield from original(self, resources, progress)
        yield Transaction(then=tuple(Delete(self.keys.barrier(name)) for name in resources))
        return removed

    return remove_resources


def _proven_when_answered(_: Any) -> Any:
    def proven_at(self: Translation, renewed: Answer, proof: Answer) -> float:
        return proof.sent_at

    return proven_at


def _any_acknowledgement_counts(_: Any) -> Any:
    return lambda self, node, version: self._acknowledged.get(node, 0) > 0


def _next_version(_: Any) -> Any:
    def unused_version(self: Leading, group: Group) -> int:
        return (group.header.version if group.header else 0) + 1

    return unused_version


def _forget_changes(_: Any) -> Any:
    def keep_later_changes(self: Leading, group: Group, now: float) -> None:
        self._changed_at = None

    return keep_later_changes


def _say_nothing_of_nothing(original: Callable[[Rebalancing], dict[str, int] | None]) -> Any:
    return lambda self: original(self) or None


def _constant_id(_: Any) -> Any:
    return property(lambda self: f"{self._stem}-0")


def _stop_when_access_must_have_ended(_: Any) -> Any:
    return property(lambda self: self.access_s)


_SELF_HEAL = Switch(Node, "_make_good", always(None))

MUTANTS = (
    Mutant(
        "term guard",
        "what a leader writes takes effect in its own term only",
        _guard("_leads"),
        frozenset({"RB-5", "RB-6"}),
        "leaders",
    ),
    Mutant(
        "create-revision check",
        "what a node writes takes effect, and its lease counts as alive, only while its own key is there",
        _guard("_alive"),
        frozenset({"RB-1", "RB-12", "RB-21", "RB-22", "RB-3", "RB-6"}),
    ),
    Mutant(
        "remove only own barriers",
        "a barrier is removed only if it is the very one that this session added",
        _guard("_mine"),
        frozenset({"RB-15", "RB-11"}),
        "late requests",
    ),
    Mutant(
        "OnStop before remove",
        "a barrier is removed only once OnStop has returned",
        (
            Switch(Node, "_stops_first", lambda _: property(lambda _: False)),
            Switch(Rebalancing, "to_remove", _remove_while_started),
        ),
        frozenset({"RB-11"}),
    ),
    Mutant(
        "barrier independent of resource",
        "removing a resource leaves its barrier alone",
        (Switch(Translation, "remove_resources", _barriers_go_with_the_resource),),
        frozenset({"RB-15"}),
    ),
    Mutant(
        "clear on lost lease",
        "barriers and tokens are forgotten with the session",
        (Switch(Rebalancing, "forget", _keep_after_lost_lease),),
        frozenset({"RB-11", "RB-12", "RB-15", "RB-21"}),
        "short lives",
    ),
    Mutant(
        "deadline from before the send",
        "a proof of life counts from before the renewal was sent",
        (Switch(Translation, "_proven_at", _proven_when_answered),),
        frozenset({"RB-21", "RB-1"}),
        "slow network",
    ),
    Mutant(
        "renewal by the registry's leader",
        "a keep-alive that a deposed leader of the registry answered counts for nothing",
        (Switch(Translation, "_is_renewal", always(True)),),
        frozenset({"RB-21"}),
        "vain renewals",
    ),
    Mutant(
        "early self-fence",
        "OnStop is called so early that it can return before the lease ends",
        (Switch(Timings, "detect_s", _stop_when_access_must_have_ended),),
        frozenset({"RB-1", "RB-21"}),
        "isolation",
    ),
    Mutant(
        "idempotent registration",
        "registering again takes over what an earlier attempt left",
        _guard("_unregistered"),
        frozenset({"RB-4"}),
        "late requests",
    ),
    Mutant(
        "fresh id",
        "every incarnation has an id of its own",
        (Switch(Node, "_node_id", _constant_id),),
        frozenset({"RB-4"}),
    ),
    Mutant(
        "acknowledgement by version",
        "an acknowledgement counts for its version only",
        (Switch(Leading, "_has_completed", _any_acknowledgement_counts),),
        frozenset({"RB-19"}),
    ),
    Mutant(
        "acknowledgement not overtaken",
        "a late acknowledgement never replaces a newer one",
        _guard("_not_overtaken"),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "last change not lost",
        "a change after the snapshot leads to another rebalance",
        (Switch(Leading, "_keep_later_changes", _forget_changes),),
        frozenset({"RB-3"}),
        "operator",
        second_line=(_SELF_HEAL,),
    ),
    Mutant(
        "self-heal by heartbeat",
        "a heartbeat makes good what a watch did not tell",
        (_SELF_HEAL,),
        frozenset({"RB-3"}),
        "silent watches",
    ),
    Mutant(
        "barrier guarded by share",
        "a barrier is added only while the node's share is the one acted on",
        _guard("_has_share"),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "barrier absent",
        "a barrier is added only where there is none",
        _guard("_free"),
        frozenset({"RB-1"}),
    ),
    Mutant(
        "hold on overrun",
        "barriers stay held while a handler overruns its limit",
        (
            Switch(Node, "_stops_first", _as_if_stopped_once_it_overruns),
            Switch(Rebalancing, "to_remove", _remove_while_started),
        ),
        frozenset({"RB-11"}),
        "overruns",
    ),
    Mutant(
        "clock checked at entry",
        "OnStart is not entered once it is too late for OnStop",
        (Switch(Process, "refuses", always(False)),),
        frozenset({"RB-21"}),
        "isolation",
    ),
    Mutant(
        "uncertain barriers read back",
        "a barrier that may have been added is looked for before it is forgotten",
        (Switch(Rebalancing, "barriers_unknown", always(None)),),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "uncertain removals finished",
        "a barrier that may be gone protects nothing any more",
        (Switch(Rebalancing, "removal_unknown", always(None)),),
        frozenset({"RB-11", "RB-12"}),
        "late requests",
    ),
    Mutant(
        "given-up plan forbidden",
        "a plan that was given up is made impossible before the leader rests",
        (Switch(Leading, "_must_forbid", always(False)),),
        frozenset({"RB-3"}),
        "given-up plans",
    ),
    Mutant(
        "version never used twice",
        "a late request can't rewrite a share that is in use",
        (Switch(Leading, "_unused_version", _next_version),),
        frozenset({"RB-9", "RB-3"}),
        "late requests",
    ),
    Mutant(
        "empty allocation told",
        "a node that owns nothing is told so",
        (Switch(Rebalancing, "to_start", _say_nothing_of_nothing),),
        frozenset({"RB-3", "RB-18"}),
    ),
    Mutant(
        "dead man's switch",
        "a process that asked for it is killed before its lease can end",
        (Switch(Process, "_fire", always(None)),),
        frozenset({"RB-1"}),
        "isolation",
    ),
)


LIMIT = 500
"""How many seeds may be needed at most."""


@pytest.mark.lesson(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_oracle_sees_every_mutant(mutant: Mutant, caught: Callable[[Caught], None]) -> None:
    found = scan(mutant, run_seed, PROFILES, LIMIT)
    assert found is not None, f"{LIMIT} seeds without it, and nothing was noticed"
    assert found.rule in mutant.rules, found.sentence
    caught(found)


@pytest.mark.parametrize("mutant", [s for s in MUTANTS if s.second_line], ids=lambda s: s.name)
def test_it_is_the_mutant_that_is_seen_and_not_its_second_line(mutant: Mutant) -> None:
    with switched(mutant.second_line):
        report = run_seeds(0, 60, PROFILES[mutant.profile])
    assert not report.violations


@pytest.mark.parametrize("profile", PROFILES)
def test_without_a_mutant_every_profile_is_clean(profile: str) -> None:
    report = run_seeds(0, 60, PROFILES[profile])
    assert not report.violations
    assert report.rebalances > 60
