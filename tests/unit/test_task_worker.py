"""A worker's renewals: all that are due go together, and none waits for another, nor for the store."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rebalanser.core.tasks import rules
from rebalanser.core.tasks import worker as execution
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.failures import LONGEST_PAUSE_S, ErrorKind
from rebalanser.core.tasks.model import ClaimState, ClaimTerm, Head, Status, Stored, TaskState
from rebalanser.core.tasks.rules import ClaimKey
from rebalanser.core.tasks.store import Applied, Change, ChangesLost
from rebalanser.core.tasks.worker import (
    AHEAD_S,
    EARLY_RENEWAL_RATIO,
    MAX_RECENT_CHANGES,
    RENEWAL_RETRY_S,
    RENEWALS_PER_TTL,
    ClaimTasks,
    Execution,
    GiveBack,
    Try,
)
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import Fenced, InvalidState, QuotaExceeded, RegistryUnavailable, RequestTooLarge
from rebalanser.history import SkuldKind
from rebalanser.runtime.clock import SystemClock
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.execution import worker
from rebalanser.tasks.execution.bodies import Bodies, ThreadCaller
from rebalanser.tasks.execution.worker import FIRST_THREADS, TaskWorker
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.tasks.functions import TaskBody, TaskOptions
from rebalanser.tasks.loops import UNREADABLE_S, ErrorPolicy
from rebalanser.tasks.metrics import TaskMetrics
from rebalanser.tasks.pauses import Pause
from rebalanser.tasks.results import FilledPayload
from rebalanser.testing import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until

TTL_S = 3600.0
FOREVER_S = 1e9
REVISION = 7


class Wall:
    """A clock of its own, which a test sets; its zero is now."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class Store:
    """Takes asks, and settles them when a test says so."""

    def __init__(self) -> None:
        self.batches: list[list[PendingMove]] = []
        self.clock = Wall()
        self.errors = ErrorPolicy("work", SystemClock(), lambda: None)
        self.told: list[SkuldKind] = []
        self.ttl_s = TTL_S
        self.batcher = self
        self.history = SimpleNamespace(write=lambda kind, *_, **__: self.told.append(kind))
        self.metrics = TaskMetrics()
        self.is_closed = False
        self.is_inherited = False
        self.queue = "work"

    def refuse_fork(self) -> None:
        pass

    def submit_all(self, asks: Sequence[PendingMove]) -> None:
        if self.is_closed:
            raise InvalidState("closed")
        self.batches.append(list(asks))

    def submit(self, ask: PendingMove) -> Future[Any]:
        self.submit_all([ask])
        return ask.future

    def term(self) -> ClaimTerm:
        return ClaimTerm(TTL_S, "boot", self.clock.now() + TTL_S)

    def settle(self, ask: PendingMove, revision: int = REVISION + 1) -> TaskState | None:
        """Write what was asked for; the state written, None where the rule refused it."""
        write = ask.write()
        if write is None:
            return None
        ask.answered(Applied(revision))
        return write.state


class Stand:
    """A worker that was not started, and claims of it that are due to be renewed."""

    def __init__(self, claims: int = 1, deadline: float = FOREVER_S) -> None:
        self.store = Store()
        self.bodies = SimpleNamespace(timed_out=[])
        self.bodies.time_out = lambda claim, _head: self.bodies.timed_out.append(claim)
        context: Any = self.store
        self.worker = TaskWorker(context, cast("Any", None), cast("Any", self.bodies), 1, cast("Any", None))
        self.claims: list[WorkerClaim] = []
        for number in range(claims):
            holder = f"holder-{number}"
            state = TaskState(
                Status.CLAIMED, ClaimState(0, holder, "worker", ClaimTerm(TTL_S, "boot", TTL_S))
            )
            stored = Stored(Head(f"{number:040}", "work", "it"), state, REVISION, 0)
            claim = WorkerClaim(stored, ClaimKey(0, holder), deadline, context)
            self.claims.append(claim)
            self.worker.execution.tries[holder] = Try(claim, holder, stored.head, 0.0)
            self.worker.execution.claim_of[stored.head.id] = claim

    @property
    def tries(self) -> list[Try[WorkerClaim]]:
        return list(self.worker.execution.tries.values())

    def renew(self) -> list[PendingMove]:
        """Let the worker look once; what it has submitted."""
        before = len(self.store.batches)
        assert self.worker._renew()
        return [ask for batch in self.store.batches[before:] for ask in batch]


