"""Claims of the best tasks; the store decides (SK-5, SK-6).

``OwnedIndex`` claims in the partitions that a process owns, ``IndexRequests`` from an engine that has an
index itself, and ``PausableClaims`` nothing while the queue is paused. Threads and the simulator run their
scripts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from rebalanser.core.clock import Clock
from rebalanser.core.tasks import rules
from rebalanser.core.tasks.clocks import ClockSkewDetector, SkewedClock
from rebalanser.core.tasks.dependencies import Completions
from rebalanser.core.tasks.failures import ErrorKind, kind_of
from rebalanser.core.tasks.model import ClaimTerm, LimitId, RateMark, Status, Stored, TaskId
from rebalanser.core.tasks.owner import PartitionOwner
from rebalanser.core.tasks.rules import ClaimKey, Decision, FailedDependency, Reason, Refused
from rebalanser.core.tasks.slots import Rooms
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Change,
    ClaimAnswer,
    ClaimQuery,
    FreeSlot,
    Names,
    OwnerEpoch,
    Page,
    RateStart,
)
from rebalanser.core.tasks.writes import (
    Await,
    PendingMove,
    ReadPage,
    ReadPayloads,
    ReadRates,
    ReadTasks,
    Script,
    Submit,
    WriteHere,
)

MAX_CLAIMS: Final = 256
"""Maximum number of tasks that are claimed at once."""
PAGE: Final = 999
"""Maximum number of tasks, or of dependencies, that are read at once.

One more is read to detect another page: that makes two ranges of a key-value store.
"""
ASIDE_S: Final = 60.0
"""Seconds before a task whose claim can't be written is offered again."""
PauseT = TypeVar("PauseT")


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task that this process has just claimed, with the claim's number and holder.

    ``sent_at`` is the time of the claim's request, in seconds of the clock that leases are counted on (SK-8).
    ``payload`` is None if it was not read while the claim was written.
    """

    stored: Stored
    held: ClaimKey
    sent_at: float
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class Claimant:
    """The claimant of one claim; no other claim has its ``holder``."""

    holder: str
    worker: str
    term: ClaimTerm


class PendingClaim(PendingMove):
    """The claim of a task at the revision at which it was offered.

    As of that revision the owner knows that the task is due, its dependencies are complete and an earlier
    claim is over. At any other revision the claim is refused, unless that revision is this very claim. With a
    ``slot`` the claim is for that slot and its holder (SK-20). A ``failed`` dependency makes the task dead.
    """

    def __init__(
        self,
        offered: Stored,
        claimant: Claimant,
        epoch: OwnerEpoch,
        *,
        over: bool,
        slot: FreeSlot | None = None,
        failed: FailedDependency | None = None,
    ) -> None:
        super().__init__(offered, None, epoch=epoch, slot=slot)
        self.claimant = claimant
        self.slot = slot
        self._offered = offered
        self._over = over
        self._failed = failed
        self.applied_at: int | None = None
        """The revision at which the claim was written, if its answer said so."""
        self.payload: bytes | None = None
        """The payload, if the answer had it."""

    def decision(self, stored: Stored) -> Decision:
        """Return the claimed state, or why the claim is refused."""
        return self._claimed(stored)

    def set_start(self, start: RateStart | None) -> None:
        """Set the rate limit's start for which the claim counts (SK-23)."""
        self._start = start

    def answered(self, answer: Answer) -> None:
        """Settle the pending claim if it was written."""
        super().answered(answer)
        if isinstance(answer, Applied):
            self.applied_at, self.payload = answer.revision, answer.payload

    def is_mine(self, stored: Stored) -> bool:
        """True if the task's last claim is this one, current or ended."""
        return stored.state.claim is not None and stored.state.claim.holder == self.claimant.holder

    @property
    def last_read(self) -> Stored:
        """The task as it was last read."""
        return self._stored

    @property
    def fails(self) -> bool:
        """True if it makes the task dead because a dependency failed."""
        return self._failed is not None

    @property
    def is_paused(self) -> bool:
        """True if it is settled and was refused because the queue is paused (SK-23)."""
        if self.future.exception() is not None:
            return False
        outcome = self.future.result()
        return isinstance(outcome, Refused) and outcome.reason is Reason.PAUSED

    @property
    def makes_dead(self) -> bool:
        """True if it makes the task dead: its last try was cut off, or a dependency failed."""
        decision = self._claimed(self._offered)
        return not isinstance(decision, Refused) and decision.status is Status.DEAD

    def _claimed(self, stored: Stored) -> Decision:
        if stored.revision != self._offered.revision and not self.is_mine(stored):
            return Refused(Reason.HELD)
        claimant = self.claimant
        return rules.claim(
            stored.head,
            stored.state,
            claimant.holder,
            claimant.worker,
            claimant.term,
            over=self._over,
            failed=self._failed,
        )


