"""Workers with several threads. The product decides which tasks they claim, begin, renew and end.

Each loop of a worker has the product's policy for errors: it must survive any error of the store (SK-19).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import Any, Final

from rebalanser.core.tasks import rules
from rebalanser.core.tasks import worker as execution
from rebalanser.core.tasks.claims import (
    Claimed,
    ClaimOwned,
    ClaimRequest,
    PausableClaims,
    ReadPause,
    TakeArrived,
)
from rebalanser.core.tasks.model import ClaimState, Status, Stored, TaskId
from rebalanser.core.tasks.rules import ClaimKey, Decision, Reason, Refused
from rebalanser.core.tasks.slots import (
    EndLease,
    FollowSlots,
    GrantLease,
    KeepLease,
    PublishSlots,
    ReadSlots,
    Rooms,
    SlotDecisions,
    SlotRequest,
    WakeClaimant,
    WithdrawSlots,
    WorkerRoom,
)
from rebalanser.core.tasks.store import Change, ChangesLost, FreeSlot, SlotNews, UsedSlot
from rebalanser.core.tasks.worker import (
    Abandon,
    Begin,
    ClaimLife,
    ClaimTasks,
    CutOff,
    EndClaiming,
    Execution,
    FailTry,
    FetchPayloads,
    GiveBack,
    Hold,
    NextTask,
    OfferRoom,
    RenewalRule,
    ReportUnknown,
    Try,
    WaitUntil,
    WorkRequest,
)
from rebalanser.core.tasks.writes import Await, PendingMove, ReadTasks, Submit
from rebalanser.errors import (
    InternalError,
    LeaseNotFound,
    OutcomeUnknown,
    RebalanserError,
    RequestTooLarge,
)
from rebalanser.tasks.pauses import Pause
from simulation.kernel.reports import Violation
from simulation.tasks.claiming import ClaimingProcess, Signal, judge_time
from simulation.tasks.indexing import IndexSource
from simulation.tasks.network import Unanswered, Wish
from simulation.tasks.process import Host, Process, Script, Surroundings
from simulation.tasks.scenario import SLOT_LEASE_S, TTL_S
from simulation.tasks.working import KILLER, NAMES, POISON
from simulation.tasks.writing import driven

LATE_S: Final = 0.05
"""Maximum delay of a free thread, in seconds."""
GRACE_S: Final = 1.0
_STEP_S: Final = 0.001
"""Duration of a check of the claims, in seconds."""
_PIECE_S: Final = 0.1
"""Seconds between two checks of a body's claim by the body."""


class StopRequest:
    """A request for a body to stop."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Request the stop."""
        self._is_set = True

    def is_set(self) -> bool:
        """True if the stop was requested."""
        return self._is_set


class PoolClaim:
    """A claim held by a worker."""

    def __init__(self, worker: PoolWorker, claimed: Claimed) -> None:
        self.worker = worker
        self.life = ClaimLife(claimed.stored, claimed.held, claimed.sent_at + TTL_S)
        self.made_at = claimed.stored.revision
        self.stop_requested = StopRequest()

    @property
    def task(self) -> TaskId:
        """The claimed task."""
        return self.life.stored.head.id

    @property
    def deadline(self) -> float:
        """End of its time; 0 once it has ended."""
        return 0.0 if self.is_over else self.life.deadline

    @property
    def is_over(self) -> bool:
        """True if it has ended, as far as the worker knows."""
        return self.life.ended is not None

    def still_mine(self) -> bool:
        """True if it is current by the worker's clock."""
        return self.life.lasts(self.worker.now)

    def lose(self, reason: Reason) -> None:
        """End it."""
        self.life.end(reason)
        self.stop_requested.set()

    def learn_status(self, change: Change) -> None:
        """Take in a change of its task."""
        if self.life.is_ended_by(change.status, change.revision):
            self.lose(Reason.ENDED)

    def settle(self, rule: Callable[[Stored], Decision]) -> PendingMove:
        """End it by a rule, once the store accepts the write."""
        self.lose(Reason.ENDED)
        pending = PendingMove(self.life.stored, rule, lasting=True)
        self.worker.writer.submit_all([pending], self.life.held)
        return pending

    def give_back(self) -> None:
        """Give it back; the try is not counted."""
        if not self.is_over:
            held = self.life.held
            self.settle(lambda stored: rules.release(stored.state, held))

    def fail(self, *, is_final: bool = False) -> None:
        """End it as failed."""
        if not self.is_over:
            held = self.life.held
            due = None if is_final else self.worker.world.now
            self.settle(lambda stored: rules.fail(stored.head, stored.state, held, "it failed", due))

    def complete(self, result: bytes) -> None:
        """End it as complete; a task whose result the store can't take fails."""
        if self.is_over:
            return
        held = self.life.held
        pending = self.settle(lambda stored: rules.complete(stored.state, held, result))

        def ended(_: Any) -> None:
            if isinstance(pending.future.exception(), RequestTooLarge):
                self.settle(lambda stored: rules.fail(stored.head, stored.state, held, "too large", None))

        pending.future.add_done_callback(ended)


