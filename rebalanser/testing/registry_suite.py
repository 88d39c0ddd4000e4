"""The conformance suite for registries: a backend that passes it may keep a group.

A backend's tests implement a ``RegistryHarness`` and subclass ``RegistryConformance``::

    class TestMyRegistry(RegistryConformance):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

Every test quotes the sentence of ``rebalanser.registry.contract`` that it checks. The suite never sleeps:
time passes only through ``RegistryHarness.let_pass``, and a watch is waited for by its events. Call
``pytest.register_assert_rewrite("rebalanser.testing.registry_suite")`` in a ``conftest.py`` for full
assertion messages.
"""

from __future__ import annotations

import string
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import pytest

from rebalanser.errors import (
    LeaseNotFound,
    OutcomeUnknown,
    RegistryRefused,
    RequestTooLarge,
    RetryLater,
)
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Created,
    Delete,
    Done,
    Get,
    Grant,
    Granted,
    Guard,
    HistoryLost,
    KeepAlive,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Range,
    Registry,
    Result,
    Revoke,
    Stat,
    Stats,
    Target,
    Transaction,
    Unchanged,
    WatchEvent,
)
from rebalanser.testing.waiting import PATIENCE_S, Recorder

TIMEOUT_S = PATIENCE_S
"""Timeout of every request; a healthy registry answers long before."""
CUT_S = 1.0
"""Timeout of a request whose answer is lost."""


class RegistryHarness(ABC):
    """A backend for the suite: connections to one store, and control of its time.

    Set ``can_lose_history``, ``can_restart``, ``can_cut_answers``, ``can_be_replaced`` or ``can_tell_ages``
    to False if the store has no such thing; the tests that need it are then reported as skipped, with the
    reason.
    """

    can_lose_history: bool = True
    can_restart: bool = True
    can_cut_answers: bool = True
    can_be_replaced: bool = True
    can_tell_ages: bool = True

    prefix: str
    """Prefix of every key of the test; no other key in the store begins with it."""
    min_ttl_s: float
    """Seconds of the suite's leases, the least that the store keeps reliably."""
    patience_s: float = PATIENCE_S
    """Real seconds to wait for an event of a watch before the test fails."""

    @abstractmethod
    def open(self) -> Registry:
        """A new connection to the store, as another process would open it. The suite closes it."""

    @abstractmethod
    def let_pass(self, seconds: float) -> None:
        """Let ``seconds`` pass on the store's clock: advance a fake one, or block.

        With a fake clock this also wakes all timers that end leases.
        """

    def lose_history(self, revision: int) -> None:
        """Make the store forget the changes before ``revision``, as a compaction does."""
        raise NotImplementedError(f"can_lose_history is True: forget what is older than {revision}")

    def restart(self) -> None:
        """Restart the store under its open connections; return when it answers again."""
        raise NotImplementedError("can_restart is True: restart the store")

    def cut_answers(self) -> AbstractContextManager[object]:
        """Carry out requests on open connections, but lose all answers, until the context ends."""
        raise NotImplementedError("can_cut_answers is True: lose what the store answers")

    def replace(self) -> AbstractContextManager[object]:
        """Put another store, a new one, behind the open connections until the context ends."""
        raise NotImplementedError("can_be_replaced is True: put another store in its place")


class EventRecorder(Recorder[WatchEvent]):
    """A sink of a registry's watch."""

    def __call__(self, events: Sequence[WatchEvent]) -> None:
        self.record(events)

    @property
    def changes(self) -> list[Changed]:
        """The changes so far, each once: a watch may repeat itself."""
        return list(dict.fromkeys(event for event in self.told if isinstance(event, Changed)))

    @property
    def losses(self) -> list[HistoryLost]:
        """The losses of history so far."""
        return [event for event in self.told if isinstance(event, HistoryLost)]

    def wait_for(self, *expected: Changed) -> None:
        """Block until all the expected changes have arrived."""
        missing = set(expected)

        def complete(told: Sequence[WatchEvent]) -> bool:
            missing.difference_update(event for event in told if isinstance(event, Changed))
            return not missing

        self.wait_until(complete, str(sorted(expected, key=lambda change: change.revision)[:20]))

    def wait_for_all(self, expected: Iterable[Changed]) -> None:
        """Block until each of the expected changes has arrived, or a loss of history that covers it."""
        awaited = list(expected)

        def covered(told: Sequence[WatchEvent]) -> bool:
            lost = max((event.revision for event in told if isinstance(event, HistoryLost)), default=0)
            return all(change.revision <= lost or change in told for change in awaited)

        self.wait_until(covered, str(awaited))

    def wait_for_absence(self, keys: Iterable[str]) -> list[Changed]:
        """Block until a deletion of each of the keys has arrived; return those deletions."""
        wanted = set(keys)

        def deletions(told: Sequence[WatchEvent]) -> list[Changed]:
            return [
                event
                for event in told
                if isinstance(event, Changed) and event.value is None and event.key in wanted
            ]

        self.wait_until(
            lambda told: {event.key for event in deletions(told)} == wanted, f"deletion of {sorted(wanted)}"
        )
        return deletions(self.changes)

    def wait_for_loss(self) -> HistoryLost:
        """Block until a loss of history has arrived; return the last one."""
        self.wait_until(lambda told: any(isinstance(event, HistoryLost) for event in told), "HistoryLost")
        return self.losses[-1]


Connect: TypeAlias = Callable[[], Registry]
MANY = 5000


def commit(
    registry: Registry,
    *then: Operation,
    guards: Sequence[Guard] = (),
    otherwise: Sequence[Operation] = (),
) -> Outcome:
    """Execute a transaction and return its outcome."""
    outcome = registry.execute(Transaction(tuple(guards), then, tuple(otherwise)), TIMEOUT_S)
    assert isinstance(outcome, Outcome)
    return outcome


def put(registry: Registry, key: str, value: bytes = b"", lease: int = 0) -> int:
    """Put one key and return the revision."""
    return commit(registry, Put(key, value, lease)).revision


def get(registry: Registry, key: str) -> KeyValue | None:
    """Read one key."""
    (found,) = commit(registry, Get(key)).results
    assert found is None or isinstance(found, KeyValue)
    return found


def read(registry: Registry, key: str) -> KeyValue:
    """Read one key that must exist."""
    found = get(registry, key)
    assert found is not None, f"{key!r} is absent"
    return found


def read_all(registry: Registry, prefix: str) -> list[KeyValue]:
    """Read all keys with the prefix."""
    return key_values(commit(registry, Range(prefix)).results[0])


def key_values(result: Result) -> list[KeyValue]:
    """The result of a range."""
    assert isinstance(result, tuple)
    return list(result)


def _last_key(found: Sequence[KeyValue]) -> str:
    return found[-1].key if found else ""


def nested(result: Result) -> Outcome:
    """The result of a nested transaction."""
    assert isinstance(result, Outcome)
    return result


def grant(registry: Registry, ttl_s: float) -> Granted:
    """Create a lease."""
    granted = registry.execute(Grant(ttl_s), TIMEOUT_S)
    assert isinstance(granted, Granted)
    return granted


def renew(registry: Registry, lease: int, proof: Transaction) -> Outcome:
    """Renew a lease and prove it, in one step or in two, as the registry's abilities allow."""
    renewed = registry.execute(KeepAlive(lease, proof), TIMEOUT_S)
    if isinstance(renewed, Outcome):
        return renewed
    assert renewed == Done()
    return commit(registry, *proof.then, guards=proof.guards, otherwise=proof.otherwise)


def revision_now(registry: Registry) -> int:
    """The registry's latest revision."""
    return commit(registry).revision


