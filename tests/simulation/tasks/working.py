"""Workers: they request claims and work on them, also when they should not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.model import ClaimTerm, Status, Stored, TaskId, Update
from rebalanser.core.tasks.rules import ClaimKey, Decision, Reason, Refused
from rebalanser.core.tasks.slots import SETTLE_S, OwnSlots, WorkerRoom, is_fresh
from rebalanser.core.tasks.store import FreeSlot, SlotNews, UsedSlot
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import RebalanserError, RequestTooLarge
from simulation.kernel.reports import Violation
from simulation.tasks.network import LOST, Resume, Unanswered, Wish, once
from simulation.tasks.owning import Tenancy
from simulation.tasks.process import Host, Process, Script, Surroundings
from simulation.tasks.scenario import TTL_S
from simulation.tasks.writing import Writer

POISON, KILLER, PLAIN = "poison", "killer", "plain"
NAMES = frozenset({POISON, KILLER, PLAIN})
_ASKS_WITHIN_S = 1.0
_OFFERS_RATIO = 0.4
"""Ratio of claims for which a worker publishes a slot instead of a request to an owner."""


class WorkingProcess(Process):
    """A process that works on tasks.

    A stubborn one neither renews its claims nor stops when they are over. A careless one takes an update
    for written if its answer was lost.
    """

    def __init__(
        self,
        world: Surroundings,
        name: str,
        host: Host,
        *,
        stubborn_ratio: float,
        careless_ratio: float = 0.0,
    ) -> None:
        super().__init__(world, name, host)
        self.is_stubborn = world.random.random() < stubborn_ratio
        self.is_careless = careless_ratio > 0 and world.random.random() < careless_ratio
        self.writer = Writer(self)
        self._at_work = 0

    @property
    def is_at_work(self) -> bool:
        """True if a body runs."""
        return self._at_work > 0

    def term(self) -> ClaimTerm:
        """Return the term of a claim made now."""
        return ClaimTerm(TTL_S, self.host.clock, self.now + TTL_S)


class SimulatedWorker(WorkingProcess):
    """A process that works on several tasks at a time."""

    def __init__(self, world: Surroundings, name: str, host: Host, tenancies: list[Tenancy]) -> None:
        super().__init__(world, name, host, stubborn_ratio=0.4, careless_ratio=0.4)
        self._tenancies = tenancies
        """Those of the world, which changes them."""
        self._asked = 0
        self._slots = OwnSlots()
        self._arrives: Resume | None = None
        world.engine.slot_followers.append(self._follow_slot)
        for number in range(world.random.randint(1, 3)):
            self.spawn(self._run(offers=number == 0))

    def _run(self, *, offers: bool) -> Script:
        while True:
            if offers and self.world.random.random() < _OFFERS_RATIO:
                yield from self._offer()
                continue
            asked_at = self.now
            claimed = yield self._ask_for_claim()
            if isinstance(claimed, Claimed):
                yield from self._work(claimed.stored, claimed.held.holder, asked_at)
            yield self.sleep(self.world.random.uniform(0.02, 0.2))

    def _work(self, claimed: Stored, holder: str, asked_at: float) -> Script:
        self._at_work += 1
        yield from Working(self, claimed, holder, asked_at).run()
        self._at_work -= 1

    def _offer(self) -> Script:
        """Publish a slot, wait for claims, withdraw it, and work on the claims that have arrived."""
        network, engine = self.world.network, self.world.engine
        self._slots.offer({NAMES: WorkerRoom(1, 1)}, self.now)
        yield self.sleep(1.1 * SETTLE_S)
        for _ in self._slots.plan(self.now).publish:
            self._asked += 1
            slot = FreeSlot(f"{self.name}/{self._asked}", self.name, self.name, NAMES, TTL_S, 0)
            self._slots.published([slot], self.now)
            yield network.request(self, partial(engine.publish, slot))
        if not self._slots.arrived:
            yield self._until_arrival
        yield self.sleep(self.world.random.choice((0.0, 0.0, 0.3)))
        self._slots.offer({}, self.now)
        yield self.sleep(1.1 * SETTLE_S)
        plan = self._slots.plan(self.now)
        used = yield network.request(self, partial(engine.withdraw, plan.withdraw))
        if not isinstance(used, Unanswered):
            for each in used:
                self._slots.used(each, self.now)
            self._slots.gone(plan.withdraw)
        while self._slots.arrived:
            arrival = self._slots.arrived[0]
            self._slots.take_arrived(1)
            self._slots.forgotten([arrival.slot.holder])
            published_at = None if arrival.offered is None else arrival.offered.sent_at
            yield from self._work_on_arrived(arrival.slot, published_at)

    def counted_from(self, published_at: float) -> float:
        """Return the start of the time of a claim for a slot: before the slot was published (SK-8)."""
        return published_at

    def _work_on_arrived(self, arrived: UsedSlot, published_at: float | None) -> Script:
        """Work on the task claimed for a slot; renew the claim of an old slot first (SK-8)."""
        found = yield self.world.network.read(self, [arrived.task])
        stored = None if isinstance(found, Unanswered) else found.get(arrived.task)
        if stored is None or not self.is_of_slot(stored, arrived):
            return
        sent_at = None if published_at is None else self.counted_from(published_at)
        if sent_at is None or not is_fresh(sent_at, self.now, TTL_S):
            sent_at, term = self.now, self.term()
            held = ClaimKey(_claim_number(stored), arrived.holder)
            pending = PendingMove(stored, lambda now: rules.renew(now.state, held, term))
            try:
                stored = yield from self.writer.written(pending, held)
            except RebalanserError:
                return  # the claim ends by itself
        if isinstance(stored, Stored):
            yield from self._work(stored, arrived.holder, sent_at)

    def is_of_slot(self, stored: Stored, arrived: UsedSlot) -> bool:
        """True if the task's current claim is the one for the slot."""
        claim = stored.state.claim
        is_claimed = stored.state.status is Status.CLAIMED
        return is_claimed and claim is not None and claim.holder == arrived.holder

    def _until_arrival(self, resume: Resume) -> None:
        """Resume when a claim arrives, or after a while without one."""
        finish = self._arrives = once(resume)
        self.world.after(self.world.random.uniform(0.2, _ASKS_WITHIN_S), lambda: finish(None))

    def _follow_slot(self, news: SlotNews) -> None:
        """Report a change of an own slot, once the engine can be reached; sometimes twice."""
        world = self.world
        if news.process != self.name or not self.alive:
            return
        tell = partial(self.received, partial(self._told_slot, news))
        world.after(max(0.0, self.cut_until - world.now) + world.scenario.latency_s, tell)
        if world.tells_late():
            world.after(world.random.uniform(0.1, 4.0), tell)

    def _told_slot(self, news: SlotNews) -> None:
        if self._slots.learn(news, self.now) and self._arrives is not None:
            self._arrives(None)

    def _ask_for_claim(self) -> Wish:
        """Request a claim from a process that would hand one out, rightly or not."""
        world = self.world

        def wish(resume: Resume) -> None:
            finish = once(resume)

            def reply(claimed: Claimed) -> None:
                slow_s = world.random.choice((0.0, 0.0, 0.0, 0.3))
                world.after(world.delay() + slow_s, lambda: finish(claimed))

            serving = [each for each in self._tenancies if each.is_serving]
            if serving:
                tenancy = world.random.choice(serving)
                world.after(
                    world.delay(),
                    lambda: tenancy.process.received(lambda: tenancy.process.ask(self.name, reply)),
                )
            world.after(_ASKS_WITHIN_S, lambda: finish(LOST))

        return wish


