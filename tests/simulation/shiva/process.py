"""What every simulated process has: life, pauses, requests to the broker, and records that come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from simulation.shiva.faults import Fault
from simulation.shiva.host import Machine
from simulation.shiva.log import Fenced

if TYPE_CHECKING:
    from random import Random

    from simulation.kernel.scheduler import Scheduler
    from simulation.shiva.log import Broker, Record, Topic
    from simulation.shiva.scenario import Scenario

ReplyT = TypeVar("ReplyT")
AnyMachine: TypeAlias = Machine[Any, Any, Any]
_SLACK_S = 1e-6
_NOT_SENT_YET = 0.5
"""How probable it is that a process that is stopped has not yet sent what it was about to send."""


class ProcessWorld(Protocol):
    """The world of a process."""

    scenario: Scenario
    random: Random
    scheduler: Scheduler
    broker: Broker

    @property
    def now(self) -> float:
        """True time in seconds."""
        ...

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after true ``seconds``."""

    def latency(self) -> float:
        """Return the seconds that a message takes."""
        ...

    def say(self, where: str, sentence: str) -> None:
        """Write a line of the trace."""


class Process:
    """A leader or a worker, with its own timer. One that is paused does nothing, and goes on later."""

    role = ""

    def __init__(self, world: ProcessWorld, host: AnyMachine) -> None:
        self.world = world
        self.host = host
        self.alive = True
        self.unreachable_since: float | None = None
        self._inbox: list[tuple[str, Callable[[], None]]] = []
        self._armed: float | None = None
        self._timer = 0
        self.feeds: list[Feed] = []

    @property
    def name(self) -> str:
        """How traces call it."""
        return f"{self.host.plan.name}/{self.role}"

    @property
    def now(self) -> float:
        """Its host's monotonic clock, in seconds."""
        return self.host.clock.local(self.world.now)

    def say(self, sentence: str) -> None:
        """Tell the trace."""
        self.world.say(self.name, sentence)

    def do(self, channel: str, action: Callable[[], None]) -> None:
        """Do something now, or once the process goes on; one channel keeps its order."""
        if not self.alive:
            return
        if self.host.paused:
            self._inbox.append((channel, action))
        else:
            action()

    def tell(self, action: Callable[[], None]) -> None:
        """The group tells it something, as soon as it can be reached."""
        if self.alive and (self.host.cut or self.world.broker.down):
            self.world.after(0.2, lambda: self.tell(action))
        else:
            self.do("group", action)

    def later(self, seconds: float, channel: str, action: Callable[[], None]) -> None:
        """Do something after true ``seconds``, if the process still lives."""
        self.world.after(seconds, lambda: self.do(channel, action))

    def go_on(self) -> None:
        """The process was paused and runs again; what has come in meanwhile comes in some order."""
        inbox, self._inbox = self._inbox, []
        channels = sorted({channel for channel, _ in inbox})
        self.world.random.shuffle(channels)
        rank = {channel: index for index, channel in enumerate(channels)}
        for channel, action in sorted(inbox, key=lambda item: rank[item[0]]):
            self.do(channel, action)
        for feed in self.feeds:
            feed.wake()

    def reconnected(self) -> None:
        """The broker can be reached again."""
        for feed in self.feeds:
            feed.wake()

    def end(self) -> None:
        """The process is no more."""
        self.alive = False
        self.close_feeds()

    def close_feeds(self) -> None:
        """Read no topic any more."""
        for feed in self.feeds:
            feed.close()
        self.feeds = []

    def request(
        self,
        at_broker: Callable[[], ReplyT],
        answered: Callable[[ReplyT], None],
        failed: Callable[[str], None],
        channel: str = "replies",
    ) -> None:
        """Ask the broker for something that may get lost on the way there, or on the way back."""
        Request(self, at_broker, answered, failed, channel).send()

    @property
    def is_cut_off(self) -> bool:
        """Whether the broker cannot be reached."""
        return self.host.cut or self.world.broker.down

    def arm(self, due: float | None) -> None:
        """Wake the machine at local time ``due`` (monotonic seconds)."""
        if due is None or (self._armed is not None and self._armed <= due):
            return
        self._armed = due
        self._timer += 1
        timer = self._timer
        at = self.host.clock.true(due) + _SLACK_S
        self.world.scheduler.at(at, lambda: self.do("timer", lambda: self._fire(timer)))

    def clock_changed(self) -> None:
        """The host's clock runs at another rate: timers have to be set anew."""
        due, self._armed = self._armed, None
        self.arm(due)

    def _fire(self, timer: int) -> None:
        if timer != self._timer or self._armed is None:
            return
        due, self._armed = self._armed, None
        if self.now < due:
            self.arm(due)
        else:
            self.wakeup()

    def wakeup(self) -> None:
        """The time that the machine asked for has come."""

    def ask_stop(self) -> None:
        """Stop gracefully."""