def pending_claim(
    owner: PartitionOwner, task: TaskId, claimant: Claimant, slot: FreeSlot | None = None, wall: float = 0.0
) -> PendingClaim:
    """Return the claim of an offered task, which is not offered again until the claim is settled.

    ``wall`` is seconds since 1970. A task that becomes dead is no start of its rate limit (SK-23).
    """
    failed = owner.failed_dependency(task)
    stored, over = owner.take(task)
    epoch = OwnerEpoch(owner.partition, owner.token)
    pending = PendingClaim(stored, claimant, epoch, over=over, slot=slot, failed=failed)
    if stored.head.rate_limit and not pending.makes_dead:
        pending.set_start(owner.start(task, wall))
    return pending


def claimant_of(slot: FreeSlot, clock_name: str, now: float) -> Claimant:
    """Return the claimant of a slot. The claim's time counts from ``now``, in seconds of ``clock_name``."""
    return Claimant(slot.holder, slot.worker, ClaimTerm(slot.ttl_s, clock_name, now + slot.ttl_s))


def keeps_slot(pending: PendingClaim) -> bool:
    """True if the slot of a settled claim is certainly still free."""
    if pending.future.exception() is not None:
        return False
    outcome = pending.future.result()
    if isinstance(outcome, Refused):
        return outcome.reason is not Reason.NO_SLOT
    return outcome.state.claim is None or not pending.is_mine(outcome)


class PartitionClaims:
    """Takes the outcomes of claims in one partition. Pure; times are those of its owner."""

    def __init__(self, owner: PartitionOwner) -> None:
        self.owner = owner
        self.deposed = False
        """True if the store has refused a claim because a later owner has taken the partition (SK-13)."""

    def settled(self, pending: PendingClaim, now: float) -> Stored | None:
        """Take the outcome of a pending claim that was settled by ``now``; the claimed task, or None.

        Raises:
            RebalanserError: the engine stayed away. The task is not offered again before it has been read. Or
                the claim can't be written: the task is set aside.
        """
        self.owner.start_ended(pending.last_read.head, pending.applied_at)
        try:
            outcome = pending.future.result()
        except BaseException as error:
            if kind_of(error) is ErrorKind.POISON:
                self.owner.set_aside(pending.task, now + ASIDE_S)
            else:
                self.owner.conflicted(pending.task, now)
            raise
        if isinstance(outcome, Refused):
            self._refused(pending, outcome.reason, now)
            return None
        self.owner.settled(outcome, now)
        return outcome if outcome.state.status is Status.CLAIMED and pending.is_mine(outcome) else None

    def _refused(self, pending: PendingClaim, reason: Reason, now: float) -> None:
        self.deposed |= reason is Reason.DEPOSED
        if reason is Reason.GONE:
            self.owner.forget(pending.task)
        elif reason in {Reason.NO_SLOT, Reason.PAUSED, Reason.RATE_MOVED}:
            self.owner.put_back(pending.task, now)
        else:
            self.owner.conflicted(pending.task, now)
            self.owner.learn(pending.last_read, now)


class SlotPool(Protocol):
    """The free slots of other processes, to claim tasks for."""

    def groups(self) -> list[Names]:
        """Return the sets of functions that have slots."""

    def take(self, names: Names) -> FreeSlot | None:
        """Take a slot of these functions; None if there is none."""

    def settled(self, slot: FreeSlot, *, is_free: bool, is_known: bool) -> None:
        """Settle the claim for a slot: the slot is still free, is used, or its use is unknown."""