def put_all(registry: Registry, items: Sequence[tuple[str, bytes]]) -> None:
    """Put many keys, in as few transactions as the registry's limits allow."""
    step = min(registry.capabilities.max_operations, 100)
    for start in range(0, len(items), step):
        commit(registry, *(Put(key, value) for key, value in items[start : start + step]))


def past_end(registry: Registry, granted: Granted) -> float:
    """Seconds from the last keep-alive after which the lease's keys must be gone."""
    return granted.ttl_s + registry.capabilities.lease_detection_s


class RegistryConformance:
    """The contract of registries: subclass it, provide the fixture ``harness``, and run pytest."""

    @pytest.fixture
    def harness(self) -> RegistryHarness:
        """The backend's harness, new for every test."""
        raise NotImplementedError("a backend overrides the fixture `harness`")

    @pytest.fixture
    def connect(self, harness: RegistryHarness) -> Iterator[Connect]:
        """Opens connections that are closed when the test ends."""
        with ExitStack() as stack:
            yield lambda: stack.enter_context(closing(harness.open()))

    @pytest.fixture
    def registry(self, connect: Connect) -> Registry:
        """One connection."""
        return connect()

    @pytest.fixture
    def recorder(self, harness: RegistryHarness) -> EventRecorder:
        """A sink for one watch."""
        return EventRecorder(harness.patience_s)

    # -- transactions

    def test_puts_and_reads_back(self, registry: Registry, harness: RegistryHarness) -> None:
        """A key as stored; "``lease`` is 0 if it belongs to none"."""
        key = harness.prefix + "k"
        assert get(registry, key) is None
        revision = put(registry, key, b"one")
        assert read(registry, key) == KeyValue(key, b"one", revision, revision, 0)

    def test_results_stand_in_order(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "the branch that ran, the revision, and a result for each operation"."""
        stored, fresh, gone = (harness.prefix + name for name in ("stored", "fresh", "gone"))
        first = put(registry, stored, b"s")
        put(registry, gone)
        outcome = commit(
            registry,
            Get(stored),
            Put(fresh, b"f"),
            Delete(gone),
            Get(harness.prefix + "absent"),
            Range(stored),
            Stat(stored),
        )
        kept = KeyValue(stored, b"s", first, first)
        assert outcome.succeeded
        assert outcome.results == (kept, None, None, None, (kept,), Stats(1, first))
        assert read(registry, fresh).mod_revision == outcome.revision
        assert get(registry, gone) is None

    def test_a_key_is_read_without_its_value(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "with ``keys_only`` an empty value"."""
        key = harness.prefix + "k"
        put(registry, key, 100_000 * b"v")
        put(registry, key, 100_000 * b"w")
        stored = read(registry, key)
        outcome = commit(registry, Get(key, keys_only=True), Get(key + "k", keys_only=True))
        assert outcome.results == (replace(stored, value=b""), None)

    def test_otherwise_runs_when_one_guard_fails(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Run ``then`` in order if every guard holds, else ``otherwise``"."""
        there, other = harness.prefix + "there", harness.prefix + "other"
        revision = put(registry, there)
        outcome = commit(
            registry,
            Put(other, b"then"),
            guards=[Created(there, revision), Absent(there)],
            otherwise=[Put(other, b"otherwise"), Get(there)],
        )
        assert not outcome.succeeded
        assert outcome.results == (None, KeyValue(there, b"", revision, revision))
        assert read(registry, other).value == b"otherwise"

    def test_is_all_or_nothing(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "A ``Transaction`` is all or nothing and linearizable"."""
        keys = [f"{harness.prefix}{number}" for number in range(5)]
        writes = [Put(key, b"x") for key in keys]
        before = put(registry, harness.prefix + "guard")
        refused = commit(registry, *writes, guards=[Absent(harness.prefix + "guard")])
        assert not refused.succeeded
        assert refused.revision == before
        assert read_all(registry, harness.prefix + "0") == []
        done = commit(registry, *writes, guards=[Unchanged(harness.prefix + "guard", before)])
        assert done.succeeded
        assert [item.mod_revision for key in keys for item in read_all(registry, key)] == [done.revision] * 5

    def test_guard_absent(self, registry: Registry, harness: RegistryHarness) -> None:
        """Guard: "the key does not exist"."""
        key = harness.prefix + "k"
        assert commit(registry, guards=[Absent(key)]).succeeded
        put(registry, key)
        assert not commit(registry, guards=[Absent(key)]).succeeded
        commit(registry, Delete(key))
        assert commit(registry, guards=[Absent(key)]).succeeded

    def test_guard_created(self, registry: Registry, harness: RegistryHarness) -> None:
        """Guard: "the key exists and was created at this revision"."""
        key = harness.prefix + "k"
        created = put(registry, key)
        modified = put(registry, key, b"again")
        assert commit(registry, guards=[Created(key, created)]).succeeded
        assert not commit(registry, guards=[Created(key, modified)]).succeeded
        commit(registry, Delete(key))
        assert not commit(registry, guards=[Created(key, created)]).succeeded
        assert not commit(registry, guards=[Created(harness.prefix + "never", created)]).succeeded

    def test_guard_unchanged(self, registry: Registry, harness: RegistryHarness) -> None:
        """Guard: "the key exists and was last put at this revision"."""
        key = harness.prefix + "k"
        created = put(registry, key, b"same")
        assert commit(registry, guards=[Unchanged(key, created)]).succeeded
        modified = put(registry, key, b"same")
        assert not commit(registry, guards=[Unchanged(key, created)]).succeeded
        assert commit(registry, guards=[Unchanged(key, modified)]).succeeded
        commit(registry, Delete(key))
        assert not commit(registry, guards=[Unchanged(key, modified)]).succeeded

    def test_a_guard_fails_on_a_key_created_again(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "A key's ``create_revision`` is the revision that put it where it was absent"."""
        key = harness.prefix + "k"
        first = put(registry, key, b"same")
        changed = put(registry, key, b"other")
        assert read(registry, key) == KeyValue(key, b"other", first, changed)
        commit(registry, Delete(key))
        second = put(registry, key, b"same")
        assert read(registry, key) == KeyValue(key, b"same", second, second)
        assert second > changed > first
        assert not commit(registry, guards=[Created(key, first)]).succeeded

    def test_keys_of_one_transaction_share_its_revision(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "Several keys put by one transaction share the revision"."""
        keys = [f"{harness.prefix}{number}" for number in range(10)]
        outcome = commit(registry, *(Put(key, b"") for key in keys))
        found = read_all(registry, harness.prefix)
        assert [(item.create_revision, item.mod_revision) for item in found] == [(outcome.revision,) * 2] * 10

    def test_every_change_gets_a_greater_revision(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "an integer greater than every earlier one"."""
        revisions = [revision_now(registry)]
        for number in range(5):
            revisions.append(put(registry, harness.prefix + "k", b"%d" % number))
            revisions.append(put(registry, f"{harness.prefix}{number}"))
            revisions.append(commit(registry, Delete(f"{harness.prefix}{number}")).revision)
        assert all(earlier < later for earlier, later in pairwise(revisions))

    def test_reading_gives_the_latest_revision(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "else the registry's latest when it read"."""
        put(registry, harness.prefix + "a")
        latest = put(registry, harness.prefix + "b")
        assert commit(registry, Get(harness.prefix + "a")).revision == latest
        assert commit(registry, Put(harness.prefix + "c", b""), guards=[Absent(harness.prefix + "a")]) == (
            Outcome(succeeded=False, revision=latest, results=())
        )

    def test_deleting_an_absent_key_changes_nothing(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "deleting an absent one does nothing"."""
        latest = put(registry, harness.prefix + "k")
        outcome = commit(registry, Delete(harness.prefix + "absent"))
        assert outcome == Outcome(succeeded=True, revision=latest, results=(None,))
        assert revision_now(registry) == latest

    # -- nested transactions

    def test_nested_transactions_choose_their_own_branches(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "An operation may itself be a transaction, one level deep"."""
        taken, free = harness.prefix + "taken", harness.prefix + "free"
        earlier = put(registry, taken, b"theirs")
        outcome = commit(
            registry,
            *(Transaction((Absent(key),), (Put(key, b"mine"),), (Get(key),)) for key in (taken, free)),
            Put(harness.prefix + "plain", b"p"),
        )
        refused, added = nested(outcome.results[0]), nested(outcome.results[1])
        assert (refused.succeeded, added.succeeded) == (False, True)
        assert refused.results == (KeyValue(taken, b"theirs", earlier, earlier),)
        assert added.results == (None,)
        assert refused.revision == added.revision == outcome.revision
        assert read(registry, free) == KeyValue(free, b"mine", outcome.revision, outcome.revision)
        assert read(registry, harness.prefix + "plain").mod_revision == outcome.revision

    def test_nested_guards_see_the_state_before(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "its guards see the state before the outer transaction"."""
        written, deleted = harness.prefix + "written", harness.prefix + "deleted"
        witness = harness.prefix + "witness"
        revision = put(registry, deleted)
        outcome = commit(
            registry,
            Put(written, b""),
            Delete(deleted),
            Transaction((Absent(written), Unchanged(deleted, revision)), (Put(witness, b"before"),)),
        )
        assert nested(outcome.results[2]).succeeded
        assert read(registry, witness).mod_revision == outcome.revision

    def test_nested_transactions_in_otherwise(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Run ``then`` in order if every guard holds, else ``otherwise``", nested ones as well."""
        key = harness.prefix + "k"
        revision = put(registry, key)
        outcome = commit(
            registry,
            guards=[Absent(key)],
            otherwise=[Transaction((Created(key, revision),), (Delete(key),))],
        )
        assert not outcome.succeeded
        assert nested(outcome.results[0]) == Outcome(
            succeeded=True, revision=outcome.revision, results=(None,)
        )
        assert get(registry, key) is None

    # -- ranges

    def test_range_is_complete_and_ordered(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "in key order, at one revision"."""
        items = [(f"{harness.prefix}r/{number * 7919 % 3000}", b"%d" % number) for number in range(3000)]
        put_all(registry, items)
        found = read_all(registry, harness.prefix + "r/")
        assert [(item.key, item.value) for item in found] == sorted(items)

    def test_range_larger_than_a_request(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Read the keys with this prefix", however large they are together."""
        size = registry.capabilities.max_request_bytes // 2
        items = [(f"{harness.prefix}{number:02}", bytes([number]) * size) for number in range(12)]
        for key, value in items:
            put(registry, key, value)
        assert [(item.key, item.value) for item in read_all(registry, harness.prefix)] == items

    def test_range_in_pages(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "each ``after`` the last key of the previous page", and "A ``limit`` above 0 is the maximum
        number of keys", however many."""
        prefix = harness.prefix + "r/"
        put_all(registry, [(f"{prefix}{number:04}", b"%d" % number) for number in range(3000)])
        everything = read_all(registry, prefix)
        for limit in (700, 2500, 3000, 4000):
            found: list[KeyValue] = []
            while page := key_values(commit(registry, Range(prefix, _last_key(found), limit)).results[0]):
                assert len(page) == min(limit, len(everything) - len(found))
                found += page
            assert found == everything

    def test_range_after_any_key(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "greater than ``after``", whether that is a key, has the prefix, or not."""
        prefix = harness.prefix + "b/"
        put_all(registry, [(f"{harness.prefix}{name}", b"") for name in ("a/1", "b/1", "b/2", "b/2x", "c/1")])
        expected = {
            "": ["1", "2", "2x"],
            harness.prefix + "a/1": ["1", "2", "2x"],
            prefix: ["1", "2", "2x"],
            prefix + "1": ["2", "2x"],
            prefix + "10": ["2", "2x"],
            prefix + "2": ["2x"],
            prefix + "2x": [],
            harness.prefix + "b0": [],
            harness.prefix + "c/1": [],
        }
        for after, names in expected.items():
            found = key_values(commit(registry, Range(prefix, after)).results[0])
            assert [item.key for item in found] == [prefix + name for name in names], after
            first = key_values(commit(registry, Range(prefix, after, 1)).results[0])
            assert first == found[:1]

    def test_range_of_later_keys(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "only those of the keys that were last put after this revision", and "Deleted keys are never
        in a result"."""
        prefix = harness.prefix + "l/"
        revisions = {name: put(registry, prefix + name) for name in "abcde"}
        put(registry, harness.prefix + "l0")

        def later(revision: int) -> str:
            found = key_values(commit(registry, Range(prefix, modified_after=revision)).results[0])
            assert [*found] == [item for item in read_all(registry, prefix) if item.mod_revision > revision]
            return "".join(item.key.removeprefix(prefix) for item in found)

        assert later(0) == later(revisions["a"] - 1) == "abcde"
        assert later(revisions["c"]) == "de"
        assert later(revisions["e"]) == ""
        revisions["b"] = put(registry, prefix + "b", b"rewritten")
        assert later(revisions["e"]) == "b"
        commit(registry, Delete(prefix + "b"), Delete(prefix + "d"))
        assert later(revisions["c"]) == "e"
        recreated = put(registry, prefix + "d", b"again")
        assert later(recreated - 1) == "d"
        assert later(recreated) == ""

    def test_range_of_later_keys_in_pages(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "A ``limit`` above 0 is the maximum number of keys", and "only those of the keys that were
        last put after this revision": older keys do not count against it, nor do they end a range."""
        prefix = harness.prefix + "r/"
        put_all(registry, [(f"{prefix}{number:04}", b"old") for number in range(3000)])
        earlier = max(item.mod_revision for item in read_all(registry, prefix))
        put_all(registry, [(f"{prefix}{number:04}", b"new") for number in range(1, 3000, 2)])
        expected = [item for item in read_all(registry, prefix) if item.mod_revision > earlier]
        assert len(expected) == 1500
        for limit in (0, 400, 1500, 2000):
            found: list[KeyValue] = []
            while page := key_values(
                commit(registry, Range(prefix, _last_key(found), limit, earlier)).results[0]
            ):
                assert len(page) == min(limit or len(expected), len(expected) - len(found))
                found += page
            assert found == expected

    def test_range_orders_by_bytes(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Keys are printable ASCII text, not empty, ordered by their bytes"."""
        printable = [chr(code) for code in range(0x20, 0x7F)]
        put_all(registry, [(f"{harness.prefix}{letter}", letter.encode()) for letter in reversed(printable)])
        assert [item.value.decode() for item in read_all(registry, harness.prefix)] == printable

    def test_prefixes_are_literal(self, registry: Registry, harness: RegistryHarness) -> None:
        """A range reads "the keys with this prefix", and no other: no letter has a meaning of its own."""
        letters = [*string.punctuation, " ", "a", "A", "~~"]
        put_all(registry, [(f"{harness.prefix}{letter}/x", b"") for letter in letters])
        for letter in letters:
            found = [item.key for item in read_all(registry, f"{harness.prefix}{letter}/")]
            assert found == [f"{harness.prefix}{letter}/x"]

    def test_a_prefix_may_begin_another(self, registry: Registry, harness: RegistryHarness) -> None:
        """A group whose name begins with another's is not in the other's range."""
        one, ten = f"{harness.prefix}g1", f"{harness.prefix}g10"
        put_all(registry, [(f"{group}/{name}", b"") for group in (one, ten) for name in "ab"])
        assert [item.key for item in read_all(registry, one + "/")] == [one + "/a", one + "/b"]
        assert len(read_all(registry, one)) == 4
        (stats,) = commit(registry, Stat(one + "/")).results
        assert isinstance(stats, Stats)
        assert stats.count == 2

    def test_a_key_is_in_the_range_of_itself(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "the keys with this prefix": a key that equals it too, and none that is shorter."""
        put_all(registry, [(harness.prefix + name, b"") for name in ("a", "ab", "abc", "b")])
        assert [item.key for item in read_all(registry, harness.prefix + "ab")] == [
            harness.prefix + "ab",
            harness.prefix + "abc",
        ]

    def test_stat_counts_and_tells_the_newest(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Count the keys with this prefix and find their newest ``mod_revision``"."""
        prefix = harness.prefix + "s/"
        put_all(registry, [(f"{prefix}{number:03}", b"") for number in range(200)])
        newest = put(registry, prefix + "050", b"again")
        put(registry, harness.prefix + "elsewhere")
        assert commit(registry, Stat(prefix)).results == (Stats(200, newest),)
        commit(registry, Delete(prefix + "000"))
        assert commit(registry, Stat(prefix)).results == (Stats(199, newest),)

    def test_stat_of_nothing(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "``newest`` is 0 if there is no key"."""
        put(registry, harness.prefix + "k")
        assert commit(registry, Stat(harness.prefix + "none/")).results == (Stats(0, 0),)

    # -- keys and values

    def test_unusual_keys(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "Keys are printable ASCII text": nothing in one is quoted, decoded, folded or trimmed."""
        names = [
            "%2F%00%20",
            "%",
            "a//b",
            "../x",
            " lead",
            "trail ",
            "'quoted\"",
            "UPPER",
            "upper",
            "x" * 200,
        ]
        before = revision_now(registry)
        watch = registry.watch(Target(harness.prefix, prefix=True), before + 1, recorder)
        for name in names:
            revision = put(registry, harness.prefix + name, name.encode())
            recorder.wait_for(Changed(harness.prefix + name, revision, name.encode()))
        watch.close()
        assert {item.key: item.value for item in read_all(registry, harness.prefix)} == {
            harness.prefix + name: name.encode() for name in names
        }

    @pytest.mark.parametrize(
        "value",
        [b"", bytes(range(256)), b"\x00", b"\xff" * 500_000],
        ids=["empty", "all-bytes", "nul", "500kB"],
    )
    def test_values_are_bytes(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder, value: bytes
    ) -> None:
        """Holds: "values are bytes": any, and none of them like no value at all."""
        key = harness.prefix + "k"
        revision = put(registry, key, value)
        assert read(registry, key).value == value
        watch = registry.watch(Target(key), revision, recorder)
        recorder.wait_for(Changed(key, revision, value))
        watch.close()

    # -- limits

    def test_limits_that_are_declared_are_kept(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Maximum length": so long works."""
        count = registry.capabilities.max_operations
        keys = [f"{harness.prefix}{number:05}" for number in range(count)]
        outcome = commit(registry, *(Put(key, b"") for key in keys), guards=[Absent(key) for key in keys])
        assert outcome.succeeded
        assert len(read_all(registry, harness.prefix)) == count
        outcome = commit(
            registry, guards=[Absent(key) for key in keys], otherwise=[Delete(key) for key in keys]
        )
        assert not outcome.succeeded
        assert read_all(registry, harness.prefix) == []

    def test_nested_lists_count_on_top(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "and the longest list of a nested one counts on top of it"."""
        count = registry.capabilities.max_operations - 1
        keys = [f"{harness.prefix}{number:05}" for number in range(count)]
        outcome = commit(registry, *(Transaction((Absent(key),), (Put(key, b""),)) for key in keys))
        assert [nested(result).succeeded for result in outcome.results] == [True] * count
        outcome = commit(registry, Transaction((), tuple(Delete(key) for key in keys)))
        assert len(nested(outcome.results[0]).results) == count
        assert read_all(registry, harness.prefix) == []

    def test_the_largest_request(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Keys and values of one transaction together": as many bytes as declared do work."""
        key = harness.prefix + "k"
        value = b"x" * (registry.capabilities.max_request_bytes - len(key))
        put(registry, key, value)
        assert read(registry, key).value == value

    def test_too_many_operations(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "If it raises any other error, the request had no effect and will have none"."""
        before = put(registry, harness.prefix + "before")
        keys = [f"{harness.prefix}{number:05}" for number in range(registry.capabilities.max_operations + 1)]
        puts = [Put(key, b"") for key in keys]
        with pytest.raises(RequestTooLarge):
            commit(registry, *puts)
        with pytest.raises(RequestTooLarge):
            commit(registry, guards=[Absent(harness.prefix + "before")], otherwise=puts)
        with pytest.raises(RequestTooLarge):
            commit(registry, Put(keys[0], b""), guards=[Absent(key) for key in keys])
        with pytest.raises(RequestTooLarge):
            commit(registry, Put(harness.prefix + "outer", b""), Transaction((), tuple(puts)))
        with pytest.raises(RequestTooLarge):
            commit(registry, Transaction((), tuple(puts[1:])))
        with pytest.raises(RequestTooLarge):
            commit(registry, *(Transaction((), (Get(key),)) for key in keys[1:]))
        assert revision_now(registry) == before

    def test_too_many_bytes(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "If it raises any other error, the request had no effect and will have none"."""
        before = put(registry, harness.prefix + "before")
        key = harness.prefix + "k"
        half = b"x" * (registry.capabilities.max_request_bytes // 2)
        with pytest.raises(RequestTooLarge):
            put(registry, key, b"x" * (registry.capabilities.max_request_bytes - len(key) + 1))
        with pytest.raises(RequestTooLarge):
            commit(
                registry,
                Put(harness.prefix + "a", half),
                Transaction((), (Put(harness.prefix + "b", half), Put(harness.prefix + "c", b"more"))),
            )
        assert revision_now(registry) == before

    # -- unknown outcomes

    def test_what_is_unknown_took_effect_as_a_whole_or_not(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "took effect, or will take effect a little later, or never", and "all or nothing"."""
        self._needs_cut_answers(harness)
        keys = {f"{harness.prefix}{number}" for number in range(5)}
        gone, inner = harness.prefix + "gone", harness.prefix + "inner"
        before = put(registry, gone)
        write = Transaction(
            (Unchanged(gone, before),),
            (
                *(Put(key, b"new") for key in sorted(keys)),
                Delete(gone),
                Transaction((Absent(inner),), (Put(inner, b"new"),)),
            ),
        )
        with harness.cut_answers(), pytest.raises(OutcomeUnknown):
            registry.execute(write, CUT_S)
        found = read_all(registry, harness.prefix)
        assert {item.key for item in found} in ({gone}, {*keys, inner})
        assert len({(item.create_revision, item.mod_revision) for item in found}) == 1

    def test_an_unknown_outcome_is_read_back(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "it raises ``OutcomeUnknown``"; the same guards tell if it did."""
        self._needs_cut_answers(harness)
        key = harness.prefix + "k"
        for number in range(3):
            before = put(registry, key, b"%d before" % number)
            guards = (Unchanged(key, before),)
            with harness.cut_answers(), pytest.raises(OutcomeUnknown):
                registry.execute(Transaction(guards, (Put(key, b"%d unknown" % number),)), CUT_S)
            again = commit(registry, Put(key, b"%d again" % number), guards=guards, otherwise=[Get(key)])
            found = read(registry, key)
            assert found.value == (b"%d again" if again.succeeded else b"%d unknown") % number
            assert found.create_revision < before < found.mod_revision or number == 0
            assert again.succeeded or again.results == (found,)

    def test_a_revocation_of_unknown_outcome(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "End a lease now, deleting its keys", all or none of them, and once more without harm."""
        self._needs_cut_answers(harness)
        granted = grant(registry, harness.min_ttl_s * 10)
        keys = [f"{harness.prefix}{number}" for number in range(5)]
        commit(registry, *(Put(key, b"", granted.lease) for key in keys))
        with harness.cut_answers(), pytest.raises(RetryLater):
            registry.execute(Revoke(granted.lease), CUT_S)
        assert len(read_all(registry, harness.prefix)) in {0, len(keys)}
        registry.execute(Revoke(granted.lease), TIMEOUT_S)
        assert read_all(registry, harness.prefix) == []

    @staticmethod
    def _needs_cut_answers(harness: RegistryHarness) -> None:
        if not harness.can_cut_answers:
            pytest.skip("nothing is between this registry and its caller that could lose an answer")

    # -- another store

    def test_another_store_in_its_place_is_refused(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "every request on the connection raises ``RegistryRefused``"."""
        if not harness.can_be_replaced:
            pytest.skip("no other store can be put in the place of this one")
        key = harness.prefix + "k"
        granted = grant(registry, harness.min_ttl_s * 10)
        created = put(registry, key, b"1", granted.lease)
        with harness.replace():
            self._wait_until_refused(registry, Transaction(then=(Get(key),)))
            for request in (
                Transaction((Absent(key),), (Put(key, b"2"),)),
                Transaction((Created(key, created),)),
                KeepAlive(granted.lease),
                KeepAlive(granted.lease, Transaction((Created(key, created),))),
                Grant(harness.min_ttl_s),
                Revoke(granted.lease),
            ):
                with pytest.raises(RegistryRefused):
                    registry.execute(request, TIMEOUT_S)

    @staticmethod
    def _wait_until_refused(registry: Registry, read_it: Transaction) -> None:
        """Retry until the connection refuses requests; one that is made anew may be useless for a while."""
        for _ in range(MANY):
            try:
                outcome = registry.execute(read_it, CUT_S)
            except RegistryRefused:
                return
            except RetryLater:
                continue
            raise AssertionError(f"the other store was read: {outcome}")
        raise AssertionError("the connection neither noticed that it was replaced nor came back")

    # -- leases

    def test_a_lease_is_granted_for_long_enough(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "The new lease's id, never 0, and its time to live, which is at least the requested one"."""
        leases = [grant(registry, harness.min_ttl_s * factor) for factor in (1, 1.5, 30)]
        assert all(
            granted.ttl_s >= harness.min_ttl_s * factor
            for granted, factor in zip(leases, (1, 1.5, 30), strict=True)
        )
        assert 0 not in {granted.lease for granted in leases}
        assert len({granted.lease for granted in leases}) == 3
        shortest = grant(registry, registry.capabilities.min_lease_ttl_s / 10)
        assert shortest.ttl_s >= registry.capabilities.min_lease_ttl_s

    def test_a_lease_ends_with_all_its_keys_at_once(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "The end of a lease (by time or by ``Revoke``) deletes all its keys in one
        transaction"."""
        granted = grant(registry, harness.min_ttl_s)
        keys = [f"{harness.prefix}{number}" for number in range(20)]
        put(registry, harness.prefix + "stays")
        for key in keys:
            put(registry, key, b"", granted.lease)
        assert {item.lease for item in read_all(registry, harness.prefix)} == {0, granted.lease}
        start = revision_now(registry) + 1
        watch = registry.watch(Target(harness.prefix, prefix=True), start, recorder)
        harness.let_pass(past_end(registry, granted))
        assert [item.key for item in read_all(registry, harness.prefix)] == [harness.prefix + "stays"]
        deletions = recorder.wait_for_absence(keys)
        watch.close()
        assert len({deletion.revision for deletion in deletions}) == 1
        assert deletions[0].revision >= start

    def test_a_lease_ends_though_nobody_asks(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """A lease ends "at most ``lease_detection_s`` later", and a watch reports it."""
        granted = grant(registry, harness.min_ttl_s)
        key = harness.prefix + "k"
        revision = put(registry, key, b"", granted.lease)
        watch = registry.watch(Target(key), revision, recorder)
        recorder.wait_for(Changed(key, revision, b""))
        harness.let_pass(past_end(registry, granted))
        (deletion,) = recorder.wait_for_absence([key])
        watch.close()
        assert deletion.revision > revision

    def test_a_lease_never_ends_early(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "A lease ends when its time to live has passed on the registry's clock without a
        ``KeepAlive``; never earlier"."""
        registry, other = connect(), connect()
        granted = grant(registry, harness.min_ttl_s)
        revision = put(registry, harness.prefix + "k", b"", granted.lease)
        for _ in range(5):
            harness.let_pass(granted.ttl_s / 10)
            assert commit(other, guards=[Created(harness.prefix + "k", revision)]).succeeded

    def test_keeping_alive_renews_to_the_full_time(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "Renew a lease to its full time"."""
        granted = grant(registry, harness.min_ttl_s)
        revision = put(registry, harness.prefix + "k", b"", granted.lease)
        for _ in range(6):
            harness.let_pass(granted.ttl_s / 2)
            assert registry.execute(KeepAlive(granted.lease), TIMEOUT_S) == Done()
        assert commit(registry, guards=[Created(harness.prefix + "k", revision)]).succeeded
        harness.let_pass(past_end(registry, granted))
        assert get(registry, harness.prefix + "k") is None

    def test_the_ages_of_leases_are_told(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Return the ages of live leases", and "Minimum seconds since a lease was renewed last"."""
        if not harness.can_tell_ages:
            pytest.skip("the store does not tell how old a lease is")
        ended, lives = grant(registry, harness.min_ttl_s), grant(registry, harness.min_ttl_s * 10)
        harness.let_pass(past_end(registry, ended))
        before = registry.lease_ages([ended.lease, lives.lease], TIMEOUT_S)
        registry.execute(KeepAlive(lives.lease), TIMEOUT_S)
        after = registry.lease_ages([lives.lease], TIMEOUT_S)
        assert list(before) == list(after) == [lives.lease]
        assert before[lives.lease].ttl_s == after[lives.lease].ttl_s == lives.ttl_s
        assert 0 <= after[lives.lease].age_s < before[lives.lease].age_s < lives.ttl_s
        registry.execute(Revoke(lives.lease), TIMEOUT_S)
        assert registry.lease_ages([lives.lease], TIMEOUT_S) == registry.lease_ages([], TIMEOUT_S) == {}

    def test_one_leader_answers_in_one_term(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "a keep-alive renewed the lease only if a later transaction was answered in the same
        term"."""
        granted = grant(registry, harness.min_ttl_s)
        renewed = registry.execute(KeepAlive(granted.lease), TIMEOUT_S)
        assert isinstance(renewed, Done)
        assert renewed.term == commit(registry).term

    def test_a_renewal_is_proved(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "A keep-alive may carry that transaction as its ``proof``", and "Renew a lease to its full
        time"."""
        granted = grant(registry, harness.min_ttl_s)
        key, absent = harness.prefix + "k", harness.prefix + "absent"
        created = put(registry, key, b"v", granted.lease)
        stored = KeyValue(key, b"v", created, created, granted.lease)
        proof = Transaction(
            (Created(key, created),), (Get(key), Get(absent), Stat(harness.prefix)), otherwise=(Get(absent),)
        )
        expected = Outcome(succeeded=True, revision=created, results=(stored, None, Stats(1, created)))
        for _ in range(6):
            harness.let_pass(granted.ttl_s / 2)
            assert renew(registry, granted.lease, proof) == expected
        harness.let_pass(past_end(registry, granted))
        assert get(registry, key) is None

    def test_a_proof_sees_what_others_did(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "answers with the proof's ``Outcome``, as seen after the renewal"; the lease is no
        proof."""
        registry, other = connect(), connect()
        granted = grant(registry, harness.min_ttl_s * 10)
        key = harness.prefix + "k"
        created = put(registry, key, b"", granted.lease)
        proof = Transaction((Created(key, created),), (), (Get(key),))
        assert renew(registry, granted.lease, proof).succeeded
        commit(other, Delete(key))
        assert not renew(registry, granted.lease, proof).succeeded
        again = put(other, key, b"again", granted.lease)
        stored = KeyValue(key, b"again", again, again, granted.lease)
        assert renew(registry, granted.lease, proof) == Outcome(
            succeeded=False, revision=again, results=(stored,)
        )

    def test_no_proof_makes_up_for_an_ended_lease(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "raises ``LeaseNotFound`` if it has ended", whatever its proof."""
        ended, revoked = grant(registry, harness.min_ttl_s), grant(registry, harness.min_ttl_s)
        proof = Transaction((Absent(harness.prefix + "absent"),))
        registry.execute(Revoke(revoked.lease), TIMEOUT_S)
        with pytest.raises(LeaseNotFound):
            registry.execute(KeepAlive(revoked.lease, proof), TIMEOUT_S)
        harness.let_pass(past_end(registry, ended))
        with pytest.raises(LeaseNotFound):
            registry.execute(KeepAlive(ended.lease, proof), TIMEOUT_S)

    def test_a_refused_proof_renews_nothing(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "If the store refuses the proof, it renews nothing"."""
        granted = grant(registry, harness.min_ttl_s)
        key = harness.prefix + "k"
        put(registry, key, b"", granted.lease)
        proof = Transaction(then=(Get(key),) * (registry.capabilities.max_operations + 1))
        harness.let_pass(granted.ttl_s / 2)
        try:
            renewed = registry.execute(KeepAlive(granted.lease, proof), TIMEOUT_S)
        except RequestTooLarge:
            harness.let_pass(past_end(registry, granted) - granted.ttl_s / 2)
            assert get(registry, key) is None
        else:
            assert renewed == Done(), "a proof that is too large was answered"

    def test_putting_a_key_renews_nothing(self, registry: Registry, harness: RegistryHarness) -> None:
        """A lease ends "without a ``KeepAlive``", whatever else its holder does."""
        granted = grant(registry, harness.min_ttl_s)
        harness.let_pass(granted.ttl_s / 2)
        put(registry, harness.prefix + "k", b"", granted.lease)
        harness.let_pass(past_end(registry, granted) - granted.ttl_s / 2)
        assert get(registry, harness.prefix + "k") is None

    def test_keeping_an_ended_lease_alive(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "raises ``LeaseNotFound`` if it has ended"."""
        ended, revoked = grant(registry, harness.min_ttl_s), grant(registry, harness.min_ttl_s)
        registry.execute(Revoke(revoked.lease), TIMEOUT_S)
        with pytest.raises(LeaseNotFound):
            registry.execute(KeepAlive(revoked.lease), TIMEOUT_S)
        harness.let_pass(past_end(registry, ended))
        with pytest.raises(LeaseNotFound):
            registry.execute(KeepAlive(ended.lease), TIMEOUT_S)

    def test_life_is_proved_by_the_create_revision(
        self, registry: Registry, harness: RegistryHarness
    ) -> None:
        """Holds: "An answered keep-alive does not prove that the lease lives; a later transaction that sees a
        key of the lease at its create revision does"."""
        key = harness.prefix + "node"
        first, second = grant(registry, harness.min_ttl_s), grant(registry, harness.min_ttl_s * 10)
        revision = put(registry, key, b"", first.lease)
        assert commit(registry, guards=[Created(key, revision)]).succeeded
        harness.let_pass(past_end(registry, first))
        put(registry, key, b"", second.lease)
        assert not commit(registry, guards=[Created(key, revision)]).succeeded

    def test_revoking_deletes_the_keys_at_once(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "End a lease now, deleting its keys"."""
        granted = grant(registry, harness.min_ttl_s * 10)
        keys = [f"{harness.prefix}{number}" for number in range(3)]
        put(registry, harness.prefix + "stays")
        last = commit(registry, *(Put(key, b"", granted.lease) for key in keys)).revision
        watch = registry.watch(Target(harness.prefix, prefix=True), last + 1, recorder)
        assert registry.execute(Revoke(granted.lease), TIMEOUT_S) == Done()
        assert [item.key for item in read_all(registry, harness.prefix)] == [harness.prefix + "stays"]
        deletions = recorder.wait_for_absence(keys)
        watch.close()
        assert {deletion.revision for deletion in deletions} == {revision_now(registry)}
        assert revision_now(registry) > last

    def test_revoking_twice(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Revoking a lease that does not exist does nothing"."""
        granted = grant(registry, harness.min_ttl_s)
        assert registry.execute(Revoke(granted.lease), TIMEOUT_S) == Done()
        before = put(registry, harness.prefix + "k")
        assert registry.execute(Revoke(granted.lease), TIMEOUT_S) == Done()
        assert revision_now(registry) == before

    def test_putting_under_a_dead_lease(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Putting under a lease that does not exist raises
        ``LeaseNotFound``", and nothing of the transaction takes effect."""
        granted = grant(registry, harness.min_ttl_s)
        registry.execute(Revoke(granted.lease), TIMEOUT_S)
        before = put(registry, harness.prefix + "before")
        dead = Put(harness.prefix + "dead", b"", granted.lease)
        with pytest.raises(LeaseNotFound):
            commit(registry, Put(harness.prefix + "a", b""), dead, Delete(harness.prefix + "before"))
        with pytest.raises(LeaseNotFound):
            commit(registry, Put(harness.prefix + "a", b""), Transaction((), (dead,)))
        assert [item.key for item in read_all(registry, harness.prefix)] == [harness.prefix + "before"]
        assert revision_now(registry) == before

    def test_a_put_decides_whose_the_key_is(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Write a key, under a lease unless ``lease`` is 0", whatever lease it was under before."""
        first, second = grant(registry, harness.min_ttl_s), grant(registry, harness.min_ttl_s)
        moved, freed, kept = (harness.prefix + name for name in ("moved", "freed", "kept"))
        created = commit(registry, *(Put(key, b"", first.lease) for key in (moved, freed, kept))).revision
        commit(registry, Put(moved, b"", second.lease), Put(freed, b""))
        registry.execute(Revoke(first.lease), TIMEOUT_S)
        found = {item.key: (item.lease, item.create_revision) for item in read_all(registry, harness.prefix)}
        assert found == {moved: (second.lease, created), freed: (0, created)}
        registry.execute(Revoke(second.lease), TIMEOUT_S)
        assert [item.key for item in read_all(registry, harness.prefix)] == [freed]

    def test_a_deleted_key_leaves_its_lease(self, registry: Registry, harness: RegistryHarness) -> None:
        """A key put anew belongs to the lease of that put only."""
        granted = grant(registry, harness.min_ttl_s)
        key = harness.prefix + "k"
        put(registry, key, b"", granted.lease)
        commit(registry, Delete(key))
        revision = put(registry, key, b"free")
        registry.execute(Revoke(granted.lease), TIMEOUT_S)
        assert read(registry, key) == KeyValue(key, b"free", revision, revision)

    def test_leases_outlive_their_connection(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "Close the connection and all watches, but no leases"."""
        staying, leaving = connect(), harness.open()
        granted = grant(leaving, harness.min_ttl_s * 10)
        revision = put(leaving, harness.prefix + "k", b"", granted.lease)
        leaving.close()
        leaving.close()
        assert commit(staying, guards=[Created(harness.prefix + "k", revision)]).succeeded
        assert staying.execute(KeepAlive(granted.lease), TIMEOUT_S) == Done()

    # -- watches

    def test_a_watch_tells_in_order_of_revisions(
        self, connect: Connect, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "A watch reports changes in the order of revisions, from a given revision on: each change
        at least once"."""
        registry, writer = connect(), connect()
        start = revision_now(registry) + 1
        watch = registry.watch(Target(harness.prefix, prefix=True), start, recorder)
        expected = []
        for number in range(100):
            key, value = f"{harness.prefix}{number % 10}", b"%d" % number
            expected.append(Changed(key, put(writer, key, value), value))
        recorder.wait_for(*expected)
        watch.close()
        assert recorder.changes == expected

    def test_a_watch_tells_all_of_a_transaction(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "A key was put (``value`` is set) or deleted (``value`` is None) at this revision"."""
        gone = harness.prefix + "gone"
        start = put(registry, gone) + 1
        watch = registry.watch(Target(harness.prefix, prefix=True), start, recorder)
        keys = [f"{harness.prefix}{number}" for number in range(20)]
        inner = Transaction((Absent(harness.prefix + "in"),), (Put(harness.prefix + "in", b"nested"),))
        revision = commit(registry, *(Put(key, b"v") for key in keys), Delete(gone), inner).revision
        expected = {
            *(Changed(key, revision, b"v") for key in keys),
            Changed(gone, revision, None),
            Changed(harness.prefix + "in", revision, b"nested"),
        }
        recorder.wait_for(*expected)
        watch.close()
        assert set(recorder.changes) == expected

    def test_a_watch_from_the_past(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Tell every change "at ``from_revision`` or later"."""
        key = harness.prefix + "k"
        revisions = [put(registry, key, b"%d" % number) for number in range(10)]
        deleted = commit(registry, Delete(key)).revision
        watch = registry.watch(Target(key), revisions[4], recorder)
        later = put(registry, key, b"later")
        recorder.wait_for(Changed(key, later, b"later"))
        watch.close()
        assert recorder.changes == [
            *(Changed(key, revisions[number], b"%d" % number) for number in range(4, 10)),
            Changed(key, deleted, None),
            Changed(key, later, b"later"),
        ]

    def test_a_watch_looks_at_a_key_or_a_prefix(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "The keys of a watch: one key, or every key with a prefix"."""
        names = ["a", "ab", "ab/c", "ab0", "b", "AB", "a%"]
        start = revision_now(registry) + 1
        targets = [
            Target(harness.prefix + "ab"),
            Target(harness.prefix + "ab", prefix=True),
            Target(harness.prefix + "ab/", prefix=True),
            Target(harness.prefix + "a%", prefix=True),
            Target(harness.prefix + "end", prefix=True),
        ]
        recorders = [EventRecorder(harness.patience_s) for _ in targets]
        watches = [
            registry.watch(target, start, recorder)
            for target, recorder in zip(targets, recorders, strict=True)
        ]
        keys = [*(harness.prefix + name for name in names), *(target.key for target in targets)]
        written = [Changed(key, put(registry, key), b"") for key in keys]
        for target, recorder in zip(targets, recorders, strict=True):
            last = Changed(target.key, put(registry, target.key, b"last"), b"last")
            recorder.wait_for(last)
            told = [change for change in recorder.changes if change.revision <= written[-1].revision]
            assert told == [change for change in written if target.covers(change.key)]
        for watch in watches:
            watch.close()

    def test_a_watch_misses_nothing_while_others_write(
        self, connect: Connect, harness: RegistryHarness
    ) -> None:
        """Holds: "each change at least once", for watches that begin while changes are made."""
        start = revision_now(connect()) + 1
        recorders = [EventRecorder(harness.patience_s) for _ in range(5)]
        connections = [connect() for _ in range(4)]
        watching = connect()

        def write(number: int) -> list[Changed]:
            key = f"{harness.prefix}{number}"
            return [Changed(key, put(connections[number], key, b"%d" % i), b"%d" % i) for i in range(25)]

        with ThreadPoolExecutor(len(connections)) as pool:
            writing = [pool.submit(write, number) for number in range(len(connections))]
            target = Target(harness.prefix, prefix=True)
            watches = [watching.watch(target, start, recorder) for recorder in recorders]
            written = [change for future in writing for change in future.result()]
        expected = sorted(written, key=lambda change: change.revision)
        for recorder in recorders:
            recorder.wait_for(*expected)
            assert recorder.changes == expected
        for watch in watches:
            watch.close()

    def test_a_watch_has_its_own_thread(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Changes are told "in another thread", never inside a caller's request."""
        watch = registry.watch(Target(harness.prefix, prefix=True), revision_now(registry) + 1, recorder)
        with ThreadPoolExecutor(1) as pool:
            caller = pool.submit(threading.get_ident).result()
            revision = pool.submit(put, registry, harness.prefix + "k").result()
            recorder.wait_for(Changed(harness.prefix + "k", revision, b""))
        watch.close()
        assert recorder.threads.isdisjoint({caller, threading.get_ident()})

    def test_a_closed_watch_is_silent(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "Stop the watch. Events under way may still arrive. Closing twice does nothing"."""
        target = Target(harness.prefix, prefix=True)
        start = revision_now(registry) + 1
        other = EventRecorder(harness.patience_s)
        closed, open_one = registry.watch(target, start, recorder), registry.watch(target, start, other)
        first = Changed(harness.prefix + "k", put(registry, harness.prefix + "k"), b"")
        recorder.wait_for(first)
        closed.close()
        closed.close()
        later = [Changed(harness.prefix + "k", put(registry, harness.prefix + "k"), b"") for _ in range(3)]
        other.wait_for(first, *later)
        open_one.close()
        assert recorder.changes == [first]

    def test_closing_a_connection_closes_its_watches(
        self, connect: Connect, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "Close the connection and all watches", and those of no other connection."""
        target = Target(harness.prefix, prefix=True)
        staying, leaving = connect(), connect()
        start = revision_now(staying) + 1
        other = EventRecorder(harness.patience_s)
        orphan, watch = leaving.watch(target, start, recorder), staying.watch(target, start, other)
        leaving.close()
        change = Changed(harness.prefix + "k", put(staying, harness.prefix + "k"), b"")
        other.wait_for(change)
        orphan.close()
        watch.close()
        assert recorder.changes == []

    def test_lost_history_is_told(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "or ``HistoryLost``, which means "read again: changes up to this revision may be
        missing". After that the watch continues with all later changes"."""
        if not harness.can_lose_history:
            pytest.skip("this registry cannot be made to lose history")
        key = harness.prefix + "k"
        written = [Changed(key, put(registry, key, b"%d" % number), b"%d" % number) for number in range(10)]
        harness.lose_history(written[7].revision)
        watch = registry.watch(Target(key), written[1].revision, recorder)
        recorder.wait_for_loss()
        written.append(Changed(key, put(registry, key, b"later"), b"later"))
        recorder.wait_for_all(written)
        while written[-1] not in recorder.told:
            assert len(written) < MANY, "the watch tells nothing but losses"
            written.append(Changed(key, put(registry, key, b"more"), b"more"))
            recorder.wait_for_all(written[-1:])
        watch.close()
        assert isinstance(recorder.told[0], HistoryLost)
        assert written[1].revision <= recorder.losses[0].revision
        assert recorder.losses[-1].revision <= written[-1].revision
        told = [change.revision for change in recorder.changes]
        assert told == sorted(told)

    def test_a_running_watch_survives_a_loss(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "each change at least once, or ``HistoryLost``", for a watch that runs while history
        goes."""
        if not harness.can_lose_history:
            pytest.skip("this registry cannot be made to lose history")
        key = harness.prefix + "k"
        first = Changed(key, put(registry, key), b"")
        watch = registry.watch(Target(key), first.revision, recorder)
        recorder.wait_for(first)
        put(registry, harness.prefix + "elsewhere")
        harness.lose_history(put(registry, harness.prefix + "elsewhere"))
        later = Changed(key, put(registry, key), b"")

        def told_or_lost(told: Sequence[WatchEvent]) -> bool:
            return later in told or any(
                isinstance(event, HistoryLost) and event.revision >= later.revision for event in told
            )

        recorder.wait_until(told_or_lost, f"{later}, or that it may be missing")
        watch.close()
        latest = put(registry, harness.prefix + "elsewhere")
        assert all(lost.revision < latest for lost in recorder.losses)

    def test_a_restart_loses_no_change(
        self, registry: Registry, harness: RegistryHarness, recorder: EventRecorder
    ) -> None:
        """Holds: "Revisions never go back, not even when the registry restarts", and a watch goes on."""
        if not harness.can_restart:
            pytest.skip("this registry cannot be restarted under its connections")
        key = harness.prefix + "k"
        first = put(registry, key, b"1")
        watch = registry.watch(Target(key), first, recorder)
        recorder.wait_for(Changed(key, first, b"1"))
        harness.restart()
        second = put(registry, key, b"2")
        assert second > first
        recorder.wait_until(
            lambda told: any(
                event.revision >= second if isinstance(event, HistoryLost) else event.revision == second
                for event in told
            ),
            f"the change at {second}",
        )
        third = Changed(key, put(registry, key, b"3"), b"3")
        recorder.wait_for(third)
        watch.close()

    # -- several connections

    def test_reads_see_what_was_answered_before(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "it sees every transaction answered before it was sent", whichever connection it came by."""
        one, two = connect(), connect()
        for number in range(50):
            writer, reader = (one, two) if number % 2 else (two, one)
            revision = put(writer, harness.prefix + "k", b"%d" % number)
            seen = read(reader, harness.prefix + "k")
            assert (seen.value, seen.mod_revision) == (b"%d" % number, revision)

    def test_reads_never_go_back(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "it takes effect at one point between its sending and its answer", while others write."""
        key, count = harness.prefix + "k", 100
        writer, readers = connect(), [connect() for _ in range(3)]
        put(writer, key, b"0")
        answered = [0]

        finished = threading.Event()

        def write() -> None:
            try:
                for number in range(1, count + 1):
                    put(writer, key, b"%d" % number)
                    answered[0] = number
            finally:
                finished.set()

        def check(reader: Registry) -> None:
            seen = 0
            while not finished.is_set():
                floor = max(answered[0], seen)
                seen = int(read(reader, key).value)
                assert seen >= floor

        with ThreadPoolExecutor(len(readers) + 1) as pool:
            writing = pool.submit(write)
            for checking in [pool.submit(check, reader) for reader in readers]:
                checking.result()
            writing.result()

    def test_all_that_is_read_is_of_one_revision(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "all that it reads and writes belongs to one revision"."""
        keys = [f"{harness.prefix}{number}" for number in range(4)]
        writer, reader = connect(), connect()
        commit(writer, *(Put(key, b"0") for key in keys))

        def write() -> None:
            for number in range(100):
                commit(writer, *(Put(key, b"%d" % number) for key in keys))

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not writing.done():
                outcome = commit(reader, Range(harness.prefix), Get(keys[0]), Stat(harness.prefix))
                found = key_values(outcome.results[0])
                assert len({(item.value, item.mod_revision) for item in found}) == 1
                assert outcome.results[1] == found[0]
                assert outcome.results[2] == Stats(len(keys), found[0].mod_revision)
                assert outcome.revision >= found[0].mod_revision
            writing.result()

    def test_later_keys_are_all_that_changed(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "only those of the keys that were last put after this revision": a reader that adds them to
        what it has read before always has what is stored, as a ``Stat`` in the same read shows."""
        keys = [f"{harness.prefix}{number}" for number in range(7)]
        writer, reader = connect(), connect()
        put_all(writer, [(key, b"") for key in keys])
        known = {item.key: item for item in read_all(reader, harness.prefix)}
        revision = max(item.mod_revision for item in known.values())

        def write() -> None:
            for number in range(200):
                put(writer, keys[number * number % 7], b"%d" % number)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            finished = False
            while not finished:
                finished = writing.done()
                outcome = commit(reader, Range(harness.prefix, modified_after=revision), Stat(harness.prefix))
                found = key_values(outcome.results[0])
                known |= {item.key: item for item in found}
                newest = max(item.mod_revision for item in known.values())
                assert outcome.results[1] == Stats(len(keys), newest)
                assert bool(found) == (newest > revision)
                revision = max(revision, outcome.revision)
            writing.result()
        assert [*known.values()] == [*read_all(reader, harness.prefix)]

    def test_no_update_is_lost(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "Every transaction that changes something gets a revision, an integer greater than every
        earlier one": eight writers lose no update, and no two get the same revision."""
        key, threads, increments = harness.prefix + "counter", 8, 15
        connections = [connect() for _ in range(threads)]
        put(connections[0], key, b"0")

        together = threading.Barrier(threads)

        def increment(registry: Registry) -> int:
            current = read(registry, key)
            together.wait(TIMEOUT_S)
            for _ in range(threads * increments):
                outcome = commit(
                    registry,
                    Put(key, b"%d" % (int(current.value) + 1)),
                    guards=[Unchanged(key, current.mod_revision)],
                    otherwise=[Get(key)],
                )
                if outcome.succeeded:
                    return outcome.revision
                (seen,) = outcome.results
                assert isinstance(seen, KeyValue)
                current = seen
            raise AssertionError("a guarded put failed more often than others can have succeeded")

        def work(registry: Registry) -> list[int]:
            with ExitStack() as stack:
                stack.callback(together.abort)
                revisions = [increment(registry) for _ in range(increments)]
                stack.pop_all()
            return revisions

        with ThreadPoolExecutor(threads) as pool:
            revisions = [revision for done in pool.map(work, connections) for revision in done]
        assert int(read(connections[0], key).value) == threads * increments
        assert len(set(revisions)) == threads * increments

    def test_one_connection_serves_many_threads(self, registry: Registry, harness: RegistryHarness) -> None:
        """Holds: "Every method may be called from any thread"."""
        threads, each = 8, 15

        def work(number: int) -> list[int]:
            return [put(registry, f"{harness.prefix}{number}/{i:02}") for i in range(each)]

        with ThreadPoolExecutor(threads) as pool:
            revisions = [revision for done in pool.map(work, range(threads)) for revision in done]
        assert len(set(revisions)) == len(revisions)
        assert {item.create_revision for item in read_all(registry, harness.prefix)} == set(revisions)

    def test_of_many_only_one_creates(self, connect: Connect, harness: RegistryHarness) -> None:
        """Holds: "takes effect at one point": of eight that put a key where it is absent, one does."""
        connections = [connect() for _ in range(8)]
        for number in range(10):
            key = f"{harness.prefix}{number}"
            barrier = threading.Barrier(len(connections))

            def create(registry: Registry, key: str = key, barrier: threading.Barrier = barrier) -> Outcome:
                barrier.wait(TIMEOUT_S)
                return commit(registry, Put(key, b""), guards=[Absent(key)])

            with ThreadPoolExecutor(len(connections)) as pool:
                outcomes = list(pool.map(create, connections))
            (winner,) = (outcome for outcome in outcomes if outcome.succeeded)
            assert read(connections[0], key).create_revision == winner.revision