ERRORS = [
    RegistryUnavailable("away"),
    RequestTooLarge("of a batch"),
    QuotaExceeded("full"),
    KeyError("a bug"),
]


@pytest.mark.rule("SK-7")
def test_all_renewals_that_are_due_soon_are_submitted_at_once() -> None:
    """One by one, 1,500 bodies would lose their claims to the time that so many commits take."""
    stand = Stand(claims=1500)
    now = time.monotonic()
    for number, each in enumerate(stand.tries):
        each.renew_at = now + (number % 2) * EARLY_RENEWAL_RATIO * TTL_S * 0.9
    stand.tries[-1].renew_at = now + TTL_S / RENEWALS_PER_TTL
    asked = stand.renew()
    assert len(stand.store.batches) == 1
    assert len(asked) == 1499


@pytest.mark.rule("SK-7")
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_renewal_that_fails_keeps_no_other_from_being_made(error: Exception) -> None:
    stand = Stand(claims=2)
    bad, good = stand.renew()
    began = time.monotonic()
    bad.future.set_exception(error)
    ended = time.monotonic()
    stand.store.settle(good)
    again, later = (each.renew_at for each in stand.tries)
    assert began + RENEWAL_RETRY_S <= again <= ended + RENEWAL_RETRY_S
    assert began - TTL_S < later - TTL_S / RENEWALS_PER_TTL <= began
    assert SkuldKind.CLAIM_RENEWED in stand.store.told


@pytest.mark.rule("SK-7")
def test_a_claim_whose_renewal_is_under_way_is_not_renewed_again() -> None:
    stand = Stand()
    (asked,) = stand.renew()
    assert stand.tries[0].renew_at == math.inf
    stand.store.settle(asked)
    assert stand.tries[0].renew_at < math.inf


@pytest.mark.rule("SK-7")
def test_while_the_ledger_takes_nothing_renewals_fail_and_are_tried_again() -> None:
    stand = Stand(claims=2)
    stand.store.is_closed = True
    assert stand.renew() == []
    assert [each.loop for each in stand.store.errors.troubles] == ["renewals"]
    assert all(0.0 < each.renew_at < math.inf for each in stand.tries)


@pytest.mark.rule("SK-7", "SK-8")
def test_a_body_is_asked_to_stop_in_time_while_the_store_answers_nothing() -> None:
    """Its renewal is under way, and nobody knows for how long."""
    stand = Stand(deadline=50.0)
    (asked,) = stand.renew()
    (claim,) = stand.claims
    assert not claim.stop_requested.is_set()
    stand.store.clock.at = 49.0
    assert not claim.stop_requested.is_set()
    stand.store.clock.at = 50.1
    assert stand.renew() == []
    assert claim.stop_requested.is_set()
    assert not asked.future.done()


@pytest.mark.rule("SK-8")
def test_a_renewal_counts_from_when_it_was_written() -> None:
    stand = Stand(deadline=TTL_S)
    (asked,) = stand.renew()
    stand.store.clock.at = 100.0
    written = stand.store.settle(asked)
    assert written is not None
    assert written.claim is not None
    assert written.claim.term.ends_at_s == 100.0 + TTL_S
    stand.store.clock.at = 99.0 + TTL_S
    assert stand.claims[0].still_mine()
    stand.store.clock.at = 100.0 + TTL_S
    assert not stand.claims[0].still_mine()


@pytest.mark.rule("SK-10")
def test_what_ends_a_claim_waits_for_nothing_that_its_body_writes() -> None:
    """A body that is out of time, or has ended, may have a thread that waits for a store that is away."""
    stand = Stand()
    (claim,) = stand.claims
    stand.renew()
    claim._updating.acquire()
    claim.settle(lambda stored: rules.complete(stored.state, claim.held, b"1"))
    assert claim.is_over
    assert [ask.lasting for ask in stand.store.batches[-1]] == [True]


