"""The published suite for registries sees faults, and quotes the contract truly."""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rebalanser.errors import LeaseNotFound, OutcomeUnknown, RegistryUnavailable, RequestTooLarge
from rebalanser.registry import contract
from rebalanser.registry.contract import (
    Changed,
    Created,
    Delete,
    Done,
    Guard,
    HistoryLost,
    KeepAlive,
    KeyValue,
    Outcome,
    Put,
    Registry,
    Reply,
    Request,
    Revoke,
    Sink,
    Target,
    Transaction,
    Unchanged,
    Watch,
)
from rebalanser.testing import FakeClock, MemoryStore
from rebalanser.testing.registry_suite import EventRecorder, RegistryConformance, RegistryHarness
from tests.conformance.test_memory import MemoryHarness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TESTS = dict(inspect.getmembers(RegistryConformance, inspect.isfunction))


def plain(text: str) -> str:
    return " ".join(re.sub(r"``[\w.]*?(\w+)``", r"\1", text).replace("`", "").replace("**", "").split())


@pytest.mark.parametrize("name", sorted(name for name in TESTS if name.startswith("test_")))
def test_every_quotation_is_in_the_contract(name: str) -> None:
    doc = inspect.getdoc(TESTS[name]) or ""
    assert doc, f"{name} does not say what it holds"
    quoted = re.match(r'Holds: "(.*)"', doc, re.DOTALL)
    for quotation in quoted.group(1).split('", and "') if quoted else re.findall(r'"([^"]+)"', doc):
        assert plain(quotation).lower() in plain(inspect.getsource(contract)).lower()


def run(name: str, harness: RegistryHarness) -> None:
    with ExitStack() as stack:

        def connect() -> Registry:
            return stack.enter_context(closing(harness.open()))

        values: dict[str, Callable[[], object]] = {
            "harness": lambda: harness,
            "connect": lambda: connect,
            "registry": connect,
            "recorder": lambda: EventRecorder(harness.patience_s),
        }
        test = getattr(RegistryConformance(), name)
        test(**{parameter: values[parameter]() for parameter in inspect.signature(test).parameters})


class ForgetsToReset(MemoryStore):
    """A key created again keeps its first create revision."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self._first: dict[str, int] = {}

    def _put(self, put: Put, revision: int) -> None:
        super()._put(put, revision)
        first = self._first.setdefault(put.key, revision)
        self._items[put.key] = replace(self._items[put.key], create_revision=first)


class ConfusesRevisions(MemoryStore):
    """``Created`` looks at the last put."""

    def _holds(self, guard: Guard) -> bool:
        return super()._holds(Unchanged(guard.key, guard.revision) if isinstance(guard, Created) else guard)


class IgnoresGuards(MemoryStore):
    """``Unchanged`` holds for every key."""

    def _holds(self, guard: Guard) -> bool:
        return isinstance(guard, Unchanged) or super()._holds(guard)


class OneRevisionPerKey(MemoryStore):
    """Every put of a transaction gets a revision of its own."""

    def _put(self, put: Put, revision: int) -> None:
        super()._put(put, revision + len(self._items))


class FirstPageOnly(MemoryStore):
    """A range ends after a thousand keys."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        return super().items(prefix, after, limit, modified_after)[:1000]


class PagesShort(MemoryStore):
    """A range that is asked for more than a thousand keys gives a thousand."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        return super().items(prefix, after, min(limit, 1000), modified_after)


class PagesFromTheKey(MemoryStore):
    """A range after a key begins with it."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        found = super().items(prefix, modified_after=modified_after)
        return tuple(item for item in found if item.key >= after)[: limit or None]


class LaterFromTheRevision(MemoryStore):
    """Keys put at the revision are read as well."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        return super().items(prefix, after, limit, max(0, modified_after - 1))


class LaterCreatedOnly(MemoryStore):
    """Keys that were put again after the revision are left out."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        found = super().items(prefix, after)
        return tuple(item for item in found if item.create_revision > modified_after)[: limit or None]


