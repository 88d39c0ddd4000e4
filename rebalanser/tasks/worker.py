"""Works on tasks: claims as many as it can run, runs them in threads, and renews what runs (SK-7, SK-8).

Three kinds of threads: one claims, one renews and times out, the others run bodies, or wait for one that runs
elsewhere and that they can end (:mod:`~rebalanser.tasks.bodies`); there are as many of these as are needed.
A coroutine takes none (:mod:`~rebalanser.tasks.aio.loop_caller`). The one that renews never waits for the
store: it submits all renewals that are due together, and asks bodies to stop in time whatever becomes of
them. A watch tells at once which claims are over, as their tasks were cancelled. A body that is quick
leaves its thread waiting for the next claim, so where bodies are quick some more are claimed ahead: as many
as are run in :data:`AHEAD_S` seconds. One that has not begun after :data:`BEGINS_S` seconds is given back,
its try not counted, as a body is slower than those before it: another worker may take it at once (SK-20).
So is all that has not begun once the queue is paused (SK-23).
No thread ends by an error, see :mod:`~rebalanser.tasks.loops`.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from rebalanser.errors import InternalError
from rebalanser.history import SkuldKind
from rebalanser.tasks.bodies import Bodies
from rebalanser.tasks.claim_source import ClaimSource
from rebalanser.tasks.claiming import MAX_CLAIMS, Claimed
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import Change, Lost, Watch
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.model import Head, Stored, TaskId
from rebalanser.tasks.sharing import SharedConcurrency
from rebalanser.tasks.waiting import WaitingBodies
from rebalanser.tasks.worker_claim import ENDS_CLAIM, Renewal, WorkerClaim

AHEAD_S: Final = 0.05
BEGINS_S: Final = 0.075
"""Maximum seconds that a claim ahead waits for a thread."""
RENEWALS: Final = 3
"""Renewals per claim TTL."""
CUT_OFF_S: Final = 10.0
"""Maximum seconds in which bodies that can be ended must end, after the grace."""
PAUSE_S: Final = 0.5
"""Seconds between a renewal that failed and the next one."""
THREAD_PAUSE_S: Final = 1.0
"""Minimum seconds before a thread that the host has refused is tried again."""
LONGEST_PAUSE_S: Final = 3600.0
"""Maximum pause until a task is due: a thread can't wait for any number of seconds."""
FEW: Final = 4
"""Threads to begin with: a body that takes the last one starts another, up to the concurrency."""
TOGETHER: Final = 0.05
"""Part of a claim's time by which it is renewed early, together with others that are due."""
RECENT_CHANGES: Final = 1024
"""Maximum number of changes that are kept, as they may end a claim that is being handed out."""
_SMOOTHING: Final = 0.05


@dataclass(slots=True)
class _Try:
    """A claim that this worker holds."""

    claim: WorkerClaim
    head: Head
    renew_at: float
    """In seconds of ``time.monotonic()``, as all times here; infinity while a renewal is under way."""
    handed_out_at: float = 0.0
    began_at: float | None = None
    """Time at which its body began."""
    ends_at: float | None = None
    """When the claim fails.

    None before the body began, or for ever, or where the body is ended instead.
    """