@pytest.mark.rule("SK-10")
def test_a_renewal_that_is_settled_after_the_end_of_its_claim_says_nothing_of_it() -> None:
    stand = Stand(claims=2)
    first, second = stand.renew()
    for claim in stand.claims:
        claim.end(rules.Reason.ENDED)
    stand.store.settle(first)
    second.found(None)
    assert stand.store.told == []
    assert [claim.renew() for claim in stand.claims] == [False, False]


@pytest.mark.rule("SK-7", "SK-10")
@pytest.mark.parametrize("status", [Status.CANCELLED, Status.WAITING, Status.DEAD])
def test_a_body_hears_at_once_that_its_claim_is_over(status: Status) -> None:
    stand = Stand(claims=2)
    claim, other = stand.claims
    assert not stand.worker._receive(Change(claim.task_id, 0, status, REVISION + 1)), "it need not be read"
    assert claim.stop_requested.is_set()
    assert not claim.still_mine()
    assert not other.stop_requested.is_set()
    assert stand.store.told == [SkuldKind.FENCED]
    with pytest.raises(Fenced):
        claim._write(lambda stored: stored.state)


@pytest.mark.rule("SK-7")
@pytest.mark.parametrize(
    ("status", "revision"),
    [(Status.WAITING, REVISION - 1), (Status.CLAIMED, REVISION + 1), (Status.COMPLETED, REVISION + 1)],
)
def test_news_of_before_a_claim_or_of_what_it_does_do_not_end_it(status: Status, revision: int) -> None:
    """A watch is late at times, and tells of the claim itself, its renewals and its completion."""
    stand = Stand()
    (claim,) = stand.claims
    stand.worker._receive(Change(claim.task_id, 0, status, revision))
    stand.worker._receive(Change("f" * 40, 0, Status.CANCELLED, revision + 1))
    assert claim.still_mine()
    assert not claim.stop_requested.is_set()


@pytest.mark.rule("SK-7")
def test_after_changes_were_missed_all_claims_are_renewed_at_once() -> None:
    stand = Stand(claims=2)
    for each in stand.tries:
        each.renew_at = time.monotonic() + TTL_S
    stand.worker._missed(ChangesLost(REVISION + 9))
    assert len(stand.renew()) == 2


def test_renewals_that_fail_are_seen_until_they_succeed() -> None:
    stand = Stand(claims=2)
    bad, good = stand.renew()
    bad.future.set_exception(QuotaExceeded("full"))
    stand.store.settle(good)
    assert [each.loop for each in stand.store.errors.troubles] == ["renewals"]
    stand.tries[0].renew_at = 0.0
    (again,) = stand.renew()
    stand.store.settle(again)
    assert stand.store.errors.troubles == ()


@pytest.mark.rule("SK-15")
def test_a_renewal_that_failed_is_no_trouble_once_its_body_has_ended() -> None:
    """A worker whose bodies are quick may renew nothing more for days."""
    stand = Stand(claims=2)
    woken = stand.worker._woken = threading.Event()
    for asked in stand.renew():
        asked.future.set_exception(QuotaExceeded("full"))
    first, last = stand.tries
    stand.worker._end(first)
    assert [each.loop for each in stand.store.errors.troubles] == ["renewals"]
    stand.worker._end(last)
    assert stand.store.errors.troubles == ()
    assert woken.is_set()


@pytest.mark.rule("SK-15")
def test_a_renewal_that_fails_after_its_body_has_ended_is_no_trouble() -> None:
    stand = Stand()
    stand.worker._woken = threading.Event()
    (asked,) = stand.renew()
    stand.worker._end(stand.tries[0])
    asked.future.set_exception(QuotaExceeded("full"))
    assert stand.store.errors.troubles == ()


@pytest.mark.rule("SK-15")
def test_a_body_that_could_not_be_ended_elsewhere_is_no_trouble_once_another_has_ended() -> None:
    """Ten such errors in years would end the process: each would count as if nothing had worked since."""
    stand = Stand(claims=2)
    stand.worker._woken = threading.Event()
    stand.bodies.fail = Mock()
    bad, good = stand.tries
    ended: list[Future[None]] = [Future(), Future()]
    ended[0].set_exception(ZeroDivisionError())
    ended[1].set_result(None)
    stand.worker._ended_elsewhere(bad, ended[0])
    assert [each.loop for each in stand.store.errors.troubles] == ["runs"]
    stand.worker._ended_elsewhere(good, ended[1])
    assert stand.store.errors.troubles == ()


