"""Proof that the oracle sees: it notices each mutant of the protocol.

The switches exist here only: a mutant replaces small methods of the product while the seeds of a profile are
scanned, from the mutant's first seed on. ``make mutants`` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rebalanser.core.allocation import placement
from rebalanser.core.allocation.constrained import _Search as Search
from rebalanser.core.group import leading as leading_module
from rebalanser.core.group.leading import Leading
from rebalanser.core.group.messages import Left, SessionLost
from rebalanser.core.group.node import Node
from rebalanser.core.group.rebalancing import Rebalancing, Releases
from rebalanser.core.group.types import Group, Timings
from rebalanser.registry import keys as keys_module
from rebalanser.registry import translation as translation_module
from rebalanser.registry.contract import Delete, Transaction, Unchanged
from rebalanser.registry.script import Answer, Script
from rebalanser.registry.translation import Translation
from simulation.group import PROFILES, Process, exercised, run_seed, run_seeds
from simulation.kernel.mutants import (
    Caught,
    Mutant,
    Switch,
    always,
    edited,
    instead,
    scan,
    switched,
)

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
        self._spare.update(held)

    return forget


def _as_if_stopped_once_it_overruns(original: property) -> Any:
    return property(lambda self: not self._overran and original.__get__(self))


def _barriers_go_with_the_resource(original: Callable[..., Script[int]]) -> Any:
    def remove_resources(self: Translation, resources: Sequence[str], progress: Any) -> Script[int]:
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
    return lambda self, now: setattr(self, "_changed_at", None)


def _say_nothing_of_nothing(original: Callable[[Rebalancing], dict[str, int] | None]) -> Any:
    return lambda self: original(self) or None


def _constant_id(_: Any) -> Any:
    return property(lambda self: f"{self._stem}-0")


def _stop_when_access_must_have_ended(_: Any) -> Any:
    return property(lambda self: self.access_s)


def _edit(owner: Any, method: str, old: str, new: str) -> tuple[Switch, ...]:
    return (Switch(owner, method, edited(old, new)),)


def _answer_without_asking(answer: Any) -> Callable[[Any], Any]:
    """A script that says it is done and sends nothing."""

    def script(*_: Any) -> Any:
        yield from ()
        return answer

    return lambda _: script


def _late_after_a_gap(advance: Callable[[Node, float], None]) -> Any:
    def advance_handlers(self: Node, now: float) -> None:
        overdue_s = now - self._proven_at - self._timings.detect_s
        if not (self._isolated and self._timings.safety_margin_s < overdue_s < self._timings.lease_ttl_s):
            advance(self, now)

    return advance_handlers


def _wake_up_to_stop(earliest: Callable[[Node, float], float | None]) -> Any:
    def earliest_wakeup(self: Node, now: float) -> float | None:
        stops_at = self._proven_at + self._timings.detect_s + self._timings.lease_ttl_s
        times = [at for at in (earliest(self, now), stops_at) if at is not None and at > now]
        return min(times, default=None)

    return earliest_wakeup


_SELF_HEAL = Switch(Node, "_make_good", always(None))

MUTANTS = (
    Mutant(
        "term guard",
        "what a leader writes takes effect in its own term only",
        _guard("_leads"),
        frozenset({"RB-5"}),
        "leaders",
    ),
    Mutant(
        "create-revision check",
        "what a node writes takes effect, and its lease counts as alive, only while its own key is there",
        _guard("_alive"),
        frozenset({"RB-20", "RB-21"}),
    ),
    Mutant(
        "remove only own barriers",
        "a barrier is removed only if it is the very one that this session added",
        _guard("_mine"),
        frozenset({"RB-15"}),
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
        frozenset({"RB-16"}),
    ),
    Mutant(
        "clear on lost lease",
        "barriers and tokens are forgotten with the session",
        (Switch(Rebalancing, "forget", _keep_after_lost_lease),),
        frozenset({"RB-15"}),
        "short lives",
        first=105,
    ),
    Mutant(
        "deadline from before the send",
        "a proof of life counts from before the renewal was sent",
        (Switch(Translation, "_proven_at", _proven_when_answered),),
        frozenset({"RB-21"}),
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
        frozenset({"RB-21"}),
        first=30,
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
        frozenset({"RB-7"}),
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
        frozenset({"RB-14"}),
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
        frozenset({"RB-14"}),
        "late requests",
    ),
    Mutant(
        "uncertain removals finished",
        "a barrier that may be gone protects nothing any more",
        (Switch(Rebalancing, "removal_unknown", always(None)),),
        frozenset({"RB-11"}),
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
        frozenset({"RB-9"}),
        "late requests",
    ),
    Mutant(
        "empty allocation told",
        "a node that owns nothing is told so",
        (Switch(Rebalancing, "to_start", _say_nothing_of_nothing),),
        frozenset({"RB-18"}),
    ),
    Mutant(
        "dead man's switch",
        "a process that asked for it is killed before its lease can end",
        (Switch(Process, "_fire", always(None)),),
        frozenset({"RB-34"}),
        "isolation",
    ),
    Mutant(
        "member without lease",
        "a member's key ends with its lease",
        _edit(Translation, "_join", "values.dump_member(member), lease)", "values.dump_member(member))"),
        frozenset({"RB-20"}),
        "operator",
        first=25,
    ),
    Mutant(
        "acknowledgement without lease",
        "what a member wrote ends with its lease",
        _edit(Translation, "_join", 'b"0", lease)', 'b"0")'),
        frozenset({"RB-20"}),
    ),
    Mutant(
        "release without lease",
        "what a member wrote ends with its lease",
        _edit(Translation, "_join", 'b"", lease)', 'b"")'),
        frozenset({"RB-20"}),
    ),
    Mutant(
        "term not incremented",
        "a leader becomes one by incrementing the term",
        _edit(
            Translation, "_campaign", "(current.term if current else 0) + 1", "current.term if current else 1"
        ),
        frozenset({"RB-5"}),
    ),
    Mutant(
        "term taken from the living",
        "nobody takes the term while its leader lives",
        _edit(Translation, "_campaign", "vacant += (Absent(keys.node(current.leader)),)", "pass"),
        frozenset({"RB-5"}),
    ),
    Mutant(
        "term taken twice",
        "of two that campaign at once one is elected",
        _edit(
            Translation,
            "_campaign",
            "vacant = self._leads(current)",
            "vacant = ()",
        ),
        frozenset({"RB-5"}),
    ),
    Mutant(
        "unguarded publication",
        "a leader whose session is over publishes nothing",
        _edit(
            Translation,
            "_as_leader",
            "self._alive(command.session) + self._leads(command.leadership) + guards",
            "()",
        ),
        frozenset({"RB-6"}),
        "leaders",
    ),
    Mutant(
        "dead leader not replaced",
        "another node takes over from a leader that is gone",
        _edit(Translation, "_campaign", "Absent(keys.node(current.leader))", "Absent(keys.term)"),
        frozenset({"RB-23"}),
    ),
    Mutant(
        "campaign by heartbeat",
        "a follower campaigns only where nobody leads",
        _edit(Leading, "seen_alive", "if not alive.leader_alive:", "if True:"),
        frozenset({"RB-7"}),
    ),
    Mutant(
        "read by heartbeat",
        "heartbeats trigger no rebalance",
        _edit(
            Leading,
            "seen_alive",
            "if self.group is None or",
            "if self.role is Role.LEADER:\n        self._changed_at = now\n    if self.group is None or",
        ),
        frozenset({"RB-7"}),
    ),
    Mutant(
        "failed read forgotten",
        "a leader that could not read the group reads again",
        _edit(Leading, "failed", "self._changed_at = now", "pass"),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "one owner of all",
        "every node holds its fair share",
        _edit(leading_module, "_problem", "nodes=active,", "nodes=dict(sorted(active.items())[:1]),"),
        frozenset({"RB-2"}),
    ),
    Mutant(
        "resource without owner",
        "every resource has an owner",
        _edit(
            leading_module,
            "_problem",
            "resources=group.resources,",
            "resources=dict(sorted(group.resources.items())[1:]),",
        ),
        frozenset({"RB-2"}),
    ),
    Mutant(
        "drain ignored",
        "a drained node owns nothing",
        _edit(leading_module, "_active", "if member.label not in group.drained", "if True"),
        frozenset({"RB-30"}),
    ),
    Mutant(
        "pin ignored",
        "a pinned resource is where its pin says",
        _edit(leading_module, "_pins", "if spec.pin is not None", "if False"),
        frozenset({"RB-29"}),
        first=115,
    ),
    Mutant(
        "plan based on nothing",
        "a plan replaces only the allocation that it was made from",
        (Switch(Translation, "_based_on", always(())),),
        frozenset({"RB-9"}),
        "late requests",
    ),
    Mutant(
        "header before its shares",
        "a header is written once all shares that it names are there",
        _edit(
            Translation,
            "_publish",
            "self._as_leader(command, chunk, based_on)",
            "self._as_leader(command, chunk[1:] or chunk, based_on)",
        ),
        frozenset({"RB-2", "RB-9"}),
        "late requests",
    ),
    Mutant(
        "share of another version",
        "a node acts on its share of the committed version",
        _edit(
            Translation,
            "_shares_in",
            "if not header.is_committed(part.version):",
            "if not header.version:",
        ),
        frozenset({"RB-9"}),
        "late requests",
    ),
    Mutant(
        "aborted versions committed",
        "a share of a version that was never committed is nobody's",
        _edit(Leading, "_planned", "aborted=group.uncommitted | asked.attempts,", "aborted=frozenset(),"),
        frozenset({"RB-9"}),
        "late requests",
    ),
    Mutant(
        "commit unwatched",
        "a node whose share is written and not committed yet is told once it is",
        _edit(Rebalancing, "adopt", "self.pending = read.pending", "self.pending = False"),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "members never in doubt",
        "a leader that missed that a member is gone reads them all",
        _edit(Translation, "_take_members", "update.stats[0] == update.member_keys", "True"),
        frozenset({"RB-3", "RB-7"}),
        "silent watches",
    ),
    Mutant(
        "records not followed",
        "a leader reads what each operator request changed",
        _edit(
            Translation,
            "_take_head",
            "update.to_read = {keys.prefix + key",
            "update.to_read = {'' for _ in () if key",
        ),
        frozenset({"RB-3", "RB-2", "RB-7", "RB-29", "RB-30"}),
        "silent watches",
    ),
    Mutant(
        "missed acknowledgements",
        "a leader reads the acknowledgements that it may have missed",
        _edit(
            Leading,
            "_miss_acknowledgements",
            "self._acknowledgements_missed = True",
            "self._acknowledgements_missed = False",
        ),
        frozenset({"RB-3"}),
        "silent watches",
    ),
    Mutant(
        "allocation not read again",
        "a node acts on the newest allocation",
        _edit(
            Node,
            "_next_barrier_command",
            "if rebalancing.must_read and not leaving:",
            "if rebalancing.share is None and not leaving:",
        ),
        frozenset({"RB-3"}),
        "given-up plans",
    ),
    Mutant(
        "limits of the registry ignored",
        "a request keeps the limits of the registry",
        _edit(
            Translation,
            "_barrier_chunks",
            "self._chunks((r, 3 * len(self.keys.barrier(r)) + 256) for r in sorted(resources))",
            "iter([sorted(resources)])",
        ),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "OnStop passed over",
        "what was stopped is forgotten",
        _edit(Rebalancing, "stop_returned", "self._end_access(resources)", "pass"),
        frozenset({"RB-22"}),
    ),
    Mutant(
        "removed barrier kept in mind",
        "a barrier that was removed is not used any more",
        (Switch(Rebalancing, "barriers_removed", always(None)),),
        frozenset({"RB-11"}),
        "given-up plans",
    ),
    Mutant(
        "refused OnStart",
        "an OnStart that was not entered began no access",
        _edit(Rebalancing, "start_returned", "if not entered:", "if False:"),
        frozenset({"RB-22"}),
        "operator",
    ),
    Mutant(
        "OnStart out of touch",
        "OnStart is called only in touch with the registry",
        _edit(Node, "_may_start", "return not self._giving_up and not (", "return not ("),
        frozenset({"RB-26"}),
    ),
    Mutant(
        "another token",
        "OnStart is given the token of the barrier",
        _edit(
            Translation,
            "_sort_out",
            "added[resource] = outcome.revision",
            "added[resource] = outcome.revision - 1",
        ),
        frozenset({"RB-12"}),
    ),
    Mutant(
        "own barrier taken for another's",
        "a node knows the barriers that an earlier attempt added",
        _edit(Translation, "_sort_out", "if self._is_mine(entry, session):", "if False:"),
        frozenset({"RB-3"}),
        "late requests",
    ),
    Mutant(
        "own barrier not found",
        "what is read back is recognised",
        (Switch(Translation, "_is_mine", always(False)),),
        frozenset({"RB-14"}),
    ),
    Mutant(
        "barrier without lease",
        "a barrier ends with its holder's lease",
        _edit(Translation, "_adding", "session.node.encode(), session.lease)", "session.node.encode())"),
        frozenset({"RB-20"}),
    ),
    Mutant(
        "release that wakes nobody",
        "whoever waits for a barrier learns of its removal",
        _edit(
            Translation,
            "_removing",
            'Put(self.keys.removal(session.node), b"", session.lease)',
            "Get(self.keys.removal(session.node))",
        ),
        frozenset({"RB-3"}),
        "operator",
    ),
    Mutant(
        "release not looked at",
        "a barrier that was in the way is tried again once it is free",
        _edit(
            Rebalancing, "unblocked", "if revision > self.blocked_since.get(holder, revision):", "if False:"
        ),
        frozenset({"RB-3"}),
        "operator",
    ),
    Mutant(
        "release missed by heartbeat",
        "a heartbeat makes good a release that no watch told",
        _edit(
            Node,
            "_make_good",
            "for holder, revision in alive.removals.items():",
            "for holder, revision in ():",
        ),
        frozenset({"RB-3"}),
        "silent watches",
        first=30,
    ),
    Mutant(
        "allocation missed by heartbeat",
        "a heartbeat makes good an allocation that no watch told",
        _edit(Node, "_make_good", "if seen > rebalancing.read_revision:", "if False:"),
        frozenset({"RB-3"}),
        "silent watches",
    ),
    Mutant(
        "early acknowledgement",
        "a share is acknowledged once OnStart has returned",
        _edit(Node, "_next_barrier_command", "rebalancing.completed and rebalancing.ack", "rebalancing.ack"),
        frozenset({"RB-19"}),
        "given-up plans",
    ),
    Mutant(
        "acknowledgement while OnStart runs",
        "a share is acknowledged once OnStart has returned",
        _edit(Rebalancing, "completed", "        and self.running is None\n", ""),
        frozenset({"RB-19"}),
    ),
    Mutant(
        "no acknowledgement",
        "the leader sees that a node has completed",
        _edit(Node, "_next_barrier_command", "rebalancing.acknowledged < share.version", "False"),
        frozenset({"RB-3"}),
    ),
    Mutant(
        "withdrawn stop request",
        "what was asked to stop passes OnStop, even if it is wanted again",
        _edit(
            Rebalancing,
            "_compare",
            "(self._restarting or stopping, self.asked)",
            "(self._restarting or stopping)",
        ),
        frozenset({"RB-41"}),
        "overruns",
    ),
    Mutant(
        "isolation unnoticed",
        "a node out of touch calls OnStop",
        _edit(Node, "_watch_clock", "out_of_touch = in_session and now", "out_of_touch = False and now")
        + _edit(
            Node,
            "_earliest_wakeup",
            "if not self._isolated:",
            "if now < self._proven_at + self._timings.detect_s:",
        ),
        frozenset({"RB-21"}),
        "isolation",
    ),
    Mutant(
        "deadline at the lease's end",
        "access ends a margin before the lease",
        _edit(Node, "_update_guard", "self._timings.access_s", "self._timings.lease_ttl_s"),
        frozenset({"RB-21"}),
    ),
    Mutant(
        "OnStart that raised",
        "OnStop is called for what OnStart raised for",
        _edit(
            Node,
            "_handler_returned",
            "if event.error is None:\n        return\n    if",
            "if event.error is None or event.handler is Handler.START:\n        return\n    if",
        ),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "OnStop that raised",
        "what OnStop raised for counts as not stopped",
        _edit(Node, "_handler_returned", "failed=event.error is not None", "failed=False"),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "cooperative mode stops everything",
        "in cooperative mode OnStop is called only for what leaves",
        _edit(Rebalancing, "adopt", "if self._mode is Mode.EAGER:", "if True:"),
        frozenset({"RB-17"}),
    ),
    Mutant(
        "eager mode stops what leaves",
        "in eager mode a new share stops everything",
        _edit(Rebalancing, "adopt", "if self._mode is Mode.EAGER:", "if False:"),
        frozenset({"RB-17"}),
    ),
    Mutant(
        "left for the lease to end",
        "a graceful stop removes the node, and waits for no lease to end",
        (Switch(Translation, "_leave", _answer_without_asking(Left())),),
        frozenset({"RB-26"}),
    ),
    Mutant(
        "no watches",
        "the leader watches nodes and resources, and a node its share",
        _edit(
            Node,
            "_update_watches",
            "if topics.keys() != self._watched:",
            "topics = {}\n    if self._watched:",
        ),
        frozenset({"RB-7"}),
        "whole network",
    ),
    Mutant(
        "no watch of releases",
        "a node that waits for a barrier is woken by a watch, not by a heartbeat",
        _edit(
            Node,
            "_update_watches",
            "for holder, since in self._rebalancing.blocked_since.items():",
            "for holder, since in ():",
        ),
        frozenset({"RB-13"}),
        "whole network",
    ),
    Mutant(
        "lost history ignored",
        "who lost the history of a watch reads again at once",
        _edit(
            Translation,
            "notices",
            "if not events:",
            "events = [event for event in events if not isinstance(event, HistoryLost)]\n    if not events:",
        ),
        frozenset({"RB-28"}),
        "whole network",
        first=35,
    ),
    Mutant(
        "changes not coalesced",
        "a rebalance waits for settle_time_s after a change",
        _edit(
            Leading,
            "rebalance_at",
            "self._timings.settle_time_s if self.group is not None else 0.0",
            "0.0",
        ),
        frozenset({"RB-8"}),
        "operator",
    ),
    Mutant(
        "rebalances in a row",
        "rebalances are min_rebalance_interval_s apart",
        _edit(Leading, "rebalance_at", "if self._published_at is not None:", "if False:"),
        frozenset({"RB-8"}),
        "operator",
    ),
    Mutant(
        "rejoined at once",
        "a node whose handler raised joins again after a growing delay",
        (Switch(Node, "_rejoin_delay", always(0.0)),),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "rejoined after an equal delay",
        "the delay grows with each failure in a row",
        _edit(
            Node,
            "_rejoin_delay",
            "self._timings.rejoin_initial_s * 2.0 ** min(failures - 1, 32)",
            "self._timings.rejoin_initial_s",
        ),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "allocation from scratch",
        "an allocation moves as few resources as balance allows",
        _edit(leading_module, "_problem", "previous=_passed_on(group, passing),", "previous={},"),
        frozenset({"RB-10"}),
    ),
    Mutant(
        "isolated by one loss",
        "a brief loss causes retries only",
        _edit(
            Node,
            "_failed",
            "self._failed_heartbeats += 1",
            "self._failed_heartbeats += 1\n            self._proven_at = now - self._timings.detect_s",
        ),
        frozenset({"RB-21"}),
    ),
    Mutant(
        "late OnStop after a pause",
        "a process that is resumed past its deadline calls OnStop at once",
        (
            Switch(Node, "_advance_handlers", _late_after_a_gap),
            Switch(Node, "_earliest_wakeup", _wake_up_to_stop),
        ),
        frozenset({"RB-27"}),
        "isolation",
    ),
    Mutant(
        "no heartbeat while a handler runs",
        "heartbeats go on while a handler overruns",
        _edit(
            Node,
            "_wants_lease",
            "return self._membership is Membership.MEMBER",
            "return self._membership is Membership.MEMBER and not self._rebalancing.running",
        ),
        frozenset({"RB-25"}),
        "overruns",
    ),
    Mutant(
        "no heartbeat while leaving",
        "a node that leaves renews its lease until it has left",
        _edit(Node, "_wants_lease", "return not (self._isolated and self._idle)", "return False"),
        frozenset({"RB-21", "RB-25"}),
        "overruns",
    ),
    Mutant(
        "leader that never resigns",
        "a leader that can't read or publish resigns",
        (Switch(Leading, "must_resign", lambda _: property(lambda _: False)),),
        frozenset({"RB-43"}),
        "stuck leaders",
    ),
    Mutant(
        "leave with access",
        "a node that could not stop access lets its lease end",
        _edit(Node, "_leave", "if not self._rebalancing.stuck:", "if True:"),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "operator request in any epoch",
        "an operator request that comes late undoes no later one",
        _edit(
            Translation,
            "_in_epoch",
            "guards=(Unchanged(key, epoch) if epoch else Absent(key),),",
            "guards=(),",
        ),
        frozenset({"RB-44"}),
        "operators",
    ),
    Mutant(
        "resource overwritten",
        "of a resource that is there an operator request changes only what it says",
        _edit(translation_module, "_put", "if key in found and fields != SPEC_FIELDS:", "if False:"),
        frozenset({"RB-29"}),
        "operators",
    ),
    Mutant(
        "drain forgotten",
        "what an operator is told to be done is done",
        _edit(Translation, "set_drained", "if (key in found) == drained:", "if found or not drained:"),
        frozenset({"RB-30"}),
        "operators",
    ),
    Mutant(
        "names as they are",
        "no group's keys are among those of another",
        (Switch(keys_module, "_quoted", instead(lambda name: name)),),
        frozenset({"RB-33"}),
        "two groups",
    ),
    Mutant(
        "loop that takes long",
        "a turn of a node's loop takes 50 ms at most",
        (Switch(Process, "turn_s", instead(lambda self: 0.6 * self.world.random.random())),),
        frozenset({"RB-21"}),
        "slow loops",
    ),
    Mutant(
        "barrier guarded by header",
        "a node goes on while the shares of others change",
        (
            Switch(
                Translation,
                "_has_share",
                instead(lambda self, _node, _version, revision: (Unchanged(self.keys.header, revision),)),
            ),
        ),
        frozenset({"RB-41"}),
        "churn",
    ),
    Mutant(
        "part of a share",
        "a node reads all parts of its share",
        _edit(
            Translation,
            "_shares_in",
            "named[part.node].append(part)",
            "pass",
        ),
        frozenset({"RB-2", "RB-3"}),
        "many resources",
    ),
    Mutant(
        "history lost deposes",
        "a leader whose watch lost its history leads on",
        _edit(Leading, "leadership_changed", "return not lost", "return True"),
        frozenset({"RB-28"}),
        "whole network",
    ),
    Mutant(
        "conflict deposes",
        "a leader whose plan is refused reads the group again, and leads on",
        _edit(
            Node,
            "_leading_answered",
            'self._leading.failed("the allocation that the plan was based on had changed", now)',
            "self._deposed()",
        ),
        frozenset({"RB-28"}),
        "stuck leaders",
    ),
    Mutant(
        "eager nodes passed over",
        "a rebalance starts everything anew on nodes in eager mode",
        _edit(
            Leading,
            "_planned",
            "changed |= {n for n, member in group.members.items() if member.mode is Mode.EAGER}",
            "pass",
        ),
        frozenset({"RB-17"}),
    ),
    Mutant(
        "batches unasked",
        "without start_in_batches a node starts its share as a whole",
        _edit(Rebalancing, "to_start", "(self._start_in_batches or not self.missing)", "True"),
        frozenset({"RB-17"}),
    ),
    Mutant(
        "lease not found",
        "a keep-alive that is told of no lease proves nothing",
        (Switch(Translation, "_confirm_loss", _answer_without_asking(SessionLost())),),
        frozenset({"RB-22"}),
        "vain renewals",
    ),
    Mutant(
        "lapse counted from the proof",
        "a lease that is left to lapse counts as ended only once its last renewal has run out",
        _edit(
            Node,
            "_lapses_at",
            "latest = max(self._proven_at, self._renewal_sent_at)",
            "latest = self._proven_at",
        ),
        frozenset({"RB-24"}),
        "lost leases",
    ),
    Mutant(
        "holder that is gone",
        "a heartbeat tells that the holder of a barrier has left",
        _edit(Node, "_make_good", "revision or alive.revision", "revision"),
        frozenset({"RB-3"}),
        "silent watches",
    ),
    Mutant(
        "rejoin ever later",
        "the delay until a node joins again has a limit",
        _edit(
            Node,
            "_rejoin_delay",
            "min(self._timings.rejoin_initial_s * 2.0 ** min(failures - 1, 32), self._timings.rejoin_max_s)",
            "self._timings.rejoin_initial_s * 2.0 ** min(failures - 1, 32)",
        ),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "failures never forgotten",
        "the delay begins anew once a node has completed a share",
        _edit(Node, "_barriers_answered", "self._failures = 0", "pass"),
        frozenset({"RB-24"}),
        "short lives",
    ),
    Mutant(
        "resigns too early",
        "a leader leads on after a few failures",
        _edit(Leading, "must_resign", "self._tries >= RESIGN_AFTER", "self._tries >= RESIGN_AFTER - 1"),
        frozenset({"RB-43"}),
        "stuck leaders",
    ),
    Mutant(
        "failures to lead never forgotten",
        "only failures in a row make a leader resign",
        _edit(Leading, "published", "self._tries = 0", "pass")
        + _edit(Leading, "plan_made", "self._tries = 0", "pass"),
        frozenset({"RB-43"}),
        "stuck leaders",
    ),
    Mutant(
        "campaign after resigning",
        "a node that resigned waits for a lease before it campaigns",
        _edit(
            Leading,
            "resigned",
            "self._campaign_at = now + self._timings.lease_ttl_s",
            "self._campaign_at = now",
        ),
        frozenset({"RB-43"}),
        "stuck leaders",
    ),
    Mutant(
        "obsolete shares kept",
        "an allocation deletes the shares that it replaces",
        _edit(
            Leading,
            "_planned",
            "obsolete=group.obsolete_after(changed | (before.keys() - targets.keys())),",
            "obsolete=frozenset(),",
        ),
        frozenset({"RB-9"}),
    ),
    Mutant(
        "release ignored",
        "no node is given what it has released",
        (Switch(leading_module, "releasers", always({})),),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "release not told",
        "the record of a node names what it has released",
        (Switch(Node, "_next_record", always(None)),),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "release forgotten with the session",
        "a node names what it released when it joins again",
        _edit(Node, "_advance_life", "released=self._releases.resources", "released=frozenset()"),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "release cut short",
        "a resource is released until its time has passed",
        _edit(Node, "_release", "now + event.for_s", "now + event.for_s / 2"),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "shorter release counts",
        "of two releases the later end counts",
        _edit(Releases, "release", "until <= self._until.get(resource, -math.inf)", "False"),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "release for ever",
        "a resource is released no longer than the application said",
        _edit(Releases, "_replace", "min(until.values(), default=math.inf)", "math.inf"),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "release ends unnoticed",
        "a node wakes up when a release ends",
        _edit(Node, "_earliest_wakeup", "self._releases.next_end < math.inf", "False"),
        frozenset({"RB-7"}),
        "prompt releases",
    ),
    Mutant(
        "released by a former owner",
        "only the owner by its token releases a resource",
        _edit(Node, "_release", "!= event.token", "is None"),
        frozenset({"RB-2"}),
        "prompt releases",
    ),
    Mutant(
        "acceptance ignored",
        "what is accepted again is released no more",
        (Switch(Releases, "accept", always(None)),),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "record overtaken",
        "a late record never replaces a newer one",
        _edit(Translation, "_record_releases", " + self._not_overtaken(key, command.replaces)", ""),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "record of unknown outcome",
        "a record that may have been written is not taken for unwritten",
        _edit(Node, "_failed", "self._releases.recorded = None", "pass"),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "record without lease",
        "a member's key ends with its lease, also once it was rewritten",
        _edit(Translation, "_record_releases", ", session.lease)", ")"),
        frozenset({"RB-4"}),
        "releases",
    ),
    Mutant(
        "members read from a later revision",
        "a leader reads every record that was put since it knows the group",
        _edit(Translation, "_members", "update.known.revision", "update.known.revision + 1"),
        frozenset({"RB-2"}),
        "silent releases",
    ),
    Mutant(
        "released started again",
        "what is released while it is stopped does not start again",
        _edit(Rebalancing, "_ready_and_not_released", "self._mode is Mode.COOPERATIVE", "False"),
        frozenset({"RB-2"}),
        "releases",
    ),
    Mutant(
        "needless moves among releases",
        "as few resources move as releases and balance allow",
        _edit(placement, "_ways", "len(names))", "len(names), cost=2)"),
        frozenset({"RB-10"}),
        "releases",
    ),
    Mutant(
        "needs ignored",
        "a resource is where its needs are met",
        _edit(
            leading_module,
            "_problem",
            "resources=group.resources,",
            "resources={n: replace(s, needs=frozenset()) for n, s in group.resources.items()},",
        ),
        frozenset({"RB-37"}),
        "placement",
    ),
    Mutant(
        "spread ignored",
        "resources of one spread are apart",
        _edit(
            leading_module,
            "_problem",
            "resources=group.resources,",
            "resources={n: replace(s, spread=None) for n, s in group.resources.items()},",
        ),
        frozenset({"RB-37"}),
        "placement",
    ),
    Mutant(
        "zones ignored",
        "resources of one spread are in distinct zones if the policy says so",
        _edit(
            leading_module,
            "_problem",
            "policy=group.policy,",
            'policy=replace(group.policy, spread_over="node"),',
        ),
        frozenset({"RB-37"}),
        "placement",
    ),
    Mutant(
        "capacity ignored for pins",
        "no node has more than its capacity, whatever is pinned to it",
        _edit(
            Search,
            "_fill",
            "if load > limits[i]:",
            "if load > limits[i] and name not in self._problem.pinned:",
        ),
        frozenset({"RB-37"}),
        "placement",
    ),
    Mutant(
        "policy not read again",
        "a leader allocates by the policy as it is",
        _edit(
            Translation,
            "_take_entries",
            "update.policy = self._policy_in(entry, update.unreadable)",
            "pass",
        ),
        frozenset({"RB-36", "RB-37", "RB-38"}),
        "placement",
    ),
    Mutant(
        "budget for what is unowned",
        "what is unowned is placed whatever the policy says",
        _edit(
            Search,
            "_fill_all",
            "for name in sorted(self._waiting):",
            "for name in sorted(self._waiting)[: self._problem.max_moves]:",
        ),
        frozenset({"RB-38"}),
        "placement",
    ),
    Mutant(
        "budget ignored",
        "a plan moves no more than max_moves for a better balance",
        (Switch(Search, "_is_used_up", lambda _: property(lambda _: False)),),
        frozenset({"RB-38"}),
        "placement",
    ),
    Mutant(
        "band ignored",
        "nothing moves for a better balance within the band",
        _edit(
            leading_module,
            "_problem",
            "policy=group.policy,",
            "policy=replace(group.policy, imbalance_band=0.0),",
        ),
        frozenset({"RB-38"}),
        "placement",
    ),
    Mutant(
        "cool-down forgotten",
        "what moved for a better balance stays for the cool-down",
        _edit(Leading, "_move_limits", "frozenset(self._moved_at))", "frozenset())"),
        frozenset({"RB-38"}),
        "placement",
    ),
    Mutant(
        "interval forgotten",
        "rebalances that only improve the balance are move_interval_s apart",
        _edit(Leading, "_improves_from", "self._improved_at + policy.move_interval_s", "self._improved_at"),
        frozenset({"RB-38"}),
        "placement",
    ),
    Mutant(
        "improved once elected",
        "a new leader improves nothing before what it does not know of is over",
        _edit(
            Leading,
            "_improves_from",
            "return max(self._improved_at + policy.move_interval_s, since_election)",
            "return self._improved_at + policy.move_interval_s",
        ),
        frozenset({"RB-38"}),
        "placement",
    ),
    Mutant(
        "improvement not continued",
        "what the policy puts off is done later",
        (Switch(Leading, "_plan_improvement", always(None)),),
        frozenset({"RB-36"}),
        "placement",
    ),
    Mutant(
        "endless planning",
        "a leader plans again only if more may move then",
        _edit(Leading, "plan_made", "if made.asked.limits != NO_LIMITS:", "if True:")
        + _edit(Leading, "make_plan", " and group.policy.max_moves != 0", ""),
        frozenset({"RB-7"}),
        "placement",
    ),
    Mutant(
        "grace ignored",
        "the share of a label that is gone is kept",
        _edit(Leading, "_ended_graces", "if end <= now", "if True"),
        frozenset({"RB-39"}),
        "static membership",
    ),
    Mutant(
        "grace without an end",
        "nothing is kept longer than the grace",
        (
            Switch(Leading, "_ended_graces", always(frozenset())),
            *_edit(Leading, "make_plan", "asked.ended", "frozenset()"),
        ),
        frozenset({"RB-39", "RB-2"}),
        "static membership",
    ),
    Mutant(
        "grace counted anew",
        "a leader counts the grace since it noticed that the node is gone",
        _edit(Leading, "_ended_graces", "known = self._graces", "known = {}"),
        frozenset({"RB-39", "RB-2"}),
        "static membership",
    ),
    Mutant(
        "share for any newcomer",
        "what is kept for a label goes to a node of that label",
        _edit(
            leading_module,
            "succession",
            "latest.get(member.label, newcomers.get(member.label))",
            "max(newcomers.values(), default=latest.get(member.label))",
        ),
        frozenset({"RB-39"}),
        "static membership",
    ),
    Mutant(
        "share kept beside its heir",
        "the node that comes back under a label gets the share",
        _edit(leading_module, "succession", "if heir is not None:", "if False:"),
        frozenset({"RB-39"}),
        "static membership",
    ),
    Mutant(
        "surge to all",
        "of two nodes with one label the later gets the share of the older",
        _edit(
            leading_module,
            "succession",
            "{node: latest[members[node].label] for node in superseded if node in group.shares}",
            "{}",
        ),
        frozenset({"RB-39"}),
        "static membership",
    ),
    Mutant(
        "surge given back",
        "of two nodes with one label the later gets the share of the older",
        _edit(leading_module, "succession", "label: max(those", "label: min(those"),
        frozenset({"RB-39"}),
        "static membership",
    ),
    Mutant(
        "new leader forgets",
        "a new leader knows for which label a share is kept",
        _edit(
            Translation,
            "_header_in",
            "readable(entries.values(), self._remembered, unreadable)",
            "{}",
        ),
        frozenset({"RB-39"}),
        "static membership",
    ),
    Mutant(
        "drained and kept",
        "a drain ends what is kept for a label",
        _edit(leading_module, "succession", "if member.label in group.drained:", "if False:"),
        frozenset({"RB-39"}),
        "static membership",
    ),
)


LIMIT = 500
"""Maximum number of seeds until a mutant is seen."""


@pytest.mark.lesson(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_oracle_sees_every_mutant(mutant: Mutant, caught: Callable[[Caught], None]) -> None:
    found = scan(mutant, run_seed, PROFILES, LIMIT)
    assert found is not None, f"{LIMIT} seeds, and no check of these rules saw it: {sorted(mutant.rules)}"
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
    assert exercised(report, PROFILES[profile]) == []
