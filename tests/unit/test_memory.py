"""What is particular to the memory store: it is deterministic, and driven by its caller."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from rebalanser.errors import InternalError, InvalidUrl, LeaseNotFound, RegistryUnavailable
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Delete,
    Get,
    Grant,
    Granted,
    HistoryLost,
    KeepAlive,
    Operation,
    Outcome,
    Put,
    Range,
    Registry,
    Revoke,
    Settles,
    Target,
    Transaction,
    WatchEvent,
)
from rebalanser.registry.urls import parse_url
from rebalanser.runtime.clock import SystemClock
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore, open_memory
from rebalanser.testing.registry_suite import EventRecorder
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL = Target("", prefix=True)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


def write(store: MemoryStore, *operations: Operation) -> int:
    outcome = store.execute(Transaction(then=operations))
    assert isinstance(outcome, Outcome)
    return outcome.revision


def grant(store: MemoryStore, ttl_s: float) -> int:
    granted = store.execute(Grant(ttl_s))
    assert isinstance(granted, Granted)
    return granted.lease


def test_the_same_calls_give_the_same_everything() -> None:
    def run() -> list[object]:
        clock = FakeClock()
        store = MemoryStore(clock)
        seen: list[object] = []
        store.watch(ALL, 0, seen.append)
        for round_number in range(5):
            leases = [grant(store, ttl_s) for ttl_s in (3.0, 1.0, 2.0)]
            for lease in leases:
                names = sorted({f"{round_number}/{lease * factor % 7}" for factor in range(9)})
                seen.append(store.execute(Transaction(then=tuple(Put(name, b"", lease) for name in names))))
            clock.advance(1.5)
            seen.append(store.execute(Transaction(then=(Range(""),))))
        return [*seen, store.items(), store.next_expiry(), store.revision]

    assert run() == run()


def test_changes_of_a_transaction_are_told_at_once_in_key_order(store: MemoryStore) -> None:
    calls: list[Sequence[WatchEvent]] = []
    write(store, Put("b", b"0"))
    revision = write(store, Put("z", b"1"), Delete("b"), Put("a", b"2"))
    store.watch(ALL, revision, calls.append)
    later = write(store, Put("y", b""), Put("x", b""))
    assert [list(call) for call in calls] == [
        [Changed("a", revision, b"2"), Changed("b", revision, None), Changed("z", revision, b"1")],
        [Changed("x", later, b""), Changed("y", later, b"")],
    ]


def test_a_sink_may_change_the_store(store: MemoryStore) -> None:
    told: list[WatchEvent] = []

    def answer(events: Sequence[WatchEvent]) -> None:
        if any(event == Changed("question", event.revision, b"") for event in events):
            write(store, Put("answer", b""))

    store.watch(ALL, 0, answer)
    store.watch(ALL, 0, told.extend)
    revision = write(store, Put("question", b""))
    assert told == [Changed("question", revision, b""), Changed("answer", revision + 1, b"")]


def test_a_watch_closed_by_another_sink_is_told_no_more(store: MemoryStore) -> None:
    told: list[WatchEvent] = []
    store.watch(ALL, 0, lambda _: second.close())
    second = store.watch(ALL, 0, told.extend)
    write(store, Put("k", b""))
    assert told == []


@pytest.mark.rule("RB-20")
def test_a_lease_ends_exactly_when_it_is_over(store: MemoryStore, clock: FakeClock) -> None:
    lease = grant(store, 5.0)
    write(store, Put("k", b"", lease))
    clock.advance(4.999)
    store.expire()
    assert [item.key for item in store.items()] == ["k"]
    clock.advance(0.001)
    assert [item.key for item in store.items()] == ["k"]
    store.expire()
    assert store.items() == ()
    with pytest.raises(LeaseNotFound):
        store.execute(KeepAlive(lease))


def test_every_request_ends_leases_first(store: MemoryStore, clock: FakeClock) -> None:
    write(store, Put("k", b"", grant(store, 5.0)))
    clock.advance(5.0)
    outcome = store.execute(Transaction(guards=(Absent("k"),), then=(Get("k"),)))
    assert isinstance(outcome, Outcome)
    assert (outcome.succeeded, outcome.results) == (True, (None,))


def test_leases_end_in_the_order_of_their_times(store: MemoryStore, clock: FakeClock) -> None:
    told: list[WatchEvent] = []
    for key, ttl_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("a-too", 1.0)):
        write(store, Put(key, b"", grant(store, ttl_s)))
    start = store.revision + 1
    store.watch(ALL, start, told.extend)
    clock.advance(10.0)
    store.expire()
    assert told == [Changed(key, start + i, None) for i, key in enumerate(("a", "a-too", "b", "c"))]


def test_next_expiry(store: MemoryStore, clock: FakeClock) -> None:
    assert store.next_expiry() is None
    long, short = grant(store, 9.0), grant(store, 4.0)
    assert store.next_expiry() == 1004.0
    clock.advance(3.0)
    store.execute(KeepAlive(short))
    assert store.next_expiry() == 1007.0
    store.execute(Revoke(short))
    assert store.next_expiry() == 1009.0
    store.execute(Revoke(long))
    assert store.next_expiry() is None


def test_a_lease_without_keys_ends_without_a_revision(store: MemoryStore, clock: FakeClock) -> None:
    lease, before = grant(store, 1.0), store.revision
    clock.advance(1.0)
    store.expire()
    assert store.revision == before
    with pytest.raises(LeaseNotFound):
        store.execute(KeepAlive(lease))


@pytest.mark.rule("RB-28")
def test_a_restart_renews_leases_and_loses_streams(store: MemoryStore, clock: FakeClock) -> None:
    told: list[WatchEvent] = []
    write(store, Put("k", b"", grant(store, 5.0)))
    store.watch(Target("elsewhere"), 0, told.extend)
    clock.advance(4.0)
    store.restart()
    assert told == [HistoryLost(store.revision)]
    assert store.next_expiry() == 1009.0
    revision = write(store, Put("elsewhere", b""))
    assert told[1:] == [Changed("elsewhere", revision, b"")]
    assert [item.key for item in store.items()] == ["elsewhere", "k"]


@pytest.mark.rule("RB-28")
def test_compaction_forgets_what_is_older(store: MemoryStore) -> None:
    revisions = [write(store, Put("k", b"%d" % number)) for number in range(5)]
    store.compact(revisions[2])
    told: dict[int, list[WatchEvent]] = {revision: [] for revision in revisions}
    for revision in revisions:
        store.watch(Target("k"), revision, told[revision].extend)
    kept = [Changed("k", revisions[number], b"%d" % number) for number in (2, 3, 4)]
    assert told[revisions[0]] == told[revisions[1]] == [HistoryLost(revisions[1]), *kept]
    assert told[revisions[2]] == kept
    assert told[revisions[4]] == kept[2:]


def test_compaction_never_goes_back_nor_ahead(store: MemoryStore) -> None:
    last = write(store, Put("k", b""))
    store.compact(last + 1000)
    store.compact(1)
    told: list[WatchEvent] = []
    store.watch(Target("k"), 1, told.extend)
    revision = write(store, Put("k", b"later"))
    assert told == [HistoryLost(last), Changed("k", revision, b"later")]


def test_history_is_bounded(clock: FakeClock) -> None:
    store = MemoryStore(clock, max_history=10)
    revisions = [write(store, Put("a", b""), Put("b", b"")) for _ in range(20)]
    told: list[WatchEvent] = []
    store.watch(Target("a"), revisions[0], told.extend)
    assert told == [HistoryLost(revisions[14]), *(Changed("a", revision, b"") for revision in revisions[15:])]


@pytest.mark.parametrize("key", ["", "tab\t", "é", "nul\x00", "del\x7f", "line\n"])
@pytest.mark.parametrize("make", [Get, Delete, lambda key: Put(key, b"")], ids=["get", "delete", "put"])
def test_a_key_that_no_registry_can_hold(store: MemoryStore, make: type[Get], key: str) -> None:
    with pytest.raises(InternalError):
        write(store, make(key))
    with pytest.raises(InternalError):
        write(store, Transaction(otherwise=(make(key),)))
    with pytest.raises(InternalError):
        store.execute(Transaction(guards=(Absent(key),)))


@pytest.mark.parametrize(
    "operations",
    [
        (Put("k", b"1"), Put("k", b"2")),
        (Put("k", b""), Delete("k")),
        (Delete("k"), Delete("k")),
        (Put("k", b""), Transaction((), (Delete("k"),))),
        (Transaction((Absent("a"),), (Put("k", b""),)), Transaction((), (), (Put("k", b""),))),
        (Transaction((), (Put("k", b""), Delete("k"))),),
    ],
)
def test_a_key_is_written_once(store: MemoryStore, operations: tuple[Operation, ...]) -> None:
    with pytest.raises(InternalError, match="written twice"):
        write(store, Put("other", b""), *operations)
    with pytest.raises(InternalError, match="written twice"):
        store.execute(Transaction(guards=(Absent("k"),), otherwise=operations))
    assert store.items() == ()


def test_branches_that_exclude_each_other_may_write_the_same_key(store: MemoryStore) -> None:
    write(store, Transaction((Absent("k"),), (Put("k", b"then"),), (Delete("k"),)))
    assert [item.value for item in store.items()] == [b"then"]


def test_nesting_has_a_limit(store: MemoryStore) -> None:
    with pytest.raises(InternalError, match="one level deep"):
        write(store, Transaction((), (), (Transaction((), (Put("k", b""),)),)))
    assert store.items() == ()


def test_leases_end_in_their_thread_when_nobody_asks(store: MemoryStore, clock: FakeClock) -> None:
    recorder, stopped = EventRecorder(PATIENCE_S), threading.Event()
    thread = threading.Thread(target=store.end_leases, args=(stopped,))
    thread.start()
    write(store, Put("k", b"", grant(store, 1000.0)))
    store.watch(Target("k"), store.revision + 1, recorder)
    clock.advance(1000.0)
    store.wake()
    recorder.wait_for_absence(["k"])
    stopped.set()
    store.wake()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_sink_that_is_too_slow_loses_history_not_memory(store: MemoryStore) -> None:
    entered, release, recorder = threading.Event(), threading.Event(), EventRecorder(PATIENCE_S)

    def slow(events: Sequence[WatchEvent]) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)
        recorder(events)

    registry = MemoryRegistry(store)
    registry.watch(ALL, 0, slow)
    first = write(store, Put("first", b""))
    assert entered.wait(PATIENCE_S)
    keys = [f"{number:03}" for number in range(100)]
    for _ in range(101):
        last = write(store, *(Put(key, b"") for key in keys))
    release.set()
    loss = recorder.wait_for_loss()
    assert first < loss.revision <= last
    assert recorder.told[0] == Changed("first", first, b"")
    assert len(recorder.told) < 5_000
    registry.close()


def test_a_closed_connection_refuses_work(store: MemoryStore) -> None:
    registry = MemoryRegistry(store)
    registry.close()
    with pytest.raises(RegistryUnavailable):
        registry.execute(Grant(1.0), 1.0)
    with pytest.raises(RegistryUnavailable):
        registry.watch(ALL, 0, EventRecorder(PATIENCE_S))


def shared(name: str) -> Registry:
    return open_memory(parse_url(f"memory://{name}"), 1.0)


def test_one_store_for_each_name() -> None:
    one, same, other = shared("unit-a"), shared("unit-a"), shared("unit-b")
    one.execute(Transaction(then=(Put("k", b"kept"),)), 1.0)
    one.close()
    same.close()
    again = shared("unit-a")
    for registry, count in ((again, 1), (other, 0)):
        outcome = registry.execute(Transaction(then=(Range(""),)), 1.0)
        assert isinstance(outcome, Outcome)
        (found,) = outcome.results
        assert isinstance(found, tuple)
        assert len(found) == count
        registry.close()


def lease_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "rebalanser-memory-leases"}


@pytest.mark.rule("RB-20")
def test_leases_of_a_shared_store_end_by_themselves() -> None:
    before = lease_threads()
    holder, watcher = shared("unit-leases"), shared("unit-leases")
    (thread,) = lease_threads() - before
    recorder = EventRecorder(PATIENCE_S)
    watcher.watch(Target("k"), 0, recorder)
    granted = holder.execute(Grant(1.0), 1.0)
    assert isinstance(granted, Granted)
    holder.execute(Transaction(then=(Put("k", b"", granted.lease),)), 1.0)
    recorder.wait_for_absence(["k"])
    holder.close()
    watcher.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_settling_waits_until_all_is_told() -> None:
    may, order = threading.Event(), []
    registry = shared("unit-settles")
    assert isinstance(registry, Settles)

    def sink(events: Sequence[WatchEvent]) -> None:
        may.wait(PATIENCE_S)
        order.append("told")

    def settle() -> None:
        registry.settle()
        order.append("settled")

    registry.watch(Target("k"), 0, sink)
    registry.settle()
    for _ in range(2):
        registry.execute(Transaction(then=(Put("k", b""),)), 1.0)
    settling = threading.Thread(target=settle)
    settling.start()
    may.set()
    settling.join(PATIENCE_S)
    registry.close()
    assert order[-1] == "settled"
    assert 2 <= len(order) <= 3


def test_settling_ends_with_the_watch() -> None:
    told, may = threading.Event(), threading.Event()
    registry = shared("unit-settles-no-more")
    assert isinstance(registry, Settles)

    def sink(events: Sequence[WatchEvent]) -> None:
        told.set()
        may.wait(PATIENCE_S)

    watch = registry.watch(Target("k"), 0, sink)
    registry.execute(Transaction(then=(Put("k", b""),)), 1.0)
    assert told.wait(PATIENCE_S)
    settling = threading.Thread(target=registry.settle)
    settling.start()
    watch.close()
    settling.join(PATIENCE_S)
    assert not settling.is_alive()
    may.set()
    registry.close()


def test_a_store_with_a_passing_name_ends_with_its_last_user() -> None:
    first, second = shared("~unit"), shared("~unit")
    outcome = first.execute(Transaction(then=(Put("k", b""),)), 1.0)
    assert isinstance(outcome, Outcome)
    first.close()
    for revision in (outcome.revision + 1, outcome.revision):
        with closing(second):
            again = second.execute(Transaction(then=(Put("k", b""),)), 1.0)
        assert isinstance(again, Outcome)
        assert again.revision == revision
        second = shared("~unit")
    second.close()


def test_a_memory_url_needs_a_name() -> None:
    with pytest.raises(InvalidUrl, match="no name"):
        shared("")


def test_a_memory_url_has_no_options() -> None:
    with pytest.raises(InvalidUrl, match=r"^memory:// has no option 'file_mode'; it has none$"):
        open_memory(parse_url("memory://options?file_mode=0600"), 1.0)


def test_the_fake_clock_moves_when_told() -> None:
    clock = FakeClock(start=5.0, wall=100.0)
    clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (7.5, 102.5)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="does not go back"):
            clock.advance(seconds)
    assert (clock.now(), clock.wall()) == (7.5, 102.5)


def test_the_system_clock_goes_on_and_translates() -> None:
    clock = SystemClock()
    first, monotonic = clock.now(), time.monotonic()
    assert clock.now() >= first
    assert clock.to_monotonic(first) <= monotonic
    assert clock.to_monotonic(first + 50.0) - clock.to_monotonic(first) == pytest.approx(50.0, abs=30.0)


def test_importing_the_testing_package_needs_no_pytest() -> None:
    program = "import rebalanser.testing, sys; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