class Request(Generic[ReplyT]):
    """One request to the broker, which ends once: with the answer, or with the reason why there is none."""

    def __init__(
        self,
        process: Process,
        at_broker: Callable[[], ReplyT],
        answered: Callable[[ReplyT], None],
        failed: Callable[[str], None],
        channel: str,
    ) -> None:
        self._process = process
        self._world = process.world
        self._at_broker = at_broker
        self._answered = answered
        self._failed = failed
        self._channel = channel
        self._over = False
        self._fault = process.host.fault_of_request()

    def send(self) -> None:
        """Send it on its way."""
        world, timeout_s = self._world, self._world.scenario.request_timeout_s
        delay_s = world.latency()
        if self._fault is Fault.REQUEST_LATE:
            delay_s += world.random.uniform(0.3, 1.5) * timeout_s
            self._give_up("no answer", timeout_s)
        world.after(delay_s, self._leave)

    def _leave(self) -> None:
        if self._process.host.paused and self._world.random.random() < _NOT_SENT_YET:
            self._process.do("network", self._leave)
        else:
            self._arrive()

    def _arrive(self) -> None:
        if self._process.is_cut_off or self._fault is Fault.REQUEST_LOST:
            self._give_up("no answer", self._world.scenario.request_timeout_s)
            return
        try:
            value = self._at_broker()
        except Fenced:
            self._give_up("fenced", self._world.latency())
            return
        self._process.later(self._world.latency(), self._channel, lambda: self._reply(value))

    def _reply(self, value: ReplyT) -> None:
        if self._process.is_cut_off or self._fault is Fault.REPLY_LOST:
            self._give_up("no answer", self._world.scenario.request_timeout_s)
        elif not self._over:
            self._over = True
            self._answered(value)

    def _give_up(self, reason: str, after_s: float) -> None:
        def fail() -> None:
            if not self._over:
                self._over = True
                self._failed(reason)

        self._process.later(after_s, self._channel, fail)


class Feed:
    """One topic as a process reads it, from a position on, in order."""

    def __init__(
        self,
        process: Process,
        topic: Topic,
        position: int,
        take: Callable[[Record], None],
        keys: str = "",
        at_position: Callable[[int], None] | None = None,
    ) -> None:
        self.process = process
        self.topic = topic
        self.position = position
        self._take = take
        self._at_position = at_position
        self._awaited = False
        self._reader = (keys, self.wake)
        topic.readers.append(self._reader)
        process.feeds.append(self)

    def close(self) -> None:
        """Read no further."""
        if self._reader in self.topic.readers:
            self.topic.readers.remove(self._reader)

    def wake(self) -> None:
        """There may be something to read."""
        process = self.process
        if not self._awaited and process.alive:
            self._awaited = True
            lag_s = process.host.lag_s.get(self.topic.name, 0.0)
            process.later(process.world.latency() + lag_s, f"feed {self.topic.name}", self._poll)

    def hurry(self) -> None:
        """Read at once what a lag held back."""
        process = self.process
        process.later(process.world.latency(), f"feed {self.topic.name}", self._poll)

    def _poll(self) -> None:
        self._awaited = False
        process = self.process
        if self not in process.feeds or process.host.cut or process.world.broker.down:
            return
        records, end = self.topic.read(self.position)
        for record in records:
            self.position = record.offset + 1
            self._take(record)
            if not process.alive or self not in process.feeds:
                return
            if process.host.paused:
                return
        self.position = end
        if self._at_position is not None:
            self._at_position(end)