class CutsBeforeItFilters(MemoryStore):
    """Older keys count against the limit."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        found = super().items(prefix, after, limit)
        return tuple(item for item in found if item.mod_revision > modified_after)


class LaterOfAnOlderState(MemoryStore):
    """A transaction that reads later keys misses the last change."""

    def items(
        self, prefix: str = "", after: str = "", limit: int = 0, modified_after: int = 0
    ) -> tuple[KeyValue, ...]:
        found = super().items(prefix, after, limit, modified_after)
        return tuple(item for item in found if not modified_after or item.mod_revision < self.revision)


class FoldsCase(MemoryStore):
    """A prefix is compared as SQL's LIKE does."""

    def _keys(self, prefix: str, after: str, limit: int) -> list[str]:
        folded = [key for key in self._order if key > after and key.lower().startswith(prefix.lower())]
        return folded[: limit or None]


class ReadsOld(MemoryStore):
    """Every other read comes from before the last change."""

    reads = 0

    def execute(self, request: Request) -> Reply:
        before = dict(self._items)
        if isinstance(request, Transaction) and any(isinstance(part, Put) for part in request.then):
            self.before = before
            return super().execute(request)
        self.reads += 1
        if self.reads % 2:
            return super().execute(request)
        now, self._items = self._items, getattr(self, "before", before)
        try:
            return super().execute(request)
        finally:
            self._items = now


class EndsEarly(MemoryStore):
    """A lease lasts a third of what was granted."""

    def expire(self) -> None:
        for held in self._leases.values():
            held.ends_at = min(held.ends_at, self._clock.now() + held.ttl_s / 3)
        super().expire()


class NeverEnds(MemoryStore):
    """Leases are not ended."""

    def expire(self) -> None:
        """Do nothing."""


class EndsKeyByKey(MemoryStore):
    """The keys of a lease go one after the other."""

    def end(self, lease: int) -> None:
        for key in sorted(self._leases[lease].keys):
            self._remove(key)
            self._commit({key: None})
        super().end(lease)


class AlwaysAlive(MemoryStore):
    """A keep-alive of a lease that ended is answered."""

    def execute(self, request: Request) -> Reply:
        try:
            return super().execute(request)
        except LeaseNotFound:
            if isinstance(request, KeepAlive):
                return Done()
            raise


class AnswersInManyTerms(MemoryStore):
    """Each keep-alive is answered in another term."""

    def execute(self, request: Request) -> Reply:
        reply = super().execute(request)
        return Done(self._revision + 1) if isinstance(request, KeepAlive) else reply


class RevokesOnce(MemoryStore):
    """Revoking an unknown lease is an error."""

    def execute(self, request: Request) -> Reply:
        if isinstance(request, Revoke):
            self.lease(request.lease)
        return super().execute(request)


class KeepsNoLease(MemoryStore):
    """A keep-alive renews nothing."""

    def execute(self, request: Request) -> Reply:
        ends = {lease: held.ends_at for lease, held in self._leases.items()}
        reply = super().execute(request)
        if isinstance(request, KeepAlive):
            self._leases[request.lease].ends_at = ends[request.lease]
        return reply


class AgesFromTheGrant(MemoryStore):
    """The age of a lease is the time since it was granted, whatever renewed it."""

    def lease_ages(self, leases: Sequence[int]) -> dict[int, contract.LeaseAge]:
        return {
            lease: contract.LeaseAge(self._clock.now(), self._leases[lease].ttl_s)
            for lease in leases
            if lease in self._leases
        }


class ProvesByTheLease(MemoryStore):
    """A proof holds as long as the lease does."""

    def execute(self, request: Request) -> Reply:
        reply = super().execute(request)
        if isinstance(request, KeepAlive) and isinstance(reply, Outcome):
            return replace(reply, succeeded=True)
        return reply


class RenewsNoneThatIsProved(MemoryStore):
    """A keep-alive with a proof only reads."""

    def execute(self, request: Request) -> Reply:
        if isinstance(request, KeepAlive) and request.proof:
            self.lease(request.lease)
            return super().execute(request.proof)
        return super().execute(request)


class ProvesWithoutLease(MemoryStore):
    """A proof is answered though the lease has ended."""

    def execute(self, request: Request) -> Reply:
        try:
            return super().execute(request)
        except LeaseNotFound:
            if isinstance(request, KeepAlive) and request.proof:
                return super().execute(request.proof)
            raise