@dataclass(slots=True)
class IndexNews:
    """News of an index: tasks to claim, clocks that are off, and tasks that can't be claimed."""

    wakes: bool = False
    """True if there may be something to claim."""
    skewed_clocks: list[SkewedClock] = field(default_factory=list)
    set_aside: list[tuple[TaskId, BaseException]] = field(default_factory=list)
    is_paused: bool = False
    """True if a claim was refused because the queue is paused (SK-23)."""


class OwnedIndex:
    """Selects and makes the claims in the partitions that a process owns (SK-5, SK-13). Pure.

    ``worker`` is a label for people, ``clock_name`` names the clock's run. ``ttl_s`` is the seconds that a
    claim lasts, ``buffer_s`` is waited beyond them (SK-8). ``new_holder`` returns a unique name for a claim.
    Its scripts may run while changes arrive, one script of each method at a time.
    """

    def __init__(
        self,
        worker: str,
        clock: Clock,
        clock_name: str,
        ttl_s: float,
        buffer_s: float,
        new_holder: Callable[[], str],
        slots: SlotPool | None = None,
    ) -> None:
        self.news = IndexNews()
        self._worker = worker
        self._clock = clock
        self._clock_name = clock_name
        self._ttl_s = ttl_s
        self._buffer_s = buffer_s
        self._new_holder = new_holder
        self._slots = slots
        self._owners: dict[int, PartitionClaims] = {}
        self._skew_detector = ClockSkewDetector()
        self._complete = Completions()
        self._awaited: list[tuple[PartitionOwner, Container[TaskId]]] = []
        self._aside: dict[TaskId, float] = {}
        """Tasks whose claims can't be written, with the time at which each is offered again."""
        self._unused: set[Names] = set()
        """Sets of functions whose slots ahead were left unused, as the best task has a rate limit."""
        self._lost = False

    def __len__(self) -> int:
        """Number of partitions."""
        return len(self._owners)

    def __contains__(self, partition: int) -> bool:
        return partition in self._owners

    @property
    def owners(self) -> list[PartitionOwner]:
        """The owners of all partitions."""
        return [each.owner for each in self._owners.values()]

    @property
    def has_news(self) -> bool:
        """True if there is news. May be called from any thread."""
        news = self.news
        return news.wakes or bool(news.skewed_clocks or news.set_aside) or news.is_paused

    def take_news(self) -> IndexNews:
        """Return the news since the last call."""
        news, self.news = self.news, IndexNews()
        return news

    def add(self, partition: int, token: int) -> None:
        """Add a partition whose epoch is stored. ``read`` it once the watch has begun."""
        owner = PartitionOwner(
            partition, token, buffer_s=self._buffer_s, clock=self._clock_name, complete=self._complete
        )
        self._owners[partition] = PartitionClaims(owner)
        self._awaited = [(each, each.awaited) for each in self.owners]

    def remove(self, partition: int) -> None:
        """Claim no more in a partition; existing claims last on."""
        self._owners.pop(partition, None)
        self._awaited = [(each, each.awaited) for each in self.owners]

    def ready_since(self, wall: float) -> float | None:
        """Return since when the oldest ready task waits, in seconds since 1970; None if none is ready."""
        found = [owner.ready_since(wall) for owner in self.owners]
        return min((since for since in found if since is not None), default=None)

    def ready_names(self) -> set[str]:
        """Return the functions that have tasks to claim."""
        return {name for owner in self.owners for name in owner.names()}

    def next_wakeup(self, names: Collection[str] | None) -> float | None:
        """Return when tasks of these functions may be ready, in seconds of the clock; None for all functions.

        Tasks for other processes that have room count too. The result is None if only news can bring a task.
        """
        now, wall = self._clock.now(), self._clock.wall()
        wanted: list[Collection[str] | None] = [each for each in self.groups() if each not in self._unused]
        if names is None or names:
            wanted.append(names)
        if not wanted:
            return None
        owners = self.owners
        # Each step reads some of the dependencies only: the others may be complete.
        if self._lost or any(owner.unknown_dependencies(1) or owner.unread_rates(1) for owner in owners):
            return now
        wakeups = [owner.next_wakeup(now, wall, each) for owner in owners for each in wanted]
        wakeups += self._aside.values()
        return min((at for at in wakeups if at is not None), default=None)

    def groups(self) -> list[Names]:
        """Return the sets of functions for which other processes have room; empty without partitions."""
        return [] if self._slots is None or not self._owners else self._slots.groups()

    def schedule_full_read(self) -> None:
        """Schedule a full read, as changes may have been missed."""
        self._lost = True
        self.news.wakes = True

    def wants(self, change: Change) -> bool:
        """True if the task of a change must be read.

        A completed task is not read: its status is all that matters. A claim that is being written here is
        not read either: its outcome says all. Other tasks of the owned partitions are read.
        """
        claiming = self._owners.get(change.partition)
        task = change.task
        if change.status is Status.COMPLETED:
            self._complete.add(task)
            if claiming is not None:
                self.news.wakes |= claiming.owner.completed(task, change.partition, change.revision)
            for owner, awaited in self._awaited:
                if task in awaited:
                    self.news.wakes |= owner.completed(task, change.partition, change.revision)
            return False
        for owner, awaited in self._awaited:
            if task in awaited:
                self.news.wakes |= owner.learn_unfinished(task, change.status)
        return claiming is not None and not (
            claiming.owner.knows(task, change.revision)
            or (change.status is Status.CLAIMED and claiming.owner.is_taken(task))
        )

    def learn(self, tasks: Sequence[Stored]) -> None:
        """Learn the tasks that a watch has reported."""
        now = self._clock.now()
        for stored in tasks:
            self._learn(stored, now)
        self._check_clocks([each for each in tasks if _is_new(each)], are_new=True)
        self.news.wakes = True

    def read(self, partition: int) -> Script[None]:
        """Read the open tasks of a partition page by page, while the watch reports changes.

        Tasks can be claimed while the rest of a deep queue is read. Only tasks with a limit wait until all is
        read (SK-23).
        """
        claiming = self._owners.get(partition)
        after: TaskId | None = None
        while True:
            page: Page = yield ReadPage(partition, after, PAGE)
            now = self._clock.now()
            for stored in page.items:
                self._learn(stored, now)
            self._check_clocks(page.items, are_new=False)
            self.news.wakes |= bool(page.items)
            after = page.next
            if after is None:
                break
        if claiming is not None and self._owners.get(partition) is claiming:
            claiming.owner.offer_limited()
            self.news.wakes = True

    def catch_up(self) -> Script[None]:
        """Read all again after a loss, then doubtful tasks, unknown dependencies and marks of rate limits."""
        lost, self._lost = self._lost, False
        if lost:
            for owner in self.owners:
                owner.doubt_dependencies()
        try:
            for partition in list(self._owners) if lost else ():
                yield from self.read(partition)
        except BaseException:
            self._lost = True
            raise
        owners = self.owners
        now = self._clock.now()
        self._aside = {task: until for task, until in self._aside.items() if until > now}
        doubtful = {task: owner for owner in owners for task in owner.doubtful() if task not in self._aside}
        needed = {task: None for owner in owners for task in owner.ask_dependencies(PAGE)}
        if doubtful or needed:
            yield from self._read_unknown(doubtful, needed)
        rates: dict[LimitId, PartitionOwner] = {
            limit: owner for owner in self.owners for limit in owner.unread_rates(PAGE)
        }
        if rates:
            marks: Mapping[LimitId, RateMark] = yield ReadRates(list(rates))
            now = self._clock.now()
            for limit, owner in rates.items():
                owner.learn_rate(limit, marks.get(limit), now)

    def _read_unknown(
        self, doubtful: Mapping[TaskId, PartitionOwner], needed: Collection[TaskId]
    ) -> Script[None]:
        """Read doubtful tasks, and unknown dependencies."""
        owners = self.owners
        found: Mapping[TaskId, Stored] = yield ReadTasks([*doubtful, *needed])
        now = self._clock.now()
        for task, owner in doubtful.items():
            stored = found.get(task)
            if stored is None:
                owner.forget(task)
            else:
                owner.learn(stored, now)
        for task in needed:
            stored = found.get(task)
            for owner in owners:
                owner.learn_dependency(task, None if stored is None else stored.state.status)

    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None, ahead: int = 0
    ) -> Script[list[Claimed]]:
        """Claim the best tasks of all partitions, at most ``limit``, that are of these functions (SK-5).

        ``names`` None is all functions. ``worker`` is the label of the claimant if it is not this process.
        The last ``ahead`` claims have no free thread yet, and are never of tasks with a rate limit (SK-23).
        Ready tasks beyond ``limit`` are claimed for other processes. A claim that can't be written does not
        prevent others, and its task is offered again later.

        Raises:
            RebalanserError: the engine was away or takes no writes, and no claim is known.
        """
        self._unused.clear()
        yield from self.catch_up()
        sent_at = self._clock.now()
        pending_writes = self._own_claims(min(limit, MAX_CLAIMS), names, worker or self._worker, ahead)
        pending_writes += self._claims_for_others(MAX_CLAIMS - len(pending_writes))
        if not pending_writes:
            return []
        payloads = yield from self._write([pending for _, pending in pending_writes])
        claimed: list[Claimed] = []
        failed: list[Exception] = []
        # Settle all even if some have failed: an unsettled task would never be offered again.
        for claiming, pending in pending_writes:
            try:
                made = self._settled(claiming, pending, sent_at, payloads)
            except Exception as error:
                failed.append(error)
            else:
                claimed += [] if made is None else [made]
            if pending.slot is not None and self._slots is not None:
                is_known = pending.future.exception() is None
                self._slots.settled(pending.slot, is_free=keeps_slot(pending), is_known=is_known)
        if failed and not claimed:
            raise failed[0]
        return claimed

    @staticmethod
    def _write(pending_writes: Sequence[PendingClaim]) -> Script[Mapping[TaskId, bytes]]:
        """Write claims until all are settled; return the payloads that were read meanwhile.

        A payload never changes (SK-2), so it need not be read after the claim is known. A lone claim is
        written by the calling thread, and the same request reads its payload: each hand-over to another
        thread takes longer than all that this process does for the claim.
        """
        payloads: Mapping[TaskId, bytes] = {}
        wanted = [pending for pending in pending_writes if pending.slot is None]
        if len(pending_writes) == 1:
            for pending in wanted:
                pending.with_payload = True
            yield WriteHere(pending_writes)
            yield Await(pending_writes)
            payloads = {each.task: each.payload for each in wanted if each.payload is not None}
            wanted = [each for each in wanted if each.applied_at is not None and each.payload is None]
        else:
            yield Submit(pending_writes)
        if wanted:
            payloads = yield ReadPayloads([pending.task for pending in wanted])
        yield Await(pending_writes)
        return payloads

    def _learn(self, stored: Stored, now: float) -> None:
        """Inform the owner of its partition; a completed task may matter to every owner."""
        claiming = self._owners.get(stored.partition)
        is_complete = stored.state.status is Status.COMPLETED
        for each in self._owners.values() if is_complete else () if claiming is None else (claiming,):
            each.owner.learn(stored, now)

    def _check_clocks(self, tasks: Sequence[Stored], *, are_new: bool) -> None:
        """Note hosts whose clocks are off, by the ids of tasks in the owned partitions."""
        now, wall = self._clock.now(), self._clock.wall()
        for each in tasks:
            if each.partition in self._owners:
                far = self._skew_detector.check(each.head.id, now, wall, is_new=are_new)
                self.news.skewed_clocks += [] if far is None else [far]

    def _own_claims(
        self, limit: int, names: Collection[str] | None, worker: str, ahead: int
    ) -> list[tuple[PartitionClaims, PendingClaim]]:
        """Return claims of the best tasks of all partitions. Tasks that become dead take no room."""
        pending_writes: list[tuple[PartitionClaims, PendingClaim]] = []
        for claiming, task in self._best_first(names) if limit > 0 else ():
            if limit <= ahead and claiming.owner.has_rate(task):
                break
            term = ClaimTerm(self._ttl_s, self._clock_name, self._clock.now() + self._ttl_s)
            claimant = Claimant(self._new_holder(), worker, term)
            pending = pending_claim(claiming.owner, task, claimant, wall=self._clock.wall())
            pending_writes.append((claiming, pending))
            limit -= not pending.fails
            if limit == 0 or len(pending_writes) == MAX_CLAIMS:
                break
        return pending_writes

    def _claims_for_others(self, limit: int) -> list[tuple[PartitionClaims, PendingClaim]]:
        """Return claims of the remaining ready tasks, for the free slots of other processes."""
        pending_writes: list[tuple[PartitionClaims, PendingClaim]] = []
        if self._slots is None:
            return pending_writes
        for names in self.groups():
            for claiming, task in self._best_first(names) if len(pending_writes) < limit else ():
                slot = self._slots.take(names)
                if slot is None:
                    break
                if slot.ahead and claiming.owner.has_rate(task):
                    self._slots.settled(slot, is_free=True, is_known=True)
                    self._unused.add(names)
                    break
                claimant = claimant_of(slot, self._clock_name, self._clock.now())
                pending = pending_claim(claiming.owner, task, claimant, slot, self._clock.wall())
                pending_writes.append((claiming, pending))
                if len(pending_writes) == limit:
                    break
        return pending_writes

    def _best_first(self, names: Collection[str] | None) -> Iterator[tuple[PartitionClaims, TaskId]]:
        """Iterate over the best tasks of all partitions; each must be taken before the next step."""
        now, wall = self._clock.now(), self._clock.wall()
        offers = [
            (best, number, claiming)
            for number, claiming in self._owners.items()
            if (best := claiming.owner.best(now, wall, names)) is not None
        ]
        heapq.heapify(offers)
        while offers:
            (_, task), number, claiming = offers[0]
            yield claiming, task
            if (best := claiming.owner.next_best(names)) is not None:
                heapq.heapreplace(offers, (best, number, claiming))
            else:
                heapq.heappop(offers)

    def _settled(
        self,
        claiming: PartitionClaims,
        pending: PendingClaim,
        sent_at: float,
        payloads: Mapping[TaskId, bytes],
    ) -> Claimed | None:
        """Pass the outcome of a claim to its owner; return the claim, if it was made for this process."""
        error = pending.future.exception()
        now = self._clock.now()
        if error is not None and kind_of(error) is not ErrorKind.OUTAGE:
            self._aside[pending.task] = now + ASIDE_S
            self.news.set_aside.append((pending.task, error))
        self.news.is_paused |= pending.is_paused
        try:
            stored = claiming.settled(pending, now)
        finally:
            partition = claiming.owner.partition
            if claiming.deposed and self._owners.get(partition) is claiming:
                self.remove(partition)
        if stored is None or stored.state.claim is None or pending.slot is not None:
            return None
        held = ClaimKey(stored.state.claim.number, pending.claimant.holder)
        return Claimed(stored, held, sent_at, payloads.get(pending.task))