def _claim_number(stored: Stored) -> int:
    return -1 if stored.state.claim is None else stored.state.claim.number


class Working:
    """One claim held by a worker."""

    def __init__(self, worker: WorkingProcess, claimed: Stored, holder: str, asked_at: float) -> None:
        claim = claimed.state.claim
        assert claim is not None
        self.worker = worker
        self.world = worker.world
        self.stored = claimed
        self.held = ClaimKey(claim.number, holder)
        self.deadline = self.counted_from(asked_at) + TTL_S
        self._sequence = claim.updates
        self._has_ended = False
        self.world.oracle.granted(self.task, self.held)

    @property
    def task(self) -> TaskId:
        """The claimed task."""
        return self.stored.head.id

    def counted_from(self, asked_at: float) -> float:
        """Return the start of a claim's time: before it was requested (SK-8)."""
        return asked_at

    @property
    def is_in_time(self) -> bool:
        """True if the claim is current by the worker's clock."""
        return self.worker.now < self.deadline

    def run(self) -> Script:
        """Work on the task, and end the claim in one way or another."""
        random = self.world.random
        if self.stored.head.name == KILLER:
            self.world.replace(self.worker)
            yield self.worker.sleep(0.0)
        for _ in range(random.randint(0, 4)):
            yield self.worker.sleep(random.choice((0.02, 0.1, 0.6, 1.2)))
            if not self._goes_on():
                return
            self.world.oracle.accesses(self.task, self.held, in_time=self.is_in_time)
            if random.random() < 0.6:
                yield from self._update()
            if not self.worker.is_stubborn and self.worker.now > self.deadline - TTL_S / 2:
                yield from self._renew()
        if self._goes_on():
            yield from self._end()

    def _goes_on(self) -> bool:
        return not self._has_ended and (self.worker.is_stubborn or self.is_in_time)

    def _end(self) -> Script:
        random = self.world.random
        if self.stored.head.name == POISON:
            yield from self._fail()
            return
        match random.choices(("complete", "fail", "release", "hang"), (12, 2, 1, 1))[0]:
            case "complete":
                yield from self._complete()
            case "fail":
                yield from self._fail()
            case "release":
                yield from self._ask(lambda stored: rules.release(stored.state, self.held), lasting=True)
            case _:
                self.world.say(self.worker.name, "forgets what it works on")

    def _complete(self) -> Script:
        result = self.world.content(b"result")
        rule: Callable[[Stored], Decision] = lambda stored: rules.complete(  # noqa: E731 - needs a type
            stored.state, self.held, result
        )
        pending_writes = [PendingMove(self.stored, rule, lasting=True) for _ in range(2)]
        self.worker.writer.submit_all(pending_writes, self.held)
        yield self.worker.writer.settled(pending_writes)
        try:
            self._take(pending_writes[0])
        except RequestTooLarge:
            yield from self._fail(is_final=True)
            return
        if not self._has_ended:
            self._take(pending_writes[1])
            # The task may be collected between the two, while this worker can't reach the engine.
            if self._has_ended and pending_writes[1].future.result() != Refused(Reason.GONE):
                raise Violation("SK-10", f"{self.worker.name} can't complete twice what is complete")

    def _fail(self, *, is_final: bool = False) -> Script:
        due = None if is_final else self.world.now + self.world.random.choice((0.0, 0.4))
        yield from self._ask(
            lambda stored: rules.fail(stored.head, stored.state, self.held, "it failed", due), lasting=True
        )

    def _renew(self) -> Script:
        asked_at, term = self.worker.now, self.worker.term()
        try:
            yield from self._ask(lambda stored: rules.renew(stored.state, self.held, term))
        except RebalanserError:
            return  # it is retried before the claim is over
        if not self._has_ended:
            self.deadline = self.counted_from(asked_at) + TTL_S

    def _update(self) -> Script:
        sequence = self._sequence
        content = self.world.content(b"%d of %d" % (sequence, self.held.number))
        rule = partial(self._updated, sequence=sequence, content=content)
        pending = PendingMove(self.stored, rule, update=Update(self.held.number, sequence, content))
        if self.worker.is_careless:
            yield from self._update_carelessly(pending)
        else:
            try:
                yield from self._written(pending)
            except RebalanserError:
                yield from self._fail()  # the body ends with this error
                self._has_ended = True
                return
            if not self._has_ended:
                self.world.oracle.updated(self.task, self.held, sequence, content)
        self._sequence += 1

    def _updated(self, stored: Stored, sequence: int, content: bytes) -> Decision:
        written = self.world.engine.update_at(self.task, self.held.number, sequence)
        return rules.update(stored.state, self.held, sequence, content, written)

    def _update_carelessly(self, pending: PendingMove) -> Script:
        write = pending.write()
        answers = (
            [LOST] if write is None else (yield self.world.network.apply(self.worker, [write], [self.held]))
        )
        if not isinstance(answers, Unanswered) and not isinstance(answers[0], Unanswered):
            pending.answered(answers[0])
        if pending.settled:
            self._take(pending)
        found = yield self.world.network.read(self.worker, [self.task])
        if not isinstance(found, Unanswered) and self.task in found:
            self.stored = found[self.task]

    def _ask(self, rule: Callable[[Stored], Decision], *, lasting: bool = False) -> Script:
        yield from self._written(PendingMove(self.stored, rule, lasting=lasting))

    def _written(self, pending: PendingMove) -> Script:
        yield from self.worker.writer.written(pending, self.held)
        self._take(pending)

    def _take(self, pending: PendingMove) -> None:
        outcome = pending.future.result()
        if not isinstance(outcome, Refused):
            self.stored = outcome
        elif outcome.reason is Reason.GAP:
            claim = self.stored.state.claim
            self._sequence = -1 if claim is None else claim.updates - 1
        else:
            self.world.oracle.counts[f"refused: {outcome.reason}"] += 1
            self._has_ended = True