class RenewsBeforeItRefuses(MemoryStore):
    """A lease is renewed though its proof is refused."""

    def execute(self, request: Request) -> Reply:
        if isinstance(request, KeepAlive):
            super().execute(KeepAlive(request.lease))
        return super().execute(request)


class PutRenews(MemoryStore):
    """A put under a lease keeps it alive."""

    def _put(self, put: Put, revision: int) -> None:
        super()._put(put, revision)
        if put.lease:
            held = self._leases[put.lease]
            held.ends_at = self._clock.now() + held.ttl_s


class HalfDone(MemoryStore):
    """What stands before a put under a dead lease takes effect."""

    def execute(self, request: Request) -> Reply:
        try:
            return super().execute(request)
        except LeaseNotFound:
            if isinstance(request, Transaction):
                super().execute(Transaction(then=request.then[:1]))
            raise


class StaysAttached(MemoryStore):
    """A key put under another lease still goes with the first."""

    def _put(self, put: Put, revision: int) -> None:
        before = self._items.get(put.key)
        super()._put(put, revision)
        if before is not None and before.lease in self._leases:
            self._leases[before.lease].keys.add(put.key)


class CountsEmptyDeletes(MemoryStore):
    """Deleting an absent key takes a revision."""

    def transact(self, transaction: Transaction) -> Outcome:
        outcome = super().transact(transaction)
        if any(isinstance(part, Delete) for part in transaction.then) and outcome.revision == self._revision:
            self._revision += 1
        return outcome


class NestedSeeWrites(MemoryStore):
    """A nested guard sees what the outer transaction wrote."""

    def transact(self, transaction: Transaction) -> Outcome:
        plain_parts = tuple(part for part in transaction.then if not isinstance(part, Transaction))
        if len(plain_parts) < len(transaction.then) and not transaction.guards:
            super().transact(Transaction(then=plain_parts))
        return super().transact(transaction)


class CutsSilently(MemoryStore):
    """A request over the limit does what fits."""

    def execute(self, request: Request) -> Reply:
        try:
            return super().execute(request)
        except RequestTooLarge:
            assert isinstance(request, Transaction)
            super().execute(Transaction(then=request.then[:1]))
            raise