def _is_new(stored: Stored) -> bool:
    """True if a task has never been claimed and has not failed."""
    state = stored.state
    return state.status is Status.WAITING and state.claim is None and not state.failures


@dataclass(frozen=True, slots=True)
class ClaimBest:
    """Claim the best tasks of the index; the answer is a ``ClaimAnswer``."""

    query: ClaimQuery


@dataclass(frozen=True, slots=True)
class ReadQueuePause:
    """Read the stored pause of the queue; the answer is None if there is none."""


IndexRequest: TypeAlias = ClaimBest | ReadQueuePause


class IndexRequests:
    """Requests of one process for claims from an engine's index, and their answers. Pure.

    ``prefix`` begins the name of each holder; it is unique to the process. ``now`` and ``wall`` are the
    clocks of the process, and ``term`` returns the term of a claim made now. ``buffer_s`` is added to a
    claim's time (SK-8).
    """

    def __init__(
        self,
        queue: str,
        worker: str,
        prefix: str,
        now: Callable[[], float],
        wall: Callable[[], float],
        term: Callable[[], ClaimTerm],
        buffer_s: float,
    ) -> None:
        self.pause: bytes | None = None
        """The stored pause of the queue, as of the last answer."""
        self.others_ready = True
        """False if no task of any function was ready at the last claim."""
        self._queue = queue
        self._worker = worker
        self._prefix = prefix
        self._now = now
        self._wall = wall
        self._term = term
        self._buffer_s = buffer_s
        self._count = itertools.count()
        self._unused: list[str] = []
        """Holders that no claim has, whatever the outcome of earlier requests."""
        self._wakeup: float | None = -math.inf

    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None, ahead: int = 0
    ) -> Generator[IndexRequest, Any, list[Claimed]]:
        """Claim as ``ClaimSource.claim`` does, all or none."""
        if limit <= 0:
            yield from self.read_pause()
            return []
        sent_at, wall = self._now(), self._wall()
        holders = self._new_holders(min(limit, MAX_CLAIMS))
        answer: ClaimAnswer = yield ClaimBest(
            ClaimQuery(
                self._queue,
                holders,
                worker or self._worker,
                self._term(),
                names,
                self._now,
                wall,
                self._buffer_s,
                ahead,
            )
        )
        self.pause = answer.pause
        self.others_ready = answer.others_ready
        claimed: list[Claimed] = []
        for stored, payload in answer.claimed:
            claim = stored.state.claim
            assert claim is not None
            claimed.append(Claimed(stored, ClaimKey(claim.number, claim.holder), sent_at, payload))
        used = {each.held.holder for each in claimed}
        self._unused += [each for each in holders if each not in used] if used else holders
        times = [] if answer.next_due is None else [sent_at + answer.next_due - wall]
        times += [] if answer.next_over is None else [answer.next_over]
        self._wakeup = -math.inf if claimed else min(times, default=None)
        return claimed

    def read_pause(self) -> Generator[IndexRequest, Any, None]:
        """Read the pause again."""
        self.pause = yield ReadQueuePause()

    def next_wakeup(self, names: Collection[str] | None) -> float | None:
        """See ``ClaimSource.next_wakeup``; as of the last claim, for the functions of that claim."""
        has_names = names is None or bool(names)
        return max(self._wakeup, self._now()) if has_names and self._wakeup is not None else None

    def _new_holders(self, number: int) -> list[str]:
        """Return names that no claim has; a request that finds nothing leaves its names to the next one.

        The names of a failed request are not used again, as its outcome may be unknown.
        """
        while len(self._unused) < number:
            self._unused.append(f"{self._prefix}-{next(self._count):x}")
        holders, self._unused = self._unused[:number], self._unused[number:]
        return holders