class Unread:
    """A claim of a task that its worker can't read, by its number; what it was settled with."""

    name, queue, task_id, failures, is_over = "send", "work", "0" * 40, 2, False

    def __init__(self, number: int, error_before: str = "") -> None:
        self.number = number
        self.error_before = error_before
        self.held = ClaimKey(number, "holder")
        self.left: Any = None

    def fill_results(self, head: Head, payload: bytes) -> FilledPayload:
        return FilledPayload(payload, {}, {})

    def settle(self, rule: Any) -> Future[Any]:
        head = Head(self.task_id, "work", "send")
        state = TaskState(
            Status.CLAIMED, ClaimState(self.number, "holder", "me", ClaimTerm(TTL_S, "", 0.0)), failures=2
        )
        self.left = rule(Stored(head, state, 5, 0))
        return Future()


class WithoutResults(Unread):
    """A claim of a task whose results can't be read, as the engine is away."""

    def fill_results(self, head: Head, payload: bytes) -> FilledPayload:
        raise RegistryUnavailable("away")


def send(claim: Claim, to: str) -> None:
    raise AssertionError("its arguments can't be read")


@pytest.mark.rule("SK-5", "SK-15")
def test_a_task_whose_results_can_not_be_read_now_waits_and_has_not_failed() -> None:
    clock = FakeClock()
    errors = ErrorPolicy("work", clock, lambda: None)
    body = TaskBody(send, "send", TaskOptions(backoff_s=100.0, retries=0))
    bodies = Bodies({"send": body}, (), clock, ThreadCaller(), errors, TaskMetrics())
    waits: list[float] = []
    for number in (2, 3, 12):
        claim: Any = WithoutResults(number)
        assert bodies.work(claim, Head("0" * 40, "work", "send"), b"{}") is None
        assert (claim.left.status, claim.left.failures) == (Status.WAITING, 2)
        waits.append(claim.left.due - clock.wall())
    assert waits == pytest.approx([LONGEST_PAUSE_S] * 3), "however often the task was given back before"


@pytest.mark.rule("SK-21")
def test_a_task_that_can_not_be_read_waits_ever_longer_and_has_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    errors = ErrorPolicy("work", clock, lambda: None)
    options = TaskOptions(backoff_s=1.0, max_backoff_s=100.0, retries=0)
    bodies = Bodies(
        {"send": TaskBody(send, "send", options)}, (), clock, ThreadCaller(), errors, TaskMetrics()
    )
    waits: list[float] = []
    error = "another one"
    for number in range(2, 12):
        claim: Any = Unread(3 * number, error)
        bodies.work(claim, Head("0" * 40, "work", "send"), b'{"to": "a", "cc": "b"}')
        left = claim.left
        error = left.error
        assert (left.status, left.failures) == (Status.WAITING, 2)
        assert "cc: is no argument of it" in left.error
        waits.append(left.due - clock.wall())
    assert all(2.0**n <= wait <= 2.0**n * 1.25 for n, wait in enumerate(waits[:7]))
    assert all(100.0 <= wait <= 125.0 for wait in waits[7:])
    assert [each.getMessage().count("this worker can't read") for each in caplog.records] == [1]
    (trouble,) = errors.troubles
    assert (trouble.loop, trouble.kind, trouble.attempts) == ("task send", ErrorKind.POISON, 10)
    clock.advance(UNREADABLE_S)
    assert errors.troubles == ()


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("at", [1e300, math.inf])
def test_a_worker_waits_no_longer_than_a_thread_can(at: float) -> None:
    """An earlier version took tasks that are due in the far future."""
    stand = Stand()
    source = FakeSource()
    source.wakeup = at
    stand.worker._source = cast("Any", source)
    stand.bodies.names = tuple
    pause_s = stand.worker._decide(stand.worker.execution.look())
    assert pause_s is not None
    assert 0 < pause_s <= threading.TIMEOUT_MAX