class HalfUnknown(MemoryStore):
    """A request whose outcome is unknown did its first half."""

    def execute(self, request: Request) -> Reply:
        if isinstance(request, Transaction) and any(isinstance(part, Delete) for part in request.then):
            super().execute(replace(request, then=request.then[: len(request.then) // 2]))
            raise OutcomeUnknown("half of it")
        return super().execute(request)


class SaysNoAndDoesIt(MemoryStore):
    """A guarded write is said to have had no effect, and had it."""

    def execute(self, request: Request) -> Reply:
        reply = super().execute(request)
        if isinstance(request, Transaction) and request.guards and not request.otherwise:
            raise RegistryUnavailable("no effect")
        return reply


class LateWithoutGuards(MemoryStore):
    """A write of unknown outcome is done once more, when others have written."""

    late: Transaction | None = None

    def execute(self, request: Request) -> Reply:
        reply = super().execute(request)
        if isinstance(request, Transaction) and request.guards:
            if self.late is not None:
                super().execute(Transaction(then=self.late.then))
            self.late = request
        return reply


class RevokesHalf(MemoryStore):
    """The end of a lease leaves its last key."""

    def end(self, lease: int) -> None:
        self._leases[lease].keys.discard(max(self._leases[lease].keys, default=""))
        super().end(lease)


class PretendsNothingWasLost(MemoryStore):
    """A watch from before a compaction just begins later."""

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        return super().watch(target, max(from_revision, self._history.oldest), sink)


class FromNowOn(MemoryStore):
    """A watch does not look back."""

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        return super().watch(target, max(from_revision, self._revision + 1), sink)


class StopsAfterLoss(MemoryStore):
    """A watch that lost history tells nothing more."""

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        lost = from_revision < self._history.oldest
        watch = super().watch(target, from_revision, sink)
        if lost:
            sink([HistoryLost(self._history.oldest)])
            watch.close()
        return watch


class TellsNoEnds(MemoryStore):
    """A watch does not tell what leases deleted."""

    def end(self, lease: int) -> None:
        streams, self._streams = self._streams, {}
        super().end(lease)
        self._streams = streams


class EmptyIsNothing(MemoryStore):
    """An empty value is told as a deletion."""

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        def worse(events: object) -> None:
            assert isinstance(events, tuple)
            sink(
                [
                    Changed(event.key, event.revision, event.value or None)
                    if isinstance(event, Changed)
                    else event
                    for event in events
                ]
            )

        return super().watch(target, from_revision, worse)


class GoesBack(MemoryStore):
    """Revisions begin anew after a restart."""

    def restart(self) -> None:
        super().restart()
        self._revision = 1


FAULTS: dict[type[MemoryStore], str] = {
    ForgetsToReset: "test_a_guard_fails_on_a_key_created_again",
    ConfusesRevisions: "test_guard_created",
    IgnoresGuards: "test_no_update_is_lost",
    OneRevisionPerKey: "test_keys_of_one_transaction_share_its_revision",
    FirstPageOnly: "test_range_is_complete_and_ordered",
    PagesShort: "test_range_in_pages",
    PagesFromTheKey: "test_range_after_any_key",
    LaterFromTheRevision: "test_range_of_later_keys",
    LaterCreatedOnly: "test_range_of_later_keys",
    CutsBeforeItFilters: "test_range_of_later_keys_in_pages",
    LaterOfAnOlderState: "test_later_keys_are_all_that_changed",
    FoldsCase: "test_prefixes_are_literal",
    ReadsOld: "test_reads_see_what_was_answered_before",
    EndsEarly: "test_a_lease_never_ends_early",
    NeverEnds: "test_a_lease_ends_though_nobody_asks",
    EndsKeyByKey: "test_a_lease_ends_with_all_its_keys_at_once",
    AlwaysAlive: "test_keeping_an_ended_lease_alive",
    AnswersInManyTerms: "test_one_leader_answers_in_one_term",
    RevokesOnce: "test_revoking_twice",
    KeepsNoLease: "test_keeping_alive_renews_to_the_full_time",
    AgesFromTheGrant: "test_the_ages_of_leases_are_told",
    ProvesByTheLease: "test_a_proof_sees_what_others_did",
    RenewsNoneThatIsProved: "test_a_renewal_is_proved",
    ProvesWithoutLease: "test_no_proof_makes_up_for_an_ended_lease",
    RenewsBeforeItRefuses: "test_a_refused_proof_renews_nothing",
    PutRenews: "test_putting_a_key_renews_nothing",
    HalfDone: "test_putting_under_a_dead_lease",
    StaysAttached: "test_a_put_decides_whose_the_key_is",
    CountsEmptyDeletes: "test_deleting_an_absent_key_changes_nothing",
    NestedSeeWrites: "test_nested_guards_see_the_state_before",
    CutsSilently: "test_too_many_operations",
    HalfUnknown: "test_what_is_unknown_took_effect_as_a_whole_or_not",
    SaysNoAndDoesIt: "test_an_unknown_outcome_is_read_back",
    LateWithoutGuards: "test_an_unknown_outcome_is_read_back",
    RevokesHalf: "test_a_revocation_of_unknown_outcome",
    PretendsNothingWasLost: "test_lost_history_is_told",
    FromNowOn: "test_a_watch_from_the_past",
    StopsAfterLoss: "test_lost_history_is_told",
    TellsNoEnds: "test_revoking_deletes_the_keys_at_once",
    EmptyIsNothing: "test_a_watch_looks_at_a_key_or_a_prefix",
    GoesBack: "test_a_restart_loses_no_change",
}


@pytest.mark.parametrize(("make", "name"), FAULTS.items(), ids=[make.__name__ for make in FAULTS])
def test_the_suite_sees_the_fault(make: type[MemoryStore], name: str) -> None:
    run(name, MemoryHarness())
    harness = MemoryHarness(make)
    harness.patience_s = 0.2
    with pytest.raises((AssertionError, LeaseNotFound, RegistryUnavailable, pytest.fail.Exception)):
        run(name, harness)
