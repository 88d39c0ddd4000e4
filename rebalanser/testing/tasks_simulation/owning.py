"""Owners: processes that own partitions, one tenancy for each time that they are given one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from rebalanser.tasks.claiming import Asker, ClaimAsk, Claiming, ask_of, claim_for, keeps_slot
from rebalanser.tasks.engine import Applied, Epoch, TakeOver
from rebalanser.tasks.free_slots import FreeSlots, SlotNews
from rebalanser.tasks.model import Status, Stored, TaskId
from rebalanser.tasks.owner import Owner
from rebalanser.testing.tasks_simulation.network import Unanswered
from rebalanser.testing.tasks_simulation.process import Process, Resume, Script
from rebalanser.testing.tasks_simulation.scenario import BUFFER_S

if TYPE_CHECKING:
    from rebalanser.testing.tasks_simulation.world import World

QUEUE = "q"
_PAGE = 6
_ASKER_WAITS_S = 0.5
_LOOKS_EVERY_S = 0.4

Reply = Callable[[Stored], None]


class Tenancy:
    """One partition in the hands of one process, by one fencing token, until it knows that it is over."""

    def __init__(self, process: Process, partition: int, token: int) -> None:
        self.process = process
        self.world: World = process.world
        self.partition = partition
        self.is_over = False
        self.is_open = False
        self.claiming = Claiming(
            Owner(partition, token, buffer_s=BUFFER_S, clock=process.host.clock),
        )
        self._epoch = Epoch(partition, token)
        self._askers: list[tuple[Asker, Reply, float]] = []
        self._slots = FreeSlots(f"{process.name}/{partition}")
        self._in_flight: set[TaskId] = set()
        self._must_read = True
        self._drops_until = 0.0
        self._resume: Resume | None = None
        process.spawn(self._run())

    @property
    def owner(self) -> Owner:
        """What it knows."""
        return self.claiming.owner

    @property
    def is_serving(self) -> bool:
        """Whether it would hand out a claim, be it rightly or not."""
        return self.is_open and not self.is_over and self.process.alive

    def end(self) -> None:
        """It is told that the partition is another's."""
        self.is_over = True

    def ask(self, asker: Asker, reply: Reply) -> None:
        """Somebody wants a claim."""
        self._askers.append((asker, reply, self.world.now + _ASKER_WAITS_S))
        self._wake()

    def drop_changes(self, until: float) -> None:
        """The watch breaks; once it is back it says that it has lost changes."""
        self._drops_until = until

    def _run(self) -> Script:
        while not self.is_over:
            answer = yield self.world.network.write(self.process, TakeOver(QUEUE, self._epoch))
            if isinstance(answer, Applied):
                break
            if not isinstance(answer, Unanswered):
                return
            yield self.process.sleep(0.1)
        self.world.engine.followers.append(self._follow)
        self.world.engine.slot_followers.append(self._follow_slot)
        while not self.is_over:
            yield from self._catch_up()
            self.is_open = True
            self._claim()
            self._claim_for_slots()
            yield self._pause
        self.world.engine.followers.remove(self._follow)
        self.world.engine.slot_followers.remove(self._follow_slot)

    def _follow(self, stored: Stored) -> None:
        """A change is told: in the order of changes, sometimes twice, unless the watch is broken."""
        world = self.world
        if not self.process.alive or self.is_over:
            return
        if world.now < self._drops_until or self.process.is_cut:
            until = max(self._drops_until, self.process.cut_until)
            world.after(until - world.now, lambda: self.process.received(self._is_lost))
            return
        world.after(world.scenario.latency_s, lambda: self.process.received(lambda: self._told(stored)))
        if world.tells_late():
            late_s = world.random.uniform(0.1, 4.0)
            world.after(late_s, lambda: self.process.received(lambda: self._told(stored)))

    def _follow_slot(self, news: SlotNews) -> None:
        """A change of a slot is told, as one of a task is."""
        world = self.world
        if not self.process.alive or self.is_over or world.now < self._drops_until or self.process.is_cut:
            return  # a change of a task that is lost has the slots read, too
        world.after(world.scenario.latency_s, lambda: self.process.received(lambda: self._told_slot(news)))
        if world.tells_late():
            late_s = world.random.uniform(0.1, 4.0)
            world.after(late_s, lambda: self.process.received(lambda: self._told_slot(news)))

    def _told_slot(self, news: SlotNews) -> None:
        if self._slots.learn(news):
            self._wake()

    def _is_lost(self) -> None:
        self._must_read = True
        self._wake()

    def _told(self, stored: Stored) -> None:
        self._learn(stored)
        self._wake()

    def _learn(self, stored: Stored) -> None:
        task = stored.head.id
        before = self.owner.get(task)
        self.owner.learn(stored, self.process.now)
        after = self.owner.get(task)
        if after is not None:
            self.world.oracle.read(before, after)

    def _catch_up(self) -> Script:
        network, process = self.world.network, self.process
        if self._must_read:
            self._must_read = False
            self.owner.doubt_dependencies()
            yield from self._read_all()
            engine = self.world.engine
            slots = yield network.request(process, lambda: (list(engine.slots.values()), engine.revision))
            if not isinstance(slots, Unanswered):
                self._slots.replace(*slots)
        needed, doubtful = self.owner.ask_dependencies(), self.owner.doubtful()
        if needed or doubtful:
            found = yield network.read(process, [*needed, *doubtful])
            if isinstance(found, Unanswered):
                return
            for task in needed:
                self.owner.learn_dependency(task, found[task].state.status if task in found else None)
            for task in doubtful:
                if task in found:
                    self._learn(found[task])
                else:
                    self.owner.forget(task)

    def _read_all(self) -> Script:
        after: TaskId = ""
        while True:
            page: Any = yield self.world.network.request(
                self.process,
                partial(self.world.engine.page, self.partition, after, _PAGE, is_open=True),
            )
            if isinstance(page, Unanswered):
                yield self.process.sleep(0.1)
                continue
            for stored in page:
                self._learn(stored)
            if len(page) < _PAGE:
                return
            after = page[-1].head.id

    def _claim(self) -> None:
        now = self.process.now
        self._askers = [each for each in self._askers if each[2] > self.world.now]
        replies = {asker.holder: reply for asker, reply, _ in self._askers}
        asks = self.claiming.asks([asker for asker, _, _ in self._askers], now, self.process.wall)
        self._judge(asks)
        served = {ask.asker.holder for ask in asks if not ask.buries}
        self._askers = [each for each in self._askers if each[0].holder not in served]
        for ask in asks:
            self._in_flight.add(ask.task)
            self.process.spawn(self._see_through(ask, replies[ask.asker.holder]))

    def _claim_for_slots(self) -> None:
        """Claim what is left for the workers that have published slots."""
        now, wall = self.process.now, self.process.wall
        for names in self._slots.groups():
            while (best := self.owner.best(now, wall, names)) is not None:
                slot = self._slots.take(names)
                if slot is None:
                    break
                ask = ask_of(self.owner, best[1], claim_for(slot, self.process.host.clock, now), slot)
                self._in_flight.add(ask.task)
                self.process.spawn(self._see_through(ask, None))

    def _judge(self, asks: list[ClaimAsk]) -> None:
        """Whether each is the best that is known here (SK-5)."""
        asked = {ask.task for ask in asks}
        for position, ask in enumerate(asks):
            rank = _rank(ask.seen)
            later = {other.task for other in asks[position:]}
            candidates = [
                stored
                for task in self.world.oracle.tasks()
                if (stored := self.owner.get(task)) is not None
                and _rank(stored) < rank
                and (task not in asked or task in later)
                and self._is_surely_ready(stored)
            ]
            self.world.oracle.chose(ask.seen, min(candidates, key=_rank, default=None))

    def _is_surely_ready(self, stored: Stored) -> bool:
        state = stored.state
        return (
            state.status is Status.WAITING
            and state.due <= self.process.wall
            and (state.claim is not None or not stored.head.after)
            and stored.head.id not in self._in_flight
            and stored.head.id not in self.owner.doubtful()
        )

    def _see_through(self, ask: ClaimAsk, reply: Reply | None) -> Script:
        """Write a claim, and tell who asked; the worker of a slot learns of it from the store."""
        yield from self.world.network.see_through(self.process, ask)
        self._in_flight.discard(ask.task)
        claimed = self.claiming.settled(ask, self.process.now)
        if claimed is not None and reply is not None:
            reply(claimed)
        if ask.slot is not None and keeps_slot(ask):
            self._slots.put_back(ask.slot)
        elif ask.slot is not None:
            self._slots.drop(ask.slot)
        if self.claiming.deposed:
            self.end()
        self._wake()

    def _pause(self, resume: Resume) -> None:
        """Go on when there is news, somebody asks, or a time has come."""
        self._resume = resume
        at = self.owner.next_wakeup(self.process.now, self.process.wall)
        waits_s = _LOOKS_EVERY_S
        if at is not None and (self._askers or self._slots):
            waits_s = min(waits_s, max(0.0, at - self.process.now) / self.process.host.rate + 1e-6)
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