@pytest.mark.rule("SK-20")
def test_after_claims_the_threads_begin_before_the_next_look() -> None:
    """The thread that claims would else keep the interpreter's lock, for a look that mostly finds nothing."""
    stand, source = Stand(claims=0), FakeSource()
    stand.worker._source = cast("Any", source)
    stand.bodies.names = tuple
    source.add()
    pause_s = stand.worker._decide(stand.worker.execution.look())
    assert pause_s is not None
    assert 0 < pause_s <= 0.001


class FakeSource:
    """Hands out the tasks that a test gives it, and again those that are given back."""

    def __init__(self) -> None:
        self.waiting = 0
        self.pause: Pause | None = None
        self.wakeup: float | None = None
        self.rooms: list[int] = []
        self.aheads: list[int] = []
        self._made = 0
        self._more = threading.Condition()

    def add(self, count: int = 1) -> None:
        with self._more:
            self.waiting += count
            self._more.notify_all()

    def wait_for(self, waiting: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self.waiting == waiting, PATIENCE_S)

    def claim(self, limit: int, _names: object, ahead: int = 0) -> list[Claimed]:
        self.rooms.append(limit)
        self.aheads.append(ahead)
        with self._more:
            count = min(limit, self.waiting) if self.pause is None else 0
            self.waiting -= count
        return [self._claimed() for _ in range(count)]

    def _claimed(self) -> Claimed:
        self._made += 1
        claim = ClaimState(0, f"holder-{self._made}", "w", ClaimTerm(TTL_S, "", 0.0))
        stored = Stored(Head(f"{self._made:040x}", "work", "it"), TaskState(Status.CLAIMED, claim), 1, 0)
        return Claimed(stored, ClaimKey(0, claim.holder), SystemClock().now(), b"{}")

    def payloads(self, claimed: Sequence[Claimed]) -> dict[str, bytes]:
        return {each.stored.head.id: b"{}" for each in claimed}

    def next_wakeup(self, _names: object) -> float | None:
        return self.wakeup

    def report_unknown(self, names: object) -> None:
        pass

    def offer(self, rooms: object) -> None:
        pass


@pytest.mark.rule("SK-7", "SK-10")
def test_a_body_hears_that_its_claim_was_over_before_it_came() -> None:
    """Between the commit of a claim and its arrival, a watch may tell that the task was cancelled."""
    stand, source = Stand(claims=0), FakeSource()
    stand.worker._source = cast("Any", source)
    cancelled, other, renewed = (source._claimed() for _ in range(3))
    stand.worker._receive(Change(cancelled.stored.head.id, 0, Status.CANCELLED, 2))
    stand.worker._receive(Change(other.stored.head.id, 0, Status.WAITING, 0))
    stand.worker._receive(Change(renewed.stored.head.id, 0, Status.CLAIMED, 2))
    stand.worker._decide(stand.worker.execution._hand_out([cancelled, other, renewed]))
    assert [each.claim.is_over for each in stand.tries] == [True, False, False]


