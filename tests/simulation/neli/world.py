"""A world: a broker, processes, a network between them, and the faults that befall them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeVar

from rebalanser.core.neli.messages import Committing, Fact, FactKind, LastCommit
from rebalanser.core.neli.records import Stamp
from rebalanser.core.neli.settings import GroupProtocol
from simulation.kernel.scheduler import Scheduler
from simulation.kernel.trace import Trace, text
from simulation.neli.coordinator import (
    Answer,
    ClassicCoordinator,
    ConsumerCoordinator,
    Coordinator,
    Partitions,
    Verdict,
)
from simulation.neli.log import Record, Topic
from simulation.neli.oracle import Oracle
from simulation.neli.process import Process
from simulation.neli.scenario import CLOCK_ERROR_S, Fault, Scenario

_REQUEST_TIMEOUT_S = 0.2
_JOIN_TIMEOUT_S = 0.7
T = TypeVar("T")


class World:
    """Everything that a run has. True time is the broker's."""

    def __init__(self, scenario: Scenario, random: Random, trace: Trace) -> None:
        self.scenario = scenario
        self.random = random
        self.trace = trace
        self.scheduler = Scheduler()
        self.topic = Topic(scenario.partitions)
        settings = scenario.settings
        make = ClassicCoordinator if settings.protocol is GroupProtocol.CLASSIC else ConsumerCoordinator
        self.coordinator: Coordinator = make(
            scenario.partitions, settings.session_timeout_s, settings.max_poll_interval_s
        )
        self.processes: list[Process] = []
        self.oracle = Oracle(scenario, self.scheduler, self.topic, self.coordinator, self.processes)
        self.hits: Counter[Fault] = Counter()
        self.facts: Counter[FactKind] = Counter()
        self.broker_down_until = 0.0
        self.loss_ratio = scenario.loss_ratio
        self.late_until = 0.0
        """When the last request that is late arrives."""
        self._late: Counter[Fault] = Counter()
        self._is_healed = False
        self._doomed: dict[str, float] = {}
        self._arrivals: dict[str, float] = {}
        self._started = 0

    @property
    def now(self) -> float:
        """True time, in seconds."""
        return self.scheduler.now

    def say(self, where: str, sentence: str) -> None:
        """A line of the trace."""
        self.trace.line(self.now, where, sentence)

    def start(self) -> Process:
        """Start another process."""
        self._started += 1
        drift_ratio = self.scenario.settings.clock_drift_ratio
        rate = 1 + self.random.uniform(-drift_ratio, drift_ratio)
        error_s = self.random.uniform(-CLOCK_ERROR_S, CLOCK_ERROR_S)
        settings = self.scenario.settings if self._started % 2 else self.scenario.others
        process = Process(self, f"p{self._started}", settings, rate, error_s)
        self.processes.append(process)
        self.say(process.name, "starts")
        return process

    @property
    def alive(self) -> list[Process]:
        """The processes that run, or are stopped."""
        return [process for process in self.processes if process.alive]

    def report(self, process: Process, fact: Fact) -> None:
        """A member tells what happened."""
        self.facts[fact.kind] += 1
        if self.trace:
            self.say(process.name, text(fact))

    def befall(self, fault: Fault, process: Process | None, for_s: float) -> None:
        """A fault, of a process or (None) of the broker, for ``for_s``."""
        self.hits[fault] += 1
        self.say(process.name if process else "broker", f"FAULT {fault} for {for_s:.2f} s")
        match fault:
            case Fault.BROKER_RESTART:
                self.broker_down_until = self.now + for_s
                self.scheduler.at(self.broker_down_until, lambda: self.coordinator.restart(self.now))
            case Fault.ADD_PARTITIONS:
                self.topic.grow()
                self.coordinator.grow(self.now)
            case Fault.LATE_COMMIT | Fault.LATE_RECORD | Fault.DUPLICATE_RECORD:
                self._late[fault] += 1
            case Fault.CRASH if process:
                process.kill()
            case Fault.STOP if process:
                process.received(process.stop)
            case Fault.START:
                self.start()
            case Fault.PUT_OUT if process:
                self._doomed[process.name] = for_s
            case _ if process:
                process.suffers(fault, self.now + for_s)

    def heal(self) -> None:
        """All faults end."""
        self.say("world", "everything is healed")
        self.broker_down_until = min(self.broker_down_until, self.now)
        self.loss_ratio = 0.0
        self._late.clear()
        self._doomed.clear()
        self._is_healed = True
        for process in self.alive:
            self.late_until = max(self.late_until, process.resumes_at, process.stuck_until)
            process.heal()

    def is_member(self, process: Process) -> bool:
        """Whether the coordinator takes the process for a member, under the id that it has itself."""
        return process.client in self.coordinator.members

    def is_log_cut(self, process: Process) -> bool:
        """Whether a process can't reach the partitions' leader now."""
        return self.now < max(process.cut_log_until, self.broker_down_until)

    def readable(self, partition: int, offset: int, limit: int) -> list[Record]:
        """The records that a fetch brings now."""
        horizon = self.now - self.scenario.latency_s
        return [r for r in self.topic.read(partition, offset, limit) if r.appended_at <= horizon]

    def last_commit(self, process: Process, partition: int) -> LastCommit | None:
        """Ask for a committed offset; None where no answer comes."""
        if self._is_coordinator_cut(process) or self._is_lost():
            return None
        return self.coordinator.last_commit(partition)

    def produce(self, process: Process, heartbeats: dict[int, Stamp]) -> None:
        """Records on their way to the log."""
        if self.is_log_cut(process) or self._is_lost():
            return
        copies = 1 + self._strikes(Fault.DUPLICATE_RECORD)
        late_s = self._late_s(Fault.LATE_RECORD)

        def arrive() -> None:
            for partition, stamp in heartbeats.items():
                if self.now >= self.broker_down_until:
                    self.topic.append(partition, stamp, self.now)

        for _ in range(copies):
            self.scheduler.at(self.now + late_s + self._delay(), arrive)

    def ask_count(self, process: Process, reply: Callable[[int], None]) -> None:
        """Ask for the partition count; a question that is lost is not answered."""
        if self.is_log_cut(process) or self._is_lost():
            return

        def arrive() -> None:
            count = self.topic.partitions
            self.scheduler.at(self.now + self._delay(), lambda: process.received(lambda: reply(count)))

        self.scheduler.at(self.now + self._delay(), arrive)

    def commit(
        self,
        process: Process,
        client: str,
        epoch: int,
        offsets: Mapping[int, Committing],
        reply: Callable[[Verdict | None], None],
    ) -> None:
        """Commit offsets; the reply is None where none came in time."""
        late_s = self._late_s(Fault.LATE_COMMIT)

        def serve(answer: Callable[[Verdict], None]) -> None:
            verdict = self.coordinator.commit(client, epoch, offsets, self.now)
            if self.trace:
                self.say(process.name, f"commit {text(offsets)} in {epoch}: {verdict}")
            answer(verdict)
            if verdict is Verdict.OK and process.name in self._doomed:
                self.coordinator.put_out(client, self.now)
                self._cut_off_soon(process, self._doomed.pop(process.name))

        self._request(process, serve, reply, _REQUEST_TIMEOUT_S, late_s)

    def _cut_off_soon(self, process: Process, for_s: float) -> None:
        """The answer that is under way still arrives."""

        def cut() -> None:
            if not self._is_healed:
                process.suffers(Fault.CUT_COORDINATOR, self.now + for_s)

        self.scheduler.at(self.now + 2 * self.scenario.latency_s, cut)

    def say_alive(
        self,
        process: Process,
        client: str,
        epoch: int,
        owned: Partitions,
        reply: Callable[[Answer | None], None],
    ) -> None:
        """A heartbeat to the coordinator."""
        if self.now < process.heartbeats_lost_until:
            return

        def serve(answer: Callable[[Answer], None]) -> None:
            answer(self.coordinator.heartbeat(client, epoch, owned, self.now))

        self._request(process, serve, reply, _REQUEST_TIMEOUT_S)

    def join(
        self, process: Process, client: str, owned: Partitions, reply: Callable[[Answer | None], None]
    ) -> None:
        """Join the group, or a rebalance."""

        def serve(answer: Callable[[Answer], None]) -> None:
            if process.alive:
                self.coordinator.join(client, owned, self.now, answer)

        self._request(process, serve, reply, _JOIN_TIMEOUT_S)

    def leave(self, process: Process, client: str) -> None:
        """Say that a member goes."""

        def serve(answer: Callable[[Verdict], None]) -> None:
            self.coordinator.leave(client, self.now)
            answer(Verdict.OK)

        self._request(process, serve, lambda _: None, _REQUEST_TIMEOUT_S)

    def _request(
        self,
        process: Process,
        serve: Callable[[Callable[[T], None]], None],
        reply: Callable[[T | None], None],
        timeout_s: float,
        late_s: float = 0.0,
    ) -> None:
        """A request to the coordinator: in the order of sending, unless it is late; lost both ways."""
        answered = False

        def finish(outcome: T | None) -> None:
            nonlocal answered
            if not answered:
                answered = True
                reply(outcome)

        def answer(outcome: T) -> None:
            if not self._is_coordinator_cut(process) and not self._is_lost():
                self.scheduler.at(self.now + self._delay(), lambda: process.received(lambda: finish(outcome)))

        def arrive() -> None:
            if not self._is_coordinator_cut(process):
                serve(answer)

        self.scheduler.at(self.now + timeout_s, lambda: process.received(lambda: finish(None)))
        if self._is_coordinator_cut(process) or self._is_lost():
            return
        if late_s:
            self.scheduler.at(self.now + late_s, arrive)
            return
        due = max(self.now + self._delay(), self._arrivals.get(process.name, 0.0))
        self._arrivals[process.name] = due
        self.scheduler.at(due, arrive)

    def _is_coordinator_cut(self, process: Process) -> bool:
        return self.now < max(process.cut_coordinator_until, self.broker_down_until)

    def _is_lost(self) -> bool:
        return self.loss_ratio > 0 and self.random.random() < self.loss_ratio

    def _delay(self) -> float:
        return self.scenario.latency_s * self.random.uniform(0.5, 1.5)

    def _late_s(self, fault: Fault) -> float:
        if not self._strikes(fault):
            return 0.0
        late_s = self.random.uniform(0.3, 2.5)
        self.late_until = max(self.late_until, self.now + late_s)
        return late_s

    def _strikes(self, fault: Fault) -> bool:
        if self._late[fault] and self.random.random() < 0.25:
            self._late[fault] -= 1
            return True
        return False

    def unsettled(self) -> str | None:
        """What is not well yet; None if every role has one leader and its handlers know."""
        leaders: Counter[int] = Counter()
        for process in self.alive:
            leaders.update(int(role) for role in process.member.held(process.now))
            if process.lapsing or process.is_joining or not self.is_member(process):
                return f"{process.name} hands over, joins, or is no member"
        for role in range(self.scenario.roles):
            if leaders[role] != 1:
                return f"role {role} has {leaders[role]} leaders"
        led = [p for process in self.alive for p in process.owned if process.leads(p)]
        if sorted(led) != list(range(self.topic.partitions)):
            return f"partitions are led so: {sorted(led)}"
        return None
