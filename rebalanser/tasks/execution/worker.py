"""Workers: claim tasks, run them in threads, and renew their claims meanwhile (SK-7, SK-8).

**Threads.** One thread claims, and one renews and times out. The others run bodies, or wait for bodies that
run in another process (``execution.bodies``); they are started as needed. A coroutine
takes no thread (``tasks.async_claim``). The renewing thread never waits for the store: it
submits all due renewals together, and requests stops in time whatever the outcome. A watch reports claims
that are over, for example because their tasks were cancelled. No thread ends by an error
(``tasks.loops``).

**Claims ahead.** A quick body leaves its thread waiting for the next claim. So tasks are claimed ahead: as
many as run in ``AHEAD_S`` seconds. If a body turns out slow, tasks behind it wait. Those that have not begun
after ``AHEAD_WAIT_S`` seconds are given back, without counting a try, and another worker may take them
(SK-20). Tasks that have not begun are also given back once the queue is paused (SK-23).

``core.tasks.worker`` decides all this. It is pure.

**Several queues in one process** share the concurrency, the earlier queues first. A worker takes places
before it claims, and holds one for each claim until its body has ended. While a worker *looks* for tasks,
workers of later queues get no place. It looks from its request for places until it has claimed fewer tasks
than it got places for. If all places are taken it goes on looking, and gets the next free one. A worker that
can take no task although a place is free does not look.

So a task of a later queue begins only while no earlier queue has a ready one, and a queue that always has
ready tasks starves those after it. A body that runs is never ended for a task of an earlier queue.

``InlineWorker`` is the worker of a test: it has the same claim sources and rules, and runs ready tasks in the
calling thread, one after another. It renews nothing and cuts nothing off: a body runs until it returns.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.model import Stored
from rebalanser.core.tasks.slots import WorkerRoom
from rebalanser.core.tasks.store import Change, ChangesLost, StatusFilter
from rebalanser.core.tasks.worker import (
    ENDS_CLAIM,
    Abandon,
    Begin,
    ClaimTasks,
    CutOff,
    EndClaiming,
    EndRequest,
    Execution,
    FailTry,
    FetchPayloads,
    GiveBack,
    Hold,
    NextTask,
    OfferRoom,
    ReportFound,
    ReportUnknown,
    Try,
    WaitUntil,
    WorkRequest,
    WorkScript,
)
from rebalanser.core.tasks.writes import ResultT, run_script
from rebalanser.errors import InternalError, InvalidState
from rebalanser.history import SkuldKind
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import EngineWatch
from rebalanser.tasks.execution.bodies import Bodies
from rebalanser.tasks.execution.claim_source import ClaimSource
from rebalanser.tasks.execution.worker_claim import Renewal, WorkerClaim
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.periodic import Ticker
from rebalanser.tasks.waiting import WaitingBodies


@dataclass(slots=True)
class _Sharer:
    """A worker, in the order of its queue."""

    held: Callable[[], int]
    wake: Callable[[], None]
    taken: int = 0
    """Number of places for claims that are being made."""
    looks: bool = False


class SharedConcurrency:
    """``concurrency`` places for bodies. May be used from any thread.

    ``stopped`` is set once any of the queues is asked to stop.
    """

    def __init__(self, concurrency: int) -> None:
        self.stopped = threading.Event()
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._sharers: list[_Sharer] = []

    def join(self, held: Callable[[], int], wake: Callable[[], None]) -> int:
        """Add a worker behind the others, and return its number.

        ``held()`` returns the number of its claims; ``wake`` makes it request places again.
        """
        with self._lock:
            self._sharers.append(_Sharer(held, wake))
            return len(self._sharers) - 1

    def take(self, number: int, wanted: int) -> int:
        """Take places for claims, at most ``wanted``; ``return_places`` gives them back."""
        with self._lock:
            sharer = self._sharers[number]
            sharer.looks = wanted > 0 or self._free() <= 0
            if any(each.looks for each in self._sharers[:number]):
                return 0
            sharer.taken = max(0, min(wanted, self._free()))
            return sharer.taken

    def return_places(self, number: int, claimed: int) -> None:
        """Return the places of a worker that now holds its claims; it looks again if it may find more."""
        with self._lock:
            sharer = self._sharers[number]
            sharer.looks = sharer.looks and sharer.taken <= claimed
            changes = sharer.taken > 0 or not sharer.looks
            sharer.taken = 0
        if changes:  # other workers counted these places as taken meanwhile
            self.wake_waiting()

    def wake_waiting(self) -> None:
        """Wake the workers that look: a place is free, or a worker has stopped looking."""
        with self._lock:
            looking = [each.wake for each in self._sharers if each.looks]
        for wake in looking:
            wake()

    def idle(self) -> int:
        """Return the number of free places."""
        with self._lock:
            return self._free()

    def leave(self, number: int) -> None:
        """Stop looking for a worker; its claims still count."""
        with self._lock:
            self._sharers[number].looks = False
        self.wake_waiting()

    def _free(self) -> int:
        return self._concurrency - sum(each.held() + each.taken for each in self._sharers)


THREAD_PAUSE_S: Final = 1.0
"""Minimum seconds before a thread that the host has refused is tried again."""
FIRST_THREADS: Final = 4
"""Threads of a new worker. The body that takes the last idle one starts another, up to the concurrency."""


class TaskWorker:
    """Claims tasks from its source and runs their bodies, ``concurrency`` at a time.

    ``woken`` is set when there may be something to claim. With ``shared`` it shares its places with the
    workers of other queues, and claims nothing ahead.
    """

    def __init__(
        self,
        context: Context,
        source: ClaimSource,
        bodies: Bodies,
        concurrency: int,
        woken: threading.Event,
        shared: SharedConcurrency | None = None,
    ) -> None:
        self._context = context
        self._source = source
        self._bodies = bodies
        self._concurrency = concurrency
        self._ready: queue.SimpleQueue[tuple[Try[WorkerClaim], bytes] | None] = queue.SimpleQueue()
        self._watch: EngineWatch | None = None
        self._waiting = WaitingBodies(context.queue, concurrency, context.clock)
        self._lock = threading.Lock()
        self._woken = woken
        self._shared = shared
        self._number = 0 if shared is None else shared.join(lambda: len(self.execution.tries), woken.set)
        self._fewer = threading.Condition(self._lock)
        self._sooner = threading.Condition(self._lock)
        self.execution: Execution[WorkerClaim] = Execution(
            time.monotonic,
            context.ttl_s,
            self._capacity,
            lambda head: bodies.can_end(head.name),
            self._sooner.notify,
            is_shared=shared is not None,
        )
        self._has_left = False
        """True once bodies that have not ended were abandoned: nothing waits for their threads."""
        self._idle_s: float | None = 0.0
        """Seconds until there may be a task to claim, unless woken before; None for ever."""
        self._claims = Loop("claims", self._claim, context.errors)
        self._loops = [self._claims, Loop("renews", self._renew, context.errors)]
        self._runs = [self._another() for _ in range(min(concurrency, FIRST_THREADS))]
        self._loops += self._runs
        # Each body takes a place; a coroutine takes a place and no thread.
        self._places = threading.Semaphore(concurrency)
        self._taken = 0
        """Number of threads that run a body."""
        self._thread_due: float | None = None
        """Time at which to start a thread again that the host has refused; None if it refused none."""

    def start(self) -> None:
        """Begin to claim and run tasks.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        self._watch = self._context.watch(self._missed, StatusFilter(ENDS_CLAIM, self._receive))
        for loop in [*self._loops]:
            loop.start()

    @property
    def running(self) -> int:
        """Number of bodies that run."""
        with self._lock:
            return self.execution.running

    def _another(self) -> Loop:
        return Loop("runs", self._run, self._context.errors)

    def _take_thread(self) -> None:
        """Take a thread for a body, and start another if it was the last idle one."""
        with self._lock:
            self._taken += 1
            if not self.execution.stopping and self._taken == len(self._runs) < self._concurrency:
                self._start_thread()

    def _start_thread(self) -> None:
        """Start one more thread; if the host refuses it, retry later. The caller holds the lock."""
        loop = self._another()
        try:
            loop.start()
        except RuntimeError as error:  # those that there are go on
            pause_s = self._context.errors.failed("threads", error, ends_process=False)
            self._thread_due = time.monotonic() + max(pause_s, THREAD_PAUSE_S)
            return
        self._runs.append(loop)
        self._loops.append(loop)
        if self._thread_due is not None:
            self._thread_due = None
            self._context.errors.worked("threads")

    def _retry_thread(self) -> None:
        """Start the thread that the host refused, once it is due again."""
        with self._lock:
            if (
                self._thread_due is not None
                and self._thread_due <= time.monotonic()
                and not self.execution.stopping
            ):
                self._start_thread()

    def _capacity(self) -> int:
        """Return the number of bodies that can run at once; the host may refuse further threads."""
        return self._concurrency if self._thread_due is None else len(self._runs)

    def stop_claiming(self, grace_s: float) -> None:
        """Claim no more, and give back tries that have not begun.

        Tasks that are being claimed now are given back too, which may take ``grace_s`` seconds.
        """
        self._hurry()
        self._decide(self.execution.give_back_ahead())
        self._claims.join(grace_s)

    def stop(self, grace_s: float) -> bool:
        """Claim no more, give back tries that have not begun, and after ``grace_s`` seconds those that run.

        True if all bodies have ended. The others are asked to stop, and their writes are refused.
        """
        self._hurry()
        have_ended = self._decide(self.execution.leave(grace_s))
        with self._lock:
            self._has_left = self._has_left or not have_ended
            self._sooner.notify()
        for trouble in ("renewals", "threads"):
            self._context.errors.ended(trouble)
        if self._watch is not None:
            self._watch.close()
        for loop in () if self._has_left else self._loops:
            loop.join()
        return not self._has_left

    def _hurry(self) -> None:
        self.execution.stopping = True
        for loop in [*self._loops]:
            loop.end_soon()
        self._woken.set()

    def _claim(self) -> bool:
        self._woken.wait(self._idle_s)
        self._woken.clear()
        # Read after clearing: _hurry() sets both in the other order.
        if self.execution.stopping:
            if self._shared is not None:
                self._shared.leave(self._number)
            return False
        self._idle_s = 0.0
        self._retry_thread()
        try:
            self._idle_s = self._decide(self.execution.look())
        except BaseException:
            if self._shared is not None:
                self._shared.return_places(self._number, 0)
            raise
        return True

    def _decide(self, script: WorkScript[ResultT]) -> ResultT:
        return run_script(script, self._perform, self._lock)

    def _perform(self, request: WorkRequest) -> Any:
        """Make one request of a script. The lock is not held."""
        source = self._source
        match request:
            case ClaimTasks(room=room, ahead=ahead):
                names = self._bodies.names()
                limit = room if self._shared is None else self._shared.take(self._number, room)
                return source.claim(limit, names, ahead=ahead), source.pause is not None
            case Hold(claimed=claimed):
                return [self._held(each) for each in claimed]
            case FetchPayloads(claimed=claimed):
                return source.payloads(claimed)
            case Begin(tries=tries, changes=changes):
                for change in changes:
                    self._pass_on(change)
                for each in tries:
                    self._ready.put(each)
            case GiveBack() | FailTry() | EndClaiming() | WaitUntil() | CutOff() | Abandon():
                self._end_tries(request)
            case _:
                return self._look_on(request)
        return None

    def _look_on(self, request: WorkRequest) -> float | None:
        """Finish a look for tasks; return the seconds until there may be others."""
        source = self._source
        match request:
            case ReportFound(found=found):
                if self._shared is not None:
                    self._shared.return_places(self._number, found)
            case OfferRoom(idle=idle, room=room):
                if self._shared is not None:
                    idle = min(idle, self._shared.idle())
                    room = min(room, idle)
                source.offer({frozenset(self._bodies.names()): WorkerRoom(idle, room)})
            case ReportUnknown():
                source.report_unknown(self._bodies.names())
            case NextTask(has_room=has_room):
                return self._next_task_s(has_room=has_room)
            case _:
                raise InternalError(f"a worker makes no request {request!r}")
        return None

    def _end_tries(self, request: EndRequest) -> None:
        """End claims, or wait until bodies have ended, as the execution has decided."""
        match request:
            case GiveBack(tries=tries, frees=frees):
                self._give_back(tries)
                if tries and frees and self._shared is not None:
                    self._shared.wake_waiting()
            case FailTry(held=held, error=error):
                self._bodies.fail(held.claim, held.head, error)
                held.claim.record(SkuldKind.CLAIM_ENDED)
            case EndClaiming(seconds=seconds):
                self._claims.join(seconds)  # it gives back what it is claiming now
                for _ in range(self._concurrency):
                    self._ready.put(None)
            case WaitUntil(reached=reached, seconds=seconds):
                with self._lock:
                    self._fewer.wait_for(reached, max(0.0, seconds))
            case CutOff():
                self._bodies.cut_off()
            case Abandon(tries=tries):
                for each in tries:
                    self._bodies.give_back(each.claim)

    def _next_task_s(self, *, has_room: bool) -> float | None:
        """Return the seconds until there may be a task to claim or a thread to start; None for ever."""
        at = self._source.next_wakeup(self._bodies.names() if has_room else ())
        times = [] if at is None else [at - self._context.clock.now()]
        if self._thread_due is not None:
            times.append(self._thread_due - time.monotonic())
        return min(times, default=None)

    def _give_back(self, tries: Sequence[Try[WorkerClaim]]) -> None:
        for each in tries:
            self._bodies.give_back(each.claim)
            each.claim.record(SkuldKind.CLAIM_ENDED)
        if self.execution.stopping:
            with self._lock:
                self._fewer.notify()

    def _held(self, claimed: Claimed) -> WorkerClaim:
        stored = claimed.stored
        claim = WorkerClaim(stored, claimed.held, claimed.sent_at + self._context.ttl_s, self._context)
        claim.record(SkuldKind.CLAIMED, stored.revision, claimed.held.number)
        return claim

    def _run(self) -> bool:
        self._places.acquire()
        job = self._ready.get()
        if job is None:
            self._places.release()
            return False
        held, payload = job
        with self._lock:
            begins = self.execution.begin(held)
        if not begins:
            self._places.release()
            return True
        try:
            ended = self._work(held, payload)
        except BaseException as error:
            self._bodies.fail(held.claim, held.head, error)
            self._end(held)
            raise
        if ended is None:
            self._end(held)
        else:
            ended.add_done_callback(partial(self._ended_elsewhere, held))
        return True

    def _ended_elsewhere(self, held: Try[WorkerClaim], ended: Future[None]) -> None:
        """End a try that took no thread."""
        error = ended.exception()
        try:
            if error is None:
                self._context.errors.worked("runs")
            else:
                self._context.errors.failed("runs", error)
                self._bodies.fail(held.claim, held.head, error)
        finally:
            self._end(held)

    def _end(self, held: Try[WorkerClaim]) -> None:
        """Forget a try that has ended, and its trouble."""
        held.claim.record(SkuldKind.CLAIM_ENDED)
        with self._lock:
            all_renewed = self.execution.ended(held)
            if self.execution.stopping:
                self._fewer.notify()
                self._sooner.notify()
        self._places.release()
        self._woken.set()
        if self._shared is not None:
            self._shared.wake_waiting()
        if all_renewed:
            self._context.errors.worked("renewals")

    def _work(self, held: Try[WorkerClaim], payload: bytes) -> Future[None] | None:
        """Begin a try; return None if it has ended, else a future that is done once it has."""
        if not self.execution.may_run(held):
            self._bodies.give_back(held.claim)
            return None
        self._waiting.enter()
        with self._lock:
            self.execution.limit_time(held)
        if not self._bodies.takes_thread(held.head.name):
            return self._bodies.work(held.claim, held.head, payload)
        self._take_thread()
        try:
            return self._bodies.work(held.claim, held.head, payload)
        finally:
            with self._lock:
                self._taken -= 1

    def _renew(self) -> bool:
        due = self._next_due()
        if due is None:
            return False
        renewals: list[tuple[Try[WorkerClaim], Renewal]] = []
        for each in due:
            try:
                renewal = self._attend(each)
            except BaseException as error:  # the next claims can't wait
                self._context.errors.failed("renewals", error)
            else:
                if renewal is not None:
                    renewals.append((each, renewal))
        if renewals:
            self._renew_together(renewals)
        return True

    def _attend(self, each: Try[WorkerClaim]) -> Renewal | None:
        """Request a stop or fail a try whose time is up; return its renewal if that is due."""
        with self._lock:
            steps = self.execution.due_steps(each)
        if steps.stops:
            each.claim.stop_requested.set()
        if steps.times_out:
            self._bodies.time_out(each.claim, each.head)
        return each.claim.renewal() if steps.renews else None

    def _renew_together(self, renewals: Sequence[tuple[Try[WorkerClaim], Renewal]]) -> None:
        """Submit renewals together. The batcher settles each; this thread does not wait."""
        with self._lock:
            sent_at = self.execution.renewing([each for each, _ in renewals])
        for each, renewal in renewals:
            renewal.outcome.add_done_callback(partial(self._renewed, each, sent_at))
        try:
            self._context.batcher.submit_all([renewal.pending for _, renewal in renewals])
        except BaseException as error:  # the batcher is closed
            for _, renewal in renewals:
                renewal.outcome.set_exception(error)

    def _renewed(self, each: Try[WorkerClaim], sent_at: float, outcome: Future[bool]) -> None:
        """Take the outcome of a renewal."""
        error = outcome.exception()
        with self._lock:
            changes_trouble = self.execution.renewed(each, sent_at, has_failed=error is not None)
        if changes_trouble and error is not None:
            self._context.errors.failed("renewals", error)
        elif changes_trouble:
            self._context.errors.worked("renewals")

    def _receive(self, change: Change) -> bool:
        """End the claim of a changed task if it is over. Return False: the task need not be read."""
        with self._lock:
            claim = self.execution.learn_change(change)
        if claim is not None:
            claim.learn_status(change.status, change.revision)
        return False

    def _pass_on(self, change: Change) -> None:
        claim = self.execution.claim_of.get(change.task)
        if claim is not None:
            claim.learn_status(change.status, change.revision)

    def _missed(self, _news: Sequence[Stored] | ChangesLost) -> None:
        """Renew all claims now: a watch has missed changes."""
        with self._lock:
            self.execution.renew_all()

    def _next_due(self) -> list[Try[WorkerClaim]] | None:
        """Wait until tries are due, and return them; None once the worker has stopped."""
        with self._lock:
            while self.execution.tries or not self.execution.stopping:
                if due := self.execution.due():
                    return due
                look_at = self.execution.next_look
                self._sooner.wait(None if look_at == math.inf else look_at - time.monotonic())
        return None