@pytest.mark.rule("SK-7", "SK-10")
def test_news_of_other_tasks_is_looked_at_by_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last news of each task is kept, of a bounded number of tasks: each claim looks up its own."""
    stand, source = Stand(claims=0), FakeSource()
    stand.worker._source = cast("Any", source)
    cancelled, forgotten = source._claimed(), source._claimed()
    for each in (cancelled, forgotten):
        stand.worker._receive(Change(each.stored.head.id, 0, Status.CANCELLED, 2))
    for number in range(10**6, 10**6 + MAX_RECENT_CHANGES - 2):
        stand.worker._receive(Change(f"{number:040x}", 0, Status.WAITING, 3))
    stand.worker._receive(Change(cancelled.stored.head.id, 0, Status.CANCELLED, 4))
    stand.worker._receive(Change("f" * 40, 0, Status.WAITING, 5))
    looked: list[Change] = []
    monkeypatch.setattr(stand.worker, "_pass_on", looked.append)
    stand.worker._decide(stand.worker.execution._hand_out([cancelled, forgotten]))
    assert looked == [Change(cancelled.stored.head.id, 0, Status.CANCELLED, 4)]
    assert len(stand.worker.execution._recent) == MAX_RECENT_CHANGES


class FakeBodies:
    """Bodies that last until a test ends them."""

    def __init__(self, source: FakeSource) -> None:
        self._source = source
        self.begun = threading.Semaphore(0)
        self.ends = threading.Semaphore(0)

    def names(self) -> list[str]:
        return ["it"]

    def can_end(self, _name: str) -> bool:
        return False

    def takes_thread(self, _name: str) -> bool:
        return True

    def cut_off(self) -> None:
        pass

    def work(self, _claim: WorkerClaim, _head: Head, _payload: bytes) -> None:
        self.begun.release()
        assert self.ends.acquire(timeout=PATIENCE_S)

    def give_back(self, _claim: WorkerClaim) -> None:
        self._source.add()


class Running:
    """A worker that runs, as after many quick bodies: it claims ahead."""

    def __init__(self, tasks: int, concurrency: int = 1) -> None:
        self.source, self.woken = FakeSource(), threading.Event()
        self.bodies = FakeBodies(self.source)
        self.source.add(tasks)
        history: Any = SimpleNamespace(write=lambda *_, **__: None)
        clock = SystemClock()
        errors = ErrorPolicy("work", clock, lambda: None)
        context: Any = SimpleNamespace(
            errors=errors,
            ttl_s=TTL_S,
            clock=clock,
            history=history,
            queue="work",
            is_inherited=False,
            watch=lambda *_: SimpleNamespace(close=lambda: None),
        )
        given: Any = (context, self.source, self.bodies, concurrency, self.woken)
        self.worker = TaskWorker(*given)
        self.worker.execution.body_s = 1e-4
        self.worker.start()
        assert self.bodies.begun.acquire(timeout=PATIENCE_S)

    def end(self) -> None:
        self.bodies.ends.release(1000)
        assert self.worker.stop(PATIENCE_S)


@pytest.mark.rule("SK-20")
def test_claims_ahead_are_given_back_when_a_body_is_slow() -> None:
    """And no more are claimed ahead while all threads are busy: another worker may take them at once."""
    assert execution.AHEAD_WAIT_S < 0.1, "within 100 ms"
    running = Running(tasks=30)
    running.source.wait_for(29)
    assert running.worker.execution.room() == 0
    running.source.rooms.clear()
    running.bodies.ends.release()
    assert running.bodies.begun.acquire(timeout=PATIENCE_S), "the next one is worked on"
    running.source.wait_for(28)
    assert max(running.source.rooms) == 1, "none is claimed ahead of a slow body"
    running.end()


@pytest.mark.rule("SK-20", "SK-23")
def test_what_a_free_thread_is_about_to_begin_is_not_given_back() -> None:
    """It may begin late on a busy host, and another claim would cost the place of its rate limit."""
    now = [0.0]
    decides: Execution[Any] = Execution(lambda: now[0], 10.0, lambda: 2, lambda _head: True, lambda: None)
    tries = [Try(object(), f"h{number}", Head(f"{number:040x}", "work", "send"), 5.0) for number in range(4)]
    decides.hold(tries)
    assert decides.begin(tries[0])
    now[0] = 1.0
    look = decides.look()
    assert next(look) == GiveBack(tries[2:], frees=True), "two threads: one has begun, and one is about to"
    assert look.send(None) == ClaimTasks(0, 0)
    look = decides.look()
    assert next(look) == ClaimTasks(0, 0)
    for answer in (([], False), None, None):
        look.send(answer)
    with pytest.raises(StopIteration) as ended:
        next(look)
    assert ended.value.value == execution.AHEAD_WAIT_S / 3, "the thread may take another one"
    assert decides.begin(tries[1])


@pytest.mark.rule("SK-20")
def test_a_leaving_worker_gives_back_first_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "AHEAD_WAIT_S", FOREVER_S)
    running = Running(tasks=20)
    running.source.wait_for(0)
    stopping = threading.Thread(target=running.worker.stop, args=(PATIENCE_S,))
    stopping.start()
    running.source.wait_for(19)
    assert stopping.is_alive(), "its body still runs"
    running.woken.set()
    running.bodies.ends.release()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert running.source.waiting == 19, "it claims no more"


def test_a_paused_worker_gives_back_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "AHEAD_WAIT_S", FOREVER_S)
    running = Running(tasks=20)
    running.source.wait_for(0)
    running.source.pause = Pause(since=0.0, by="ann")
    running.woken.set()
    running.source.wait_for(19)
    assert running.worker.running == 1
    running.end()
    assert running.source.waiting == 19


@pytest.mark.rule("SK-15")
def test_a_body_runs_though_no_further_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(tasks=1, concurrency=8)
    starts = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(worker.Loop, "start", starts)
    running.source.add(FIRST_THREADS - 1)
    running.woken.set()
    for _ in range(FIRST_THREADS - 1):
        assert running.bodies.begun.acquire(timeout=PATIENCE_S)
    assert starts.called
    assert len(running.worker._runs) == FIRST_THREADS
    running.end()
    assert running.worker._taken == 0
    assert running.source.waiting == 0, "none of them was given back"


@pytest.mark.rule("SK-15", "SK-20")
def test_while_the_host_refuses_threads_no_more_is_claimed_than_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else tasks would be claimed and given back all the time, and no other worker would get them."""
    running = Running(tasks=1, concurrency=8)
    source, bodies = running.source, running.bodies
    running.worker.execution.body_s = None
    errors = running.worker._context.errors
    with monkeypatch.context() as patch:
        patch.setattr(worker, "THREAD_PAUSE_S", FOREVER_S)
        patch.setattr(worker.Loop, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        source.add(20)
        running.woken.set()
        for _ in range(FIRST_THREADS - 1):
            assert bodies.begun.acquire(timeout=PATIENCE_S)
        source.wait_for(20 - (FIRST_THREADS - 1))
        assert [each.loop for each in errors.troubles] == ["threads"]
        claims, looks = source._made, len(source.rooms)
        for more in range(1, 4):
            running.woken.set()
            wait_until(lambda more=more: len(source.rooms) >= looks + more)
        assert set(source.rooms[looks + 1 :]) == {0}
        assert (source._made, running.worker.execution.idle()) == (claims, 0)
    running.worker._thread_due = 0.0
    running.woken.set()
    assert bodies.begun.acquire(timeout=PATIENCE_S), "the host gives threads again"
    assert errors.troubles == ()
    running.end()


@pytest.mark.rule("SK-20")
def test_a_slow_body_keeps_no_quick_ones_from_being_claimed_ahead() -> None:
    running = Running(tasks=1, concurrency=2)
    (slow,) = running.worker.execution.tries.values()
    assert slow.began_at is not None
    running.worker.execution.body_s = AHEAD_S / 10
    slow.began_at -= 2 * AHEAD_S
    room = running.worker.execution.room()
    assert room == 1 + 10, "one thread is free, and ten such bodies are ahead of it"
    running.source.aheads.clear()
    running.woken.set()
    wait_until(lambda: running.source.aheads[:1] == [10])
    running.end()


@pytest.mark.rule("SK-7", "SK-8", "SK-20")
def test_a_claim_that_came_late_is_renewed_the_sooner() -> None:
    clock, nobody = FakeClock(), cast("Any", None)
    context: Any = SimpleNamespace(
        errors=ErrorPolicy("work", clock, lambda: None),
        ttl_s=TTL_S,
        clock=clock,
        history=Mock(),
        queue="work",
    )
    renewing = TaskWorker(context, nobody, nobody, 1, threading.Event())
    state = TaskState(Status.CLAIMED, ClaimState(0, "h", "w", ClaimTerm(TTL_S, "", 0.0)))
    stored = Stored(Head("0" * 40, "work", "it"), state, 1, 0)
    age_s = TTL_S / 6
    began = time.monotonic()
    claimed = Claimed(stored, ClaimKey(0, "h"), clock.now() - age_s)
    made = renewing.execution.try_of(claimed, renewing._held(claimed))
    assert began <= made.renew_at - (TTL_S / RENEWALS_PER_TTL - age_s) <= time.monotonic()