@dataclass(frozen=True, slots=True)
class ReadPause:
    """Read the pause of the queue, None if there is none; its changes are followed from before that."""


@dataclass(frozen=True, slots=True)
class TakeArrived:
    """Take the claims that others have made for this process, see ``SlotOffers.arrived``."""

    limit: int
    names: Collection[str] | None
    keeps: bool


@dataclass(frozen=True, slots=True)
class ClaimOwned:
    """Claim in the own partitions, see ``OwnedIndex.claim``."""

    limit: int
    names: Collection[str] | None
    worker: str | None
    ahead: int


ClaimRequest: TypeAlias = ReadPause | TakeArrived | ClaimOwned


class PausableClaims(Generic[PauseT]):
    """Claims of one process, and the pause of its queue as far as it knows (SK-23). Pure."""

    def __init__(self) -> None:
        self.pause: PauseT | None = None
        self._changed = True
        """True if the pause may have changed."""

    def changed(self) -> None:
        """Read the pause again before the next claim. For any thread."""
        self._changed = True

    def claim(
        self, limit: int, names: Collection[str] | None, worker: str | None, ahead: int = 0
    ) -> Generator[ClaimRequest, Any, list[Claimed]]:
        """Claim as ``Partitions.claim`` does; while the queue is paused give back what has arrived."""
        if self._changed:
            yield from self._read()
        if self.pause is not None:
            yield TakeArrived(0, None, keeps=False)
            return []
        # A client is one of several: claims that it does not take may be for the next one.
        arrived: list[Claimed] = yield TakeArrived(limit, names, keeps=worker is not None)
        if arrived:
            return arrived
        owned: list[Claimed] = yield ClaimOwned(limit, names, worker, ahead)
        return owned

    def _read(self) -> Generator[ClaimRequest, Any, None]:
        self._changed = False
        try:
            self.pause = yield ReadPause()
        except BaseException:
            self._changed = True
            raise

    def rooms(self, rooms: Rooms) -> Rooms:
        """Return the room to offer to the owners of partitions: none while the queue is paused."""
        return rooms if self.pause is None else {}

    def next_wakeup(self, now: float, next_task: Callable[[], float | None]) -> float | None:
        """Return when there may be something to claim; ``next_task()`` returns it without the pause."""
        if self._changed:
            return now
        return next_task() if self.pause is None else None
