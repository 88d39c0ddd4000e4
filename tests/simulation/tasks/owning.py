"""Owners: processes that own partitions and hand out claims in them, with the product's index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rebalanser.core.tasks.claims import (
    Claimed,
    ClaimOwned,
    ClaimRequest,
    OwnedIndex,
    PausableClaims,
    PendingClaim,
    ReadPause,
    TakeArrived,
)
from rebalanser.core.tasks.model import ClaimTerm, Status, Stored, TaskId
from rebalanser.core.tasks.owner import PartitionOwner
from rebalanser.core.tasks.slots import FollowSlots, ReadSlots, SlotDecisions, SlotRequest, WakeClaimant
from rebalanser.core.tasks.store import Change, ChangesLost, OwnerEpoch, Page, SlotNews, TakeOver
from rebalanser.core.tasks.writes import (
    Await,
    PendingTakeOver,
    ReadPage,
    ReadPayloads,
    ReadRates,
    ReadTasks,
    Request,
    Submit,
)
from rebalanser.errors import InternalError, RebalanserError
from rebalanser.tasks.pauses import Pause
from simulation.tasks.network import Resume, Unanswered
from simulation.tasks.process import Host, Process, Script, Surroundings
from simulation.tasks.scenario import BUFFER_S, TTL_S
from simulation.tasks.writing import Writer, driven

QUEUE = "q"
_PAGE = 6
_ASKER_WAITS_S = 0.5
_LOOKS_EVERY_S = 0.4
_FAILURE_PAUSE_S = 0.1

Reply = Callable[[Claimed], None]


@dataclass(frozen=True, slots=True)
class _Client:
    """A worker that requests one claim, and waits until true time ``deadline``."""

    worker: str
    reply: Reply
    deadline: float


class Tenancy:
    """One partition held by one process, by one fencing token, until the process learns that it is over."""

    def __init__(self, process: OwnerProcess, partition: int, token: int) -> None:
        self.process = process
        self.partition = partition
        self.token = token
        self.is_over = False
        process.take(self)

    @property
    def is_serving(self) -> bool:
        """True if it would hand out a claim, rightly or not."""
        return self.process.alive and self.process.holds(self)

    def end(self) -> None:
        """Learn that another process owns the partition."""
        self.is_over = True
        self.process.give_up(self)


class OwnerProcess(Process):
    """A process that owns partitions: it claims for workers that request it, and for free slots."""

    def __init__(self, world: Surroundings, name: str, host: Host) -> None:
        super().__init__(world, name, host)
        self._holders = 0
        self._offering = SlotDecisions(name, name, TTL_S, self.clock.now, self._term, self._new_holder)
        self.index = OwnedIndex(
            name, self.clock, host.clock, TTL_S, BUFFER_S, self._new_holder, self._offering
        )
        self._claims: PausableClaims[Pause] = PausableClaims()
        self._writer = Writer(self)
        self._tokens: dict[int, int] = {}
        self._clients: list[_Client] = []
        self._drops_until = 0.0
        self._resume: Resume | None = None
        world.engine.followers.append(self._follow)
        world.engine.slot_followers.append(self._follow_slot)
        world.engine.pause_followers.append(self._follow_pause)
        self.spawn(self._run())

    def take(self, tenancy: Tenancy) -> None:
        """Own a partition that the group assigns."""
        self.spawn(self._take(tenancy))

    def give_up(self, tenancy: Tenancy) -> None:
        """Give up a partition that the group has reassigned."""
        if self.holds(tenancy):
            self.index.remove(tenancy.partition)

    def holds(self, tenancy: Tenancy) -> bool:
        """True if it claims in a partition by the token of this tenancy."""
        is_last = self._tokens.get(tenancy.partition) == tenancy.token
        return is_last and tenancy.partition in self.index

    def ask(self, worker: str, reply: Reply) -> None:
        """Take in a request for a claim."""
        self._clients.append(_Client(worker, reply, self.world.now + _ASKER_WAITS_S))
        self._wake()

    def drop_changes(self, until: float) -> None:
        """Break the watch; once it is back it reports that changes were lost."""
        self._drops_until = until

    def _term(self) -> ClaimTerm:
        return ClaimTerm(TTL_S, self.host.clock, self.now + TTL_S)

    def _new_holder(self) -> str:
        self._holders += 1
        return f"{self.name}-{self._holders}"

    def _take(self, tenancy: Tenancy) -> Script:
        epoch = OwnerEpoch(tenancy.partition, tenancy.token)
        while not tenancy.is_over:
            try:
                yield from self._writer.written(PendingTakeOver(TakeOver(QUEUE, epoch)))
            except RebalanserError:  # the engine was away, or a newer owner has it
                yield self.sleep(_FAILURE_PAUSE_S)
            else:
                break
        if tenancy.is_over or self._tokens.get(tenancy.partition, 0) > tenancy.token:
            return
        self._tokens[tenancy.partition] = tenancy.token
        self.index.add(tenancy.partition, tenancy.token)
        try:
            yield from self._driven(self.index.read(tenancy.partition))
        except RebalanserError:
            self.index.schedule_full_read()
        self._wake()

    def _run(self) -> Script:
        while True:
            try:
                yield from self._serve()
            except RebalanserError:
                self.world.oracle.counts["claims that failed"] += 1
                yield self.sleep(_FAILURE_PAUSE_S)
            else:
                yield self._pause

    def _serve(self) -> Script:
        """Claim for requests in FIFO order, then for free slots."""
        if self._offering.lost:
            yield from driven(self._offering.step(), self._perform_of_slots)
        while self._clients:
            client = self._clients.pop(0)
            if client.deadline <= self.world.now:
                continue
            claimed = yield from self._claimed(1, None, client.worker)
            if not claimed:
                self._clients.insert(0, client)
                break
            for each in claimed:
                client.reply(each)
        self._clients = [each for each in self._clients if each.deadline > self.world.now]
        if self.index.groups() or self.world.has_pauses:  # it reads the pause, too
            yield from self._claimed(0, (), None)

    def _claimed(self, limit: int, names: Collection[str] | None, worker: str | None) -> Script:
        return (yield from driven(self._claims.claim(limit, names, worker), self._perform_claim))

    def _perform_claim(self, request: ClaimRequest) -> Script:
        """Make a request of a script of claims, for a process that offers no room."""
        match request:
            case ReadPause():
                return (yield from self.world.read_pause(self))
            case TakeArrived():
                return []
            case ClaimOwned(limit=limit, names=names, worker=worker, ahead=ahead):
                return (yield from self._driven(self.index.claim(limit, names, worker, ahead)))

    def _perform_of_slots(self, request: SlotRequest) -> Script:
        """Make a request of a script of slot offers, for a process that offers no room."""
        engine = self.world.engine
        match request:
            case ReadSlots():
                slots = yield self.world.network.request(
                    self, lambda: (list(engine.slots.values()), engine.revision)
                )
                if isinstance(slots, Unanswered):
                    raise slots.error
                return slots
            case WakeClaimant():
                self._wake()
            case FollowSlots():
                pass
            case _:
                raise InternalError(f"an owner without room makes no request {request!r}")
        return None

    def _driven(self, script: Any) -> Script:
        result = yield from driven(script, self._perform)
        self._look_at_news()
        return result

    def _perform(self, request: Request) -> Script:
        """Make a request of the index; judge the choice of the claims that are written."""
        network, engine = self.world.network, self.world.engine
        self._look_at_news()
        match request:
            case ReadTasks(ids=ids):
                answer = yield network.read(self, list(ids))
            case ReadPage(partition=partition, after=after):
                read = partial(engine.page, partition, after or "", _PAGE, is_open=True)
                found = yield network.request(self, lambda: (read(), engine.revision))
                if isinstance(found, Unanswered):
                    raise found.error
                items, revision = found
                answer = Page(tuple(items), items[-1].head.id if len(items) == _PAGE else None, revision)
            case ReadRates(limits=limits):
                answer = yield network.request(self, lambda: engine.read_rates(limits))
            case ReadPayloads(ids=ids):
                known = engine.payloads
                answer = yield network.request(
                    self, lambda: {each: known[each] for each in ids if each in known}
                )
                answer = {} if isinstance(answer, Unanswered) else answer
            case Submit(pending_writes=pending_writes):
                claims = [pending for pending in pending_writes if isinstance(pending, PendingClaim)]
                self.world.oracle.requested([(pending.task, pending.claimant.holder) for pending in claims])
                self._judge([pending for pending in claims if pending.slot is None])
                answer = self._writer.submit_all(pending_writes)  # type: ignore[func-returns-value]
            case Await(pending_writes=pending_writes):
                answer = yield self._writer.settled(pending_writes)
            case _:
                raise InternalError(f"an index makes no request {request!r}")
        if isinstance(answer, Unanswered):
            raise answer.error
        return answer

    def _follow(self, stored: Stored) -> None:
        """Report a change: in the order of changes, sometimes twice, unless the watch is broken."""
        world = self.world
        if not self.alive:
            return
        if world.now < self._drops_until or self.is_cut:
            until = max(self._drops_until, self.cut_until)
            world.after(until - world.now, lambda: self.received(self._is_lost))
            return
        world.after(world.scenario.latency_s, lambda: self.received(lambda: self._told(stored)))
        if world.tells_late():
            late_s = world.random.uniform(0.1, 4.0)
            world.after(late_s, lambda: self.received(lambda: self._told(stored)))

    def _follow_slot(self, news: SlotNews) -> None:
        """Report a change of a slot, as one of a task."""
        world = self.world
        if not self.alive:
            return
        if world.now < self._drops_until or self.is_cut:
            until = max(self._drops_until, self.cut_until)
            world.after(until - world.now, lambda: self.received(self._is_lost))
            return
        world.after(world.scenario.latency_s, lambda: self.received(lambda: self._told_slot(news)))
        if world.tells_late():
            late_s = world.random.uniform(0.1, 4.0)
            world.after(late_s, lambda: self.received(lambda: self._told_slot(news)))

    def _told_slot(self, news: SlotNews) -> None:
        if self._offering.learn([news])[1]:
            self._wake()

    def _follow_pause(self) -> None:
        """Report a change of the pause, late while the watch is broken."""
        world = self.world
        late_s = max(world.scenario.latency_s, self._drops_until - world.now, self.cut_until - world.now)
        world.after(late_s, lambda: self.received(self._pause_told))

    def _pause_told(self) -> None:
        self._claims.changed()
        self._wake()

    def _is_lost(self) -> None:
        self.index.schedule_full_read()
        self._offering.learn(ChangesLost(0))
        self._wake()

    def _told(self, stored: Stored) -> None:
        before = {owner.partition: owner.get(stored.head.id) for owner in self.index.owners}
        change = Change(stored.head.id, stored.partition, stored.state.status, stored.revision)
        if self.index.wants(change):
            self.index.learn([stored])
        for owner in self.index.owners:
            after = owner.get(stored.head.id)
            if after is not None:
                self.world.oracle.read(before.get(owner.partition), after)
        self._look_at_news()

    def _look_at_news(self) -> None:
        news = self.index.take_news()
        if news.is_paused:
            self._claims.changed()
        if news.wakes:
            self._wake()

    def _judge(self, pending_writes: Sequence[PendingClaim]) -> None:
        """True if each task is the best one known here (SK-5)."""
        position_of = {pending.task: position for position, pending in enumerate(pending_writes)}
        known = [
            stored
            for task in self.world.oracle.tasks()
            for owner in self.index.owners
            if (stored := owner.get(task)) is not None
            and (task in position_of or not owner.is_taken(task))
            and self._is_surely_ready(owner, stored)
        ]
        for position, pending in enumerate(pending_writes):
            better = [
                stored
                for stored in known
                if _rank(stored) < _rank(pending.last_read)
                and position_of.get(stored.head.id, position) >= position
                and _limit_lets(stored, pending.last_read)
            ]
            self.world.oracle.chose(pending.last_read, min(better, key=_rank, default=None))

    def _is_surely_ready(self, owner: PartitionOwner, stored: Stored) -> bool:
        state = stored.state
        return (
            state.status is Status.WAITING
            and state.due <= self.wall
            and (state.claim is not None or not stored.head.after)
            and stored.head.id not in owner.doubtful()
        )

    def _pause(self, resume: Resume) -> None:
        """Resume on news, on a request, or when a time has come."""
        self._resume = resume
        names = None if self._clients else ()
        at = self._claims.next_wakeup(self.now, lambda: self.index.next_wakeup(names))
        waits_s = _LOOKS_EVERY_S
        if at is not None:
            waits_s = min(waits_s, max(0.0, at - self.now) / self.host.rate + 1e-3)
        self.world.after(waits_s, lambda: self._wake_if(resume))

    def _wake_if(self, resume: Resume) -> None:
        if self._resume is resume:
            self._wake()

    def _wake(self) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume(None)


def _rank(stored: Stored) -> tuple[int, TaskId]:
    return -stored.head.priority, stored.head.id


def _limit_lets(better: Stored, chosen: Stored) -> bool:
    """False if its limit may hold a task back: of one limit the best comes first, if no claim is over."""
    head, other = better.head, chosen.head
    is_same = head.limit == other.limit
    return not head.is_limited or (is_same and chosen.state.status is Status.WAITING)