class PoolWorker(ClaimingProcess):
    """A process with threads for bodies, and one loop each that claims, renews and offers free slots."""

    def __init__(self, world: Surroundings, name: str, host: Host, concurrency: int | None = None) -> None:
        self.concurrency = world.random.randint(1, 4) if concurrency is None else concurrency
        super().__init__(world, name, host)
        self.execution: Execution[PoolClaim] = Execution(
            lambda: self.now,
            TTL_S,
            lambda: self.concurrency,
            lambda _: False,
            self._look_sooner,
        )
        self.idle_since = world.now
        """True time since which a thread is idle without a new claim; infinity if none is."""
        self._idle_s: float | None = 0.0
        self._sooner = Signal(self)
        self._ready: deque[tuple[Try[PoolClaim], bytes]] = deque()
        self._more = Signal(self)
        self._ended = Signal(self)
        self._last_held: list[PoolClaim] = []
        self._latest: dict[TaskId, Change] = {}
        """The last reported change of each task."""
        self._is_slow = world.random.random() < 0.3
        self._claims_end = Signal(self)
        self._offers_end = Signal(self)
        world.engine.followers.append(self._follow)
        self.spawn(self.loop("claims", self._claim, self._claims_end))
        self.spawn(self.loop("renewals", self._renew))
        for _ in range(self.concurrency):
            self.spawn(self._run())
        self._source = source_of(self, self._offers_end)

    def _look_sooner(self) -> None:
        self._sooner.set()

    @property
    def is_at_work(self) -> bool:
        """True if a body runs."""
        return self.execution.running > 0

    def lacks(self, claim: ClaimState) -> bool:
        """True if a claim was made for this worker, and it does not hold it."""
        return claim.worker == self.name and claim.holder not in self.execution.tries

    def stop(self) -> None:
        """Stop gracefully: give back tries that have not begun, then those that have not ended, and leave."""
        if not self.execution.stopping:
            self.world.oracle.counts["graceful stops"] += 1
            self.execution.stopping = self.stopping = True
            self._woken.set()
            self._sooner.set()
            self._source.hurry()
            self.spawn(self._stop())

    def _stop(self) -> Script:
        held = [each.claim for each in self.execution.tries.values()]
        yield from driven(self.execution.leave(GRACE_S), self._perform)
        if not all(each.is_over for each in held):
            raise Violation("SK-20", f"{self.name} leaves, and keeps a claim")
        yield from self.leave(self._source, self._offers_end)

    def _claim(self) -> Script:
        yield self._woken.wait(self._idle_s)
        if self.execution.stopping:
            return False
        self._idle_s = 0.0
        self._last_held = []
        paused_at = self.world.oracle.paused_at
        try:
            self._idle_s = yield from driven(self.execution.look(), self._perform)
        except Exception:
            self._judge_held()
            raise
        self._judge_held()
        self._judge_ahead(paused_at)
        self._note_idle()
        return True

    def _judge_ahead(self, paused_at: float | None) -> None:
        """Judge that a worker that looked for tasks during a pause holds no claims ahead (SK-23).

        ``paused_at`` is the start of the pause when the look began. An index reads the pause on each look.
        """
        is_told = self.world.scenario.has_index and None is not paused_at == self.world.oracle.paused_at
        if not (is_told or self._source.is_paused):
            return
        self.world.oracle.counts["looks of a paused worker"] += 1
        if any(each.began_at is None and not each.claim.is_over for each in self.execution.tries.values()):
            raise Violation("SK-23", f"{self.name} has looked, and keeps what has not begun in a pause")

    def _judge_held(self) -> None:
        """Judge that each claim taken is held or ended, even if its payload could not be read."""
        held = [each.claim for each in self.execution.tries.values()]
        if self.alive and not all(each.is_over or each in held for each in self._last_held):
            raise Violation("SK-17", f"{self.name} has forgotten a claim that it took")

    def _note_idle(self) -> None:
        is_idle = self.execution.idle() > 0 and not self.execution.stopping
        since = self.world.now if self._last_held else min(self.idle_since, self.world.now)
        self.idle_since = since if is_idle else float("inf")

    def _perform(self, request: WorkRequest) -> Script:
        match request:
            case ClaimTasks(room=room, ahead=ahead):
                claimed = yield from self._source.claim(room, NAMES, ahead=ahead)
                judge_ahead(self, claimed[max(0, room - ahead) :])
                return claimed, self._source.is_paused
            case Hold(claimed=claimed):
                for each in claimed:
                    self.take(each)
                self._last_held = [PoolClaim(self, each) for each in claimed]
                return self._last_held
            case FetchPayloads(claimed=claimed):
                return (yield from self.payloads(claimed))
            case Begin(tries=tries, changes=changes):
                self._hand_out(tries, changes)
            case WaitUntil(reached=reached, seconds=seconds):
                yield from self._until(reached, seconds)
            case EndClaiming(seconds=seconds):
                if any(each.began_at is None for each in self.execution.tries.values()):
                    raise Violation("SK-20", f"{self.name} leaves, and keeps what has not begun")
                yield self._claims_end.wait(seconds)
            case GiveBack() | Abandon() | FailTry() | CutOff():
                self._end_tries(request)
            case _:
                return (yield from self._look_on(request))
        return None

    def _look_on(self, request: WorkRequest) -> Script:
        """Finish a look for tasks; return the seconds until there may be more."""
        match request:
            case OfferRoom(idle=idle, room=room):
                # Half of it for the functions that are known here, half of it for any.
                half = WorkerRoom(idle // 2, room // 2)
                self._source.offer({NAMES: WorkerRoom(idle - half.idle, room - half.tasks), None: half})
            case ReportUnknown():
                yield from self._source.report_unknown()
            case NextTask(has_room=has_room):
                return self._source.next_s(NAMES if has_room else ())
        return None

    def _hand_out(self, tries: Sequence[tuple[Try[PoolClaim], bytes]], changes: Sequence[Change]) -> None:
        for change in changes:
            claim = self.execution.claim_of.get(change.task)
            if claim is not None:
                claim.learn_status(change)
        self._ready.extend(tries)
        self._more.set()

    def _end_tries(self, request: WorkRequest) -> None:
        match request:
            case GiveBack(tries=tries) | Abandon(tries=tries):
                self.give_back(tries)
            case FailTry(held=held):
                held.claim.fail()

    def give_back(self, tries: Sequence[Try[PoolClaim]]) -> None:
        """Give back tries; no try is counted."""
        for each in tries:
            self.world.oracle.counts["given back"] += 1
            each.claim.give_back()

    def _until(self, reached: Callable[[], bool], seconds: float) -> Script:
        ends = self.now + seconds
        while not reached() and self.now < ends:
            yield self._ended.wait(ends - self.now)

    def _run(self) -> Script:
        """A thread: run bodies, one after another."""
        while True:
            while not self._ready:
                yield self._more.wait(None)
            held, _ = self._ready.popleft()
            if self.execution.begin(held):
                self._judge_begin(held)
                yield from self._work(held)
                self._end(held)

    def judge_paused(self) -> None:
        """Judge that long after a pause began a worker holds no claims ahead and offers no room (SK-23)."""
        self.world.oracle.counts["looks while paused"] += 1
        if any(each.began_at is None and not each.claim.is_over for each in self.execution.tries.values()):
            raise Violation("SK-23", f"{self.name} keeps what has not begun, and the queue is paused")
        slots = self.world.engine.slots.values()
        if any(isinstance(each, FreeSlot) and each.process == self.name for each in slots):
            raise Violation("SK-23", f"{self.name} offers room, and the queue is paused")

    def _judge_begin(self, held: Try[PoolClaim]) -> None:
        """Judge that a claim does not wait for a thread for long, but is given back (SK-20)."""
        waited_s = self.now - held.handed_out_at
        self.world.oracle.counts["begun"] += 1
        paused_at = self.world.oracle.paused_at
        if self.world.is_quiet and paused_at is not None and self.world.now > paused_at + 2 * LATE_S:
            raise Violation("SK-23", f"{self.name} begins a task, and the queue is paused")
        if waited_s > LATE_S:
            self.world.oracle.counts["begun late"] += 1
        if self.world.is_quiet and waited_s > execution.AHEAD_WAIT_S + 2 * LATE_S:
            raise Violation("SK-20", f"{self.name} begins what it has claimed {waited_s:.3f} s ahead")

    def _work(self, held: Try[PoolClaim]) -> Script:
        claim = held.claim
        if not self.begins(held):
            claim.give_back()
            return
        self.execution.limit_time(held)
        self._judge_may_run(claim)
        if held.head.name == KILLER:
            self.world.replace(self)
            yield self.sleep(0.0)
        left_s = self.body_s(claim.task)
        while left_s > 0 and not claim.stop_requested.is_set():
            piece_s = min(left_s, _PIECE_S)
            yield self.sleep(piece_s)
            left_s -= piece_s
            self._judge_claim(claim)
            self._judge_time(held)
        self.finish(held)

    def begins(self, held: Try[PoolClaim]) -> bool:
        """True if the next body may run."""
        return self.execution.may_run(held)

    def body_s(self, _task: TaskId) -> float:
        """Return the duration of a body, in seconds."""
        random = self.world.random
        return random.choice((0.3, 1.5, 5.0)) if self._is_slow and random.random() < 0.3 else 0.01

    def finish(self, held: Try[PoolClaim]) -> None:
        """End a body in one way or another."""
        random = self.world.random
        if held.head.name == POISON or random.random() < 0.05:
            held.claim.fail()
        elif random.random() < 0.02:
            held.claim.give_back()
        else:
            held.claim.complete(self.world.content(b"result"))

    def _judge_may_run(self, claim: PoolClaim) -> None:
        """Judge that the claim of a beginning body is current, by clock and changes (SK-7, SK-8)."""
        change = self._latest.get(claim.task)
        is_over = change is not None and _ends(change, claim)
        if is_over or self.now >= claim.life.deadline:
            raise Violation("SK-7", f"{self.name} begins a body whose claim is over")

    def _judge_time(self, held: Try[PoolClaim]) -> None:
        """Judge that a body that has taken too long has failed (SK-15)."""
        limit_s, began_at, world = held.head.timeout_s, held.began_at, self.world
        if limit_s is None or began_at is None or held.claim.is_over:
            return
        if self.now > began_at + limit_s + LATE_S and world.now > self.resumes_at + LATE_S:
            raise Violation("SK-15", f"{self.name} lets a body run on after its timeout")

    def _judge_claim(self, claim: PoolClaim) -> None:
        """Judge a body's access, and that it was asked to stop once its claim's time had passed (SK-8)."""
        world, life = self.world, claim.life
        judge_time(self, life.stored, life.deadline - TTL_S)
        is_late = life.ended is None and self.now > life.deadline + LATE_S
        if is_late and not claim.stop_requested.is_set() and world.now > self.resumes_at + LATE_S:
            raise Violation("SK-8", f"{self.name} lets a body run on after its claim's time")
        world.oracle.accesses(claim.task, life.held, in_time=claim.still_mine())

    def _end(self, held: Try[PoolClaim]) -> None:
        if self.execution.ended(held):
            self.failures.ended("renewals of claims")
        if not held.claim.is_over:
            raise Violation("SK-17", f"{self.name} ends a body and leaves its claim")
        self._ended.set()
        self._sooner.set()
        self._woken.set()

    def _renew(self) -> Script:
        run = self.execution
        if run.stopping and not run.tries:
            return False
        due = run.due()
        if not due:
            look_at = run.next_look
            yield self._sooner.wait(None if look_at == float("inf") else look_at - self.now)
            return True
        self._attend(due)
        yield self.sleep(_STEP_S)
        return True

    def _attend(self, due: Sequence[Try[PoolClaim]]) -> None:
        """Stop, fail and renew tries that are due."""
        run = self.execution
        renewals: list[tuple[Try[PoolClaim], RenewalRule, PendingMove]] = []
        for each in due:
            steps = run.due_steps(each)
            if steps.stops:
                if self.world.is_quiet:
                    raise Violation("SK-7", f"{self.name} lets a claim run out that it could renew")
                each.claim.stop_requested.set()
            if steps.times_out:
                self.world.oracle.counts["timed out"] += 1
                each.claim.fail()
            if steps.renews and not each.claim.is_over:
                rule = RenewalRule(each.claim.life.held, lambda: self.now, self.term)
                renewals.append((each, rule, PendingMove(each.claim.life.stored, rule)))
        if renewals:
            sent_at = run.renewing([each for each, _, _ in renewals])
            for each, rule, pending in renewals:
                pending.future.add_done_callback(partial(self._renewed, each, rule, sent_at))
                self.writer.submit_all([pending], each.claim.life.held)

    def _renewed(self, each: Try[PoolClaim], rule: RenewalRule, sent_at: float, outcome: Any) -> None:
        error = outcome.exception()
        settled = None if error is not None else outcome.result()
        if isinstance(settled, Refused):
            each.claim.lose(settled.reason)
        elif settled is not None:
            self.world.oracle.counts["renewed"] += 1
            each.claim.life.renewed(settled, rule.written_at, TTL_S)
        says = self.execution.renewed(each, sent_at, has_failed=error is not None)
        if says and error is not None:
            self.failures.failed("renewals of claims", error, self.now, self.wall)
        elif says:
            self.failures.ended("renewals of claims")

    def _follow(self, stored: Stored) -> None:
        """Report a change, unless the watch is broken."""
        world = self.world
        if not self.alive:
            return
        if world.now < self.drops_until or self.is_cut:
            until = max(self.drops_until, self.cut_until)
            world.after(until - world.now, lambda: self.received(self._is_lost))
            return
        change = Change(stored.head.id, stored.partition, stored.state.status, stored.revision)
        tell = partial(self.received, lambda: self._hear(change))
        world.after(world.scenario.latency_s, tell)
        if world.tells_late():
            world.after(world.random.uniform(0.1, 4.0), tell)

    def _hear(self, change: Change) -> None:
        if change.revision >= self._latest.get(change.task, change).revision:
            self._latest[change.task] = change
        last = [*self.execution.tries.values()]
        before = [each.claim for each in last if not each.claim.is_over]
        claim = self.execution.learn_change(change)
        if claim is not None:
            claim.learn_status(change)
        for each in before:
            is_over = each.task == change.task and _ends(change, each)
            if each.is_over != is_over:
                raise Violation("SK-7", f"{self.name} takes {change} for what it is not")

    def _is_lost(self) -> None:
        self.execution.renew_all()
        self._source.lost()


def _ends(change: Change, claim: PoolClaim) -> bool:
    """True if a change ends a claim, perhaps by a write of its own worker."""
    is_open_claim = change.status in (Status.CLAIMED, Status.COMPLETED)
    return change.revision > claim.made_at and not is_open_claim


def _author_of(pending: Any) -> ClaimKey:
    """Return the claim of a pending write, for the oracle."""
    claim = pending._stored.state.claim
    return ClaimKey(claim.number, claim.holder)


def judge_ahead(process: Process, claimed: Sequence[Claimed]) -> None:
    """Judge that no task with a rate limit is claimed from an index for a busy thread (SK-23).

    For claims by owners, the slot shows if it is ahead.
    """
    if process.world.scenario.has_index and any(each.stored.head.rate_limit for each in claimed):
        raise Violation("SK-23", f"{process.name} has claimed a task with a rate limit ahead")


def source_of(process: ClaimingProcess, end: Signal) -> SlotSource | IndexSource:
    """Source of a process's claims; ``end`` is set once it has withdrawn its offers."""
    if process.world.scenario.has_index:
        end.set()
        return IndexSource(process)
    source = SlotSource(process)
    process.spawn(process.loop("slots", source.step, end))
    return source


class SlotSource:
    """Claims by owners of partitions, for a process's free slots."""

    def __init__(self, worker: ClaimingProcess) -> None:
        self.worker = worker
        self.changed = Signal(worker)
        self.offering = SlotDecisions(
            worker.name,
            worker.name,
            TTL_S,
            lambda: worker.now,
            worker.term,
            worker.new_holder,
            SLOT_LEASE_S,
        )
        self.claims: PausableClaims[Pause] = PausableClaims()
        self._refused: Sequence[str] = []
        """Holders of slots that were refused, or ended with their lease, in this step."""
        self._due_s: float | None = 0.0
        worker.world.engine.pause_followers.append(self._follow_pause)
        worker.world.engine.slot_followers.append(self._follow)

    def step(self) -> Script:
        """Publish, withdraw and keep slots as due."""
        yield self.changed.wait(self._due_s)
        if self.worker.stopping:
            return False
        self._due_s = 0.0
        self._refused = []
        try:
            self._due_s = yield from driven(self.offering.step(), self.perform)
        except RebalanserError:
            self._judge_refused()
            raise
        self._judge_refused()
        return True

    def _judge_refused(self) -> None:
        if any(holder in self.offering.own.offered for holder in self._refused):
            raise Violation("SK-20", f"{self.worker.name} takes slots for published that are not")

    @property
    def is_paused(self) -> bool:
        """True if the queue is paused, as far as this process knows."""
        return self.claims.pause is not None

    def claim(
        self,
        limit: int,
        names: Collection[str] | None,
        worker: str | None = None,
        ahead: int = 0,
    ) -> Script:
        """Take the claims that owners have made."""
        return (yield from driven(self.claims.claim(limit, names, worker), self._perform_claim))

    def claim_for_others(self) -> Script:
        """Read the pause; this process owns no partition, so it claims nothing for others."""
        yield from self.claim(0, ())

    def next_s(self, names: Collection[str] | None) -> float | None:
        """Return the seconds until there may be a task to claim; None if only news can bring it."""
        at = self.claims.next_wakeup(self.worker.now, lambda: None)
        return None if at is None else at - self.worker.now

    def report_unknown(self) -> Script:
        """No-op: this process owns no partition."""
        yield from ()

    def hurry(self) -> None:
        """Wake the loop that withdraws the offers."""
        self.changed.set()

    def retire(self) -> Script:
        """Withdraw all room, and give back the claims that have arrived."""
        yield from driven(self.offering.retire(), self.perform)

    def _perform_claim(self, request: ClaimRequest) -> Script:
        """Make a request of a script of claims, for a process without partitions."""
        match request:
            case ReadPause():
                return (yield from self.worker.world.read_pause(self.worker))
            case TakeArrived(limit=limit, names=names, keeps=keeps):
                arrived = yield from driven(self.offering.arrived(limit, names, keeps=keeps), self.perform)
                return [Claimed(each.stored, each.held, each.sent_at) for each in arrived]
            case ClaimOwned():
                return []

    def offer(self, rooms: Rooms) -> None:
        """Offer room for each set of functions (SK-20)."""
        if self.offering.offer(self.claims.rooms(rooms)):
            self.changed.set()

    def lost(self) -> None:
        """Note that changes may have been missed."""
        self._learn(ChangesLost(0))

    def perform(self, request: SlotRequest) -> Generator[Wish, Any, Any]:
        """Make a request of a script of slot offers."""
        worker = self.worker
        engine, network = worker.world.engine, worker.world.network
        match request:
            case ReadSlots():
                return (yield from worker.asked(lambda: (list(engine.slots.values()), engine.revision)))
            case ReadTasks(ids=ids):
                answer = yield network.read(worker, list(ids))
                if isinstance(answer, Unanswered):
                    raise answer.error
                return answer
            case Submit(pending_writes=pending_writes):
                for pending in pending_writes:
                    worker.writer.submit_all([pending], _author_of(pending))
            case Await(pending_writes=pending_writes):
                yield worker.writer.settled(pending_writes)
            case WakeClaimant():
                worker.wake()
            case _:
                return (yield from self._write(request))
        return None

    def _write(self, request: SlotRequest) -> Script:
        """Make a request that changes slots."""
        worker = self.worker
        engine, after, me = worker.world.engine, worker.world.after, worker.name
        match request:
            case GrantLease():
                return (yield from worker.asked(lambda: engine.grant(SLOT_LEASE_S, after)))
            case KeepLease(lease=lease):
                yield from self._of_lease(lambda: engine.keep(lease, SLOT_LEASE_S, after))
            case EndLease(lease=lease):
                yield from worker.asked(lambda: engine.end_lease(lease))
            case PublishSlots(slots=slots, used=used):
                yield from self._publish(slots, used)
            case WithdrawSlots(holders=holders):
                return (yield from worker.asked(lambda: engine.withdraw_of(me, holders)))
            case FollowSlots():
                return None
            case _:
                raise InternalError(f"an offering makes no request {request!r}")
        return None

    def _publish(self, slots: Sequence[FreeSlot], used: Sequence[UsedSlot]) -> Script:
        try:
            yield from self._of_lease(lambda: self.worker.world.engine.publish_all(slots, used))
        except (OutcomeUnknown, LeaseNotFound):
            raise
        except RebalanserError:
            self._refused = [each.holder for each in slots]
            raise

    def _of_lease(self, serve: Callable[[], bool]) -> Script:
        if not (yield from self.worker.asked(serve)):
            self._refused = list(self.offering.own.offered)
            raise LeaseNotFound("the lease has ended")

    def _follow_pause(self) -> None:
        world, worker = self.worker.world, self.worker
        late_s = max(world.scenario.latency_s, worker.drops_until - world.now, worker.cut_until - world.now)
        world.after(late_s, partial(worker.received, self._pause_told))

    def _pause_told(self) -> None:
        self.claims.changed()
        self.worker.wake()

    def _follow(self, news: SlotNews) -> None:
        world, worker = self.worker.world, self.worker
        if not worker.alive:
            return
        if worker.is_cut or world.now < worker.drops_until:
            until = max(worker.drops_until, worker.cut_until)
            world.after(until - world.now, partial(worker.received, self.lost))
            return
        tell = partial(worker.received, lambda: self._learn([news]))
        world.after(world.scenario.latency_s, tell)

    def _learn(self, news: Any) -> None:
        is_due, wakes = self.offering.learn(news)
        if is_due:
            self.changed.set()
        if wakes:
            self.worker.wake()