class Worker:
    """Runs the bodies of the tasks that its source of claims gives, ``concurrency`` at a time.

    ``woken`` is set by whoever knows that there may be something to claim. With ``shared`` it has the places
    that the workers of several queues share, and claims nothing ahead.
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
        self._ready: queue.SimpleQueue[tuple[_Try, bytes] | None] = queue.SimpleQueue()
        self._tries: dict[str, _Try] = {}
        self._claim_of: dict[TaskId, WorkerClaim] = {}
        """The last claim of each task whose body runs, for news of it."""
        self._recent: deque[Change] = deque(maxlen=RECENT_CHANGES)
        """The last changes that end a claim, as the news may come before the claim does."""
        self._unrenewed: set[str] = set()
        """The holders of claims whose last renewal has failed."""
        self._watch: Watch | None = None
        self._waiting = WaitingBodies(context.queue, concurrency, context.clock)
        self._ahead: dict[str, _Try] = {}
        """Tries that no thread has begun, the oldest first."""
        self._lock = threading.Lock()
        self._woken = woken
        self._shared = shared
        self._number = 0 if shared is None else shared.join(lambda: len(self._tries), woken.set)
        self._fewer = threading.Condition(self._lock)
        self._sooner = threading.Condition(self._lock)
        self._next_look = math.inf
        self._body_s: float | None = None
        self._stopping = False
        self._has_left = False
        """True once bodies that have not ended were left to themselves: nobody waits for their threads."""
        self._idle_s: float | None = 0.0
        """Seconds until there may be a task to claim, unless woken before; None for ever."""
        self._claims = Loop("claims", self._claim, context.errors)
        self._loops = [self._claims, Loop("renews", self._renew, context.errors)]
        self._runs = [self._another() for _ in range(min(concurrency, FEW))]
        self._loops += self._runs
        # A body takes a place, a coroutine no thread.
        self._places = threading.Semaphore(concurrency)
        self._taken = 0
        """Threads that are taken by a body each."""
        self._thread_due: float | None = None
        """Time of the next try to start a thread that the host has refused; None if it refused none."""

    def start(self) -> None:
        """Begin to claim and run.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        self._watch = self._context.watch(self._lost, self._hear)
        for loop in [*self._loops]:
            loop.start()

    @property
    def running(self) -> int:
        """Number of bodies that run."""
        with self._lock:
            return sum(each.began_at is not None for each in self._tries.values())

    def _another(self) -> Loop:
        return Loop("runs", self._run, self._context.errors)

    def _take_thread(self) -> None:
        """Start one more thread where a body takes the last one, if there can be one more."""
        with self._lock:
            self._taken += 1
            if not self._stopping and self._taken == len(self._runs) < self._concurrency:
                self._start_thread()

    def _start_thread(self) -> None:
        """Start one more thread; where the host refuses it, try again in a while. With the lock."""
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
            if self._thread_due is not None and self._thread_due <= time.monotonic() and not self._stopping:
                self._start_thread()

    def _capacity(self) -> int:
        """Return how many bodies can run at once; the host may refuse further threads."""
        return self._concurrency if self._thread_due is None else len(self._runs)

    def stop_claiming(self, grace_s: float) -> None:
        """Claim no more and give back what has not begun.

        What is being claimed now is given back too, which may take ``grace_s`` seconds.
        """
        self._stopping = True
        for loop in [*self._loops]:
            loop.hurry()
        self._woken.set()
        self._return_ahead(math.inf)
        self._claims.join(grace_s)

    def stop(self, grace_s: float) -> bool:
        """Claim no more, give back what has not begun, and ``grace_s`` seconds later what still runs.

        Whether all bodies have ended; those that have not are told to, and what they write is refused.
        """
        deadline = time.monotonic() + grace_s
        self._stopping = True
        for loop in [*self._loops]:
            loop.hurry()
        self._woken.set()
        self._return_ahead(math.inf)
        self._claims.join(grace_s)  # what it is claiming now it gives back itself
        for _ in range(self._concurrency):
            self._ready.put(None)
        self._wait_until(lambda: not self._tries, deadline - time.monotonic())
        self._bodies.cut_off()
        self._wait_until(lambda: not any(self._can_end(each) for each in self._tries.values()), CUT_OFF_S)
        with self._lock:
            remaining = list(self._tries.values())
            self._has_left = self._has_left or bool(remaining)
        for each in remaining:
            self._bodies.give_back(each.claim)
        with self._lock:
            self._tries.clear()
            self._ahead.clear()
            self._sooner.notify()
        for trouble in ("renewals", "threads"):
            self._context.errors.ended(trouble)
        if self._watch is not None:
            self._watch.close()
        for loop in () if self._has_left else self._loops:
            loop.join()
        return not self._has_left

    def _wait_until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Wait until it is so of the claims that are held, which only become fewer."""
        with self._lock:
            self._fewer.wait_for(reached, max(0.0, timeout_s))

    def _can_end(self, each: _Try) -> bool:
        return self._bodies.can_end(each.claim.name)

    def _claim(self) -> bool:
        self._woken.wait(self._idle_s)
        self._woken.clear()
        # Looked at after clearing: who stops sets both, in the other order.
        if self._stopping:
            if self._shared is not None:
                self._shared.leave(self._number)
            return False
        self._idle_s = 0.0
        if self._return_ahead(time.monotonic() - BEGINS_S):
            self._body_s = max(self._body_s or 0.0, BEGINS_S)
        self._retry_thread()
        room = self._taken_room()
        found = 0
        try:
            claimed = self._source.claim(max(room, 0), self._bodies.names())
            self._hand_out(claimed)
            found = len(claimed)
        finally:
            if self._shared is not None:
                self._shared.looked(self._number, found)
        is_paused = self._source.pause is not None
        if is_paused:
            self._return_ahead(math.inf)
        self._source.offer(self._idle_threads(), self._room(), self._bodies.names())
        if not claimed:
            if room > 0 and not is_paused:
                self._source.report_strange(self._bodies.names())
            self._idle_s = self._pause_s(room)
        return True

    def _taken_room(self) -> int:
        """Return how many tasks to claim; takes as many shared places, if queues share them."""
        room = self._room()
        return room if self._shared is None else self._shared.take(self._number, room)

    def _room(self) -> int:
        """Return how many tasks to claim: for free threads, and some ahead if bodies are quick."""
        if self._shared is not None:
            return min(self._idle_threads(), MAX_CLAIMS)
        slow_since = time.monotonic() - AHEAD_S
        with self._lock:
            ahead = 0
            if self._body_s is not None:
                running = (each.began_at for each in self._tries.values() if each.began_at is not None)
                quick = self._capacity() - sum(began_at < slow_since for began_at in running)
                ahead = int(quick * AHEAD_S / max(self._body_s, 1e-6))
            return min(self._capacity() + ahead - len(self._tries), MAX_CLAIMS)

    def _idle_threads(self) -> int:
        with self._lock:
            idle = self._capacity() - len(self._tries)
        return idle if self._shared is None else min(idle, self._shared.idle())

    def _pause_s(self, room: int) -> float | None:
        """Return the seconds until there may be a task to claim or give back, unless woken; None for ever."""
        times = []
        with self._lock:
            waits_longest = next(iter(self._ahead.values()), None)
        if waits_longest is not None:
            times.append(waits_longest.handed_out_at + BEGINS_S - time.monotonic())
        if self._thread_due is not None:
            times.append(self._thread_due - time.monotonic())
        at = self._source.next_wakeup(self._bodies.names() if room > 0 else ())
        times += [] if at is None else [at - self._context.clock.now()]
        return min(max(0.001, min(times)), LONGEST_PAUSE_S) if times else None

    def _return_ahead(self, handed_out_before: float) -> bool:
        """Give back what was handed out before this and has not begun; True if there was any."""
        returned: list[_Try] = []
        with self._lock:
            while self._ahead:
                holder, first = next(iter(self._ahead.items()))
                if first.handed_out_at > handed_out_before:
                    break
                del self._ahead[holder]
                self._forget(first)
                returned.append(first)
            if self._stopping:
                self._fewer.notify()
        self._give_back(returned)
        if returned and self._shared is not None:
            self._shared.freed()
        return bool(returned)

    def _hand_out(self, claimed: list[Claimed]) -> None:
        """Let the threads have what was claimed; it is given back where its payload can't be read now."""
        if not claimed:
            return
        tries = [self._try(each) for each in claimed]
        try:
            payloads = self._source.payloads(claimed)
        except BaseException:
            self._give_back(tries)
            raise
        for each in [each for each in tries if each.head.id not in payloads]:
            tries.remove(each)
            self._bodies.fail(each.claim, each.head, InternalError("the task's payload is not in the store"))
            each.claim.tell(SkuldKind.CLAIM_ENDED)
        if not tries:
            return
        with self._lock:
            is_too_late = self._stopping
            if not is_too_late:
                self._tries.update((each.claim.held.holder, each) for each in tries)
                self._claim_of.update((each.head.id, each.claim) for each in tries)
                self._ahead.update((each.claim.held.holder, each) for each in tries)
                self._look_at(min(each.renew_at for each in tries))
        if is_too_late:
            self._give_back(tries)
            return
        for change in self._recent.copy():
            self._tell(change)
        for each in tries:
            self._ready.put((each, payloads[each.head.id]))

    def _give_back(self, tries: list[_Try]) -> None:
        for each in tries:
            self._bodies.give_back(each.claim)
            each.claim.tell(SkuldKind.CLAIM_ENDED)

    def _try(self, claimed: Claimed) -> _Try:
        stored = claimed.stored
        claim = WorkerClaim(stored, claimed.held, claimed.sent_at + self._context.ttl_s, self._context)
        claim.tell(SkuldKind.CLAIMED, stored.revision, claimed.held.number)
        now = time.monotonic()
        # A claim for a slot was made earlier than it came (SK-20): a part of its time is over.
        age_s = self._context.clock.now() - claimed.sent_at
        return _Try(claim, stored.head, now + self._context.ttl_s / RENEWALS - age_s, now)

    def _run(self) -> bool:
        self._places.acquire()
        job = self._ready.get()
        if job is None:
            self._places.release()
            return False
        held, payload = job
        with self._lock:
            is_held = self._ahead.pop(held.claim.held.holder, None) is not None
            if is_held:
                held.began_at = time.monotonic()
        if not is_held:  # it was given back, as it waited for too long or the worker stops
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

    def _ended_elsewhere(self, held: _Try, ended: Future[None]) -> None:
        """End a try that has taken no thread."""
        error = ended.exception()
        try:
            if error is None:
                self._context.errors.worked("runs")
            else:
                self._context.errors.failed("runs", error)
                self._bodies.fail(held.claim, held.head, error)
        finally:
            self._end(held)

    def _end(self, held: _Try) -> None:
        """Forget a try that has ended: a claim that stayed here would be renewed for ever."""
        held.claim.tell(SkuldKind.CLAIM_ENDED)
        if held.began_at is not None:
            self._measure(time.monotonic() - held.began_at)
        with self._lock:
            was_unrenewed = held.claim.held.holder in self._unrenewed
            self._forget(held)
            all_renewed = not self._unrenewed
            if self._stopping:
                self._fewer.notify()
                self._sooner.notify()
        self._places.release()
        self._woken.set()
        if self._shared is not None:
            self._shared.freed()
        if was_unrenewed and all_renewed:
            self._context.errors.worked("renewals")

    def _forget(self, held: _Try) -> None:
        """Renew it no more, and await no news of it. With the lock."""
        self._tries.pop(held.claim.held.holder, None)
        self._unrenewed.discard(held.claim.held.holder)
        if self._claim_of.get(held.head.id) is held.claim:
            del self._claim_of[held.head.id]

    def _work(self, held: _Try, payload: bytes) -> Future[None] | None:
        """Begin a try; None if it has ended, else a future that is done once it has."""
        if self._stopping or not held.claim.still_mine():
            held.began_at = None
            self._bodies.give_back(held.claim)
            return None
        self._waiting.enter()
        if held.head.timeout_s is not None and not self._can_end(held):
            with self._lock:
                held.ends_at = time.monotonic() + held.head.timeout_s
                self._look_at(held.ends_at)
        if not self._bodies.takes_thread(held.head.name):
            return self._bodies.work(held.claim, held.head, payload)
        self._take_thread()
        try:
            return self._bodies.work(held.claim, held.head, payload)
        finally:
            with self._lock:
                self._taken -= 1

    def _measure(self, body_s: float) -> None:
        """A moving average of how long bodies take, which follows a slow one at once."""
        before = self._body_s
        self._body_s = (
            body_s if before is None or body_s > before else before + _SMOOTHING * (body_s - before)
        )

    def _renew(self) -> bool:
        due = self._next_due()
        if due is None:
            return False
        renewals: list[tuple[_Try, Renewal]] = []
        for each in due:
            try:
                renewal = self._attend(each)
            except BaseException as error:  # those that follow can't wait
                self._context.errors.failed("renewals", error)
            else:
                if renewal is not None:
                    renewals.append((each, renewal))
        if renewals:
            self._renew_together(renewals)
        return True

    def _attend(self, each: _Try) -> Renewal | None:
        """End one claim whose time is up, or give its renewal if that is due."""
        now = time.monotonic()
        if each.claim.deadline <= now:
            each.claim.stop_requested.set()
        if each.ends_at is not None and each.ends_at <= now:
            each.ends_at = now + PAUSE_S
            self._bodies.time_out(each.claim, each.head)
            return None
        return each.claim.renewal() if each.renew_at <= now + TOGETHER * self._context.ttl_s else None

    def _renew_together(self, renewals: Sequence[tuple[_Try, Renewal]]) -> None:
        """Submit renewals at once. Each is settled by the ledger, which nobody here waits for."""
        sent_at = time.monotonic()
        with self._lock:
            for each, _ in renewals:
                each.renew_at = math.inf
        for each, renewal in renewals:
            renewal.outcome.add_done_callback(partial(self._renewed, each, sent_at))
        try:
            self._context.ledger.submit_all([renewal.ask for _, renewal in renewals])
        except BaseException as error:  # the ledger is closed
            for _, renewal in renewals:
                renewal.outcome.set_exception(error)

    def _renewed(self, each: _Try, sent_at: float, outcome: Future[bool]) -> None:
        """Note how a renewal has ended, and when the next one is due."""
        error = outcome.exception()
        interval_s = self._context.ttl_s / RENEWALS
        holder = each.claim.held.holder
        with self._lock:
            is_held = holder in self._tries
            if error is None:
                each.renew_at = sent_at + interval_s
                self._unrenewed.discard(holder)
            else:
                each.renew_at = time.monotonic() + min(interval_s, PAUSE_S)
                if is_held:
                    self._unrenewed.add(holder)
            all_renewed = not self._unrenewed
            self._look_at(each.renew_at)
        if error is not None:
            if is_held:  # else its body has ended, and nothing would end this trouble
                self._context.errors.failed("renewals", error)
        elif all_renewed:
            self._context.errors.worked("renewals")

    def _hear(self, change: Change) -> bool:
        """End the claim of a task that has changed, if it is over. The task need not be read for that."""
        if change.status in ENDS_CLAIM:
            self._recent.append(change)  # before the look: a claim that comes now looks here
            self._tell(change)
        return False

    def _tell(self, change: Change) -> None:
        claim = self._claim_of.get(change.task)
        if claim is not None:
            claim.heard(change.status, change.revision)

    def _lost(self, _news: Sequence[Stored] | Lost) -> None:
        """Renew all claims now, which shows those that are over: a watch has missed changes."""
        now = time.monotonic()
        with self._lock:
            for each in self._tries.values():
                each.renew_at = min(each.renew_at, now)
            self._look_at(now)

    def _look_at(self, at: float) -> None:
        """Have the renewing thread look at this time at the latest."""
        if at < self._next_look:
            self._sooner.notify()

    def _next_due(self) -> list[_Try] | None:
        """Wait until something must be renewed or is out of time; None once the worker has stopped."""
        with self._lock:
            while self._tries or not self._stopping:
                now = time.monotonic()
                due = [(at, each) for each in self._tries.values() if (at := _due_at(each)) is not None]
                if any(at <= now for at, _ in due):
                    early = now + TOGETHER * self._context.ttl_s
                    return [each for at, each in due if at <= early]
                self._next_look = min((at for at, _ in due), default=math.inf)
                self._sooner.wait(None if self._next_look == math.inf else self._next_look - now)
        return None


def _due_at(each: _Try) -> float | None:
    """Return when a try needs a look; None once its claim is over."""
    if each.claim.is_over:
        return None
    at = each.renew_at if each.ends_at is None else min(each.renew_at, each.ends_at)
    return at if each.claim.stop_requested.is_set() else min(at, each.claim.deadline)