SHORTEST_STEP_S: Final = 1e-6
"""Minimum seconds by which the clock is moved: a smaller step may change no float."""
MAX_LOOKS: Final = 10_000
"""Maximum number of claims in a row that find nothing although the source has something to look at."""


@runtime_checkable
class MovableClock(Protocol):
    """A clock that a test moves forward."""

    def advance(self, seconds: float, /) -> None:
        """Let ``seconds`` pass."""


class InlineWorker:
    """Runs the tasks of ``source`` in the calling thread, and the ticks of ``ticker`` as they become due.

    ``settle`` waits until the source has seen all writes.
    """

    def __init__(
        self,
        context: Context,
        source: ClaimSource,
        bodies: Bodies,
        ticker: Ticker,
        settle: Callable[[], None],
    ) -> None:
        self._context = context
        self._source = source
        self._bodies = bodies
        self._ticker = ticker
        self._settle = settle

    def run(self, advance_s: float) -> int:
        """Run tasks that are ready now or within ``advance_s`` seconds; return the number of tries.

        Raises:
            InvalidState: the clock can't be moved, or tasks are ready and the queue is paused.
        """
        clock = self._context.clock
        tries = self._run_ready()
        if not advance_s:
            return tries
        if not isinstance(clock, MovableClock):
            raise InvalidState(
                "the queue has no clock that can be moved, such as rebalanser.testing.FakeClock"
            )
        ends_at = clock.now() + advance_s
        while (left_s := ends_at - clock.now()) > 0.0:
            clock.advance(min(left_s, max(self._pause_s(left_s), SHORTEST_STEP_S)))
            tries += self._run_ready()
        return tries

    def _pause_s(self, longest_s: float) -> float:
        """Return the seconds until something becomes due, at most ``longest_s``."""
        wakeup = self._source.next_wakeup(self._bodies.names())
        until_claim = longest_s if wakeup is None else wakeup - self._context.clock.now()
        return min(longest_s, until_claim, self._ticker.pause_s(longest_s))

    def _run_ready(self) -> int:
        tries = looks = 0
        self._ticker.tick()
        while looks < MAX_LOOKS:
            self._settle()
            claimed = self._source.claim(1, self._bodies.names())
            for each in claimed:
                self._run(each)
            tries += len(claimed)
            looks = 0 if claimed else looks + 1
            wakeup = self._source.next_wakeup(self._bodies.names())
            if not claimed and (wakeup is None or wakeup > self._context.clock.now()):
                break
        self._refuse_pause()
        self._source.report_unknown(self._bodies.names())
        return tries

    def _refuse_pause(self) -> None:
        """Raise if ready tasks are left because the queue is paused."""
        pause, wall = self._source.pause, self._context.clock.wall()
        if pause is not None and self._source.ready_since(wall) is not None:
            raise InvalidState(f"tasks are ready and the queue is {pause.describe(wall)}; resume() it")

    def _run(self, claimed: Claimed) -> None:
        stored = claimed.stored
        claim = WorkerClaim(stored, claimed.held, claimed.sent_at + self._context.ttl_s, self._context)
        claim.record(SkuldKind.CLAIMED, stored.revision, claimed.held.number)
        payload = self._source.payloads([claimed]).get(stored.head.id)
        if payload is None:
            self._bodies.fail(claim, stored.head, InternalError("the task's payload is not in the store"))
        else:
            contextvars.copy_context().run(self._work, claim, claimed, payload)
        self._context.batcher.flush()
        claim.record(SkuldKind.CLAIM_ENDED)

    def _work(self, claim: WorkerClaim, claimed: Claimed, payload: bytes) -> None:
        WaitingBodies(self._context.queue, 1, self._context.clock).enter()
        ended = self._bodies.work(claim, claimed.stored.head, payload)
        if ended is not None:
            ended.result()
