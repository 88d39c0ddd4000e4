"""A world: an engine, hosts, processes, a group that assigns partitions to them, and faults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TypeVar

from rebalanser.core.tasks.model import OPEN, Status, Stored, TaskId
from rebalanser.tasks.pauses import QUEUE as QUEUE_PAUSE
from rebalanser.tasks.pauses import Pause
from simulation.kernel.scheduler import Scheduler
from simulation.kernel.trace import Trace
from simulation.tasks.claiming import ClaimingProcess
from simulation.tasks.dispensing import HttpClient, ServerProcess
from simulation.tasks.engine import SimulatedEngine
from simulation.tasks.executing import PoolWorker
from simulation.tasks.network import Network, Unanswered
from simulation.tasks.operating import Collector, Operator
from simulation.tasks.oracle import Oracle
from simulation.tasks.owning import OwnerProcess, Tenancy
from simulation.tasks.process import Host, Process, Script
from simulation.tasks.producing import Outbox, Producer
from simulation.tasks.scenario import (
    DRIFT_RATIO,
    MAX_CONTENT_BYTES,
    SKEW_S,
    SLOT_LEASE_S,
    TTL_S,
    Fault,
    Scenario,
)
from simulation.tasks.ticking import SimulatedTicker
from simulation.tasks.working import PLAIN, SimulatedWorker

ProcessT = TypeVar("ProcessT", bound=Process)
CALMS_S = 5.0
"""Seconds from the end of all faults until their effects are over."""


class World:
    """All objects of a run."""

    def __init__(self, scenario: Scenario, random: Random, trace: Trace) -> None:
        self.scenario = scenario
        self.random = random
        self.trace = trace
        self.scheduler = Scheduler()
        self.oracle = Oracle(lambda: self.now)
        self.engine = SimulatedEngine(self.oracle)
        self.network = Network(self)
        self.hits: Counter[Fault] = Counter()
        self.ids: list[TaskId] = []
        """Ids that producers have made, in their order."""
        self.hosts = [self._host(number) for number in range(scenario.hosts)]
        self.tenancies: list[Tenancy] = []
        self._present: dict[int, Tenancy] = {}
        """The tenancy of each partition by the group, whatever processes know."""
        self._started = 0
        self._tokens = 0
        self._late_news = 0
        self._large_contents = 0
        self._healed_at = math.inf
        self.is_ticking = Fault.PAUSE_SCHEDULE in scenario.faults
        """True if owners enqueue the ticks of a schedule."""
        self.is_without_overlap = scenario.hosts % 2 == 0
        """True if a tick is left out while the task of an earlier one is open."""
        self.left_out: set[TaskId] = set()
        """Tasks of such ticks."""
        self.operator = Operator(self, "operator", self.hosts[0])
        self.owners = [self._owner() for _ in range(scenario.owners)]
        self.workers = [self._worker() for _ in range(scenario.workers)]
        self.pools = [self._pool() for _ in range(scenario.pools)]
        self.servers = [self._server() for _ in range(scenario.servers)]
        self.clients = [self._client() for _ in range(scenario.clients)]
        self.outboxes = [Outbox(number, scenario.tasks) for number in range(scenario.producers)]
        self.producers = [self._producer(outbox) for outbox in self.outboxes]
        if scenario.is_collecting:
            self.collector = Collector(self, "collector", self.hosts[-1])
        for partition in range(0 if scenario.has_index else scenario.partitions):
            self.assign(partition, is_told=True)

    @property
    def now(self) -> float:
        """True time, in seconds."""
        return self.scheduler.now

    @property
    def has_pauses(self) -> bool:
        """True if an operator may pause the queue."""
        return Fault.PAUSE_QUEUE in self.scenario.faults

    def read_pause(self, process: Process) -> Script:
        """Read the pause of the queue."""
        if not self.has_pauses:
            return None
        found = yield self.network.request(process, lambda: (self.engine.pauses.get(QUEUE_PAUSE),))
        if isinstance(found, Unanswered):
            raise found.error
        return None if found[0] is None else Pause.of(found[0])

    @property
    def is_quiet(self) -> bool:
        """True once all faults and their effects are over."""
        return self.now > self._healed_at + CALMS_S

    def say(self, where: str, sentence: str) -> None:
        """Write a line of the trace."""
        self.trace.line(self.now, where, sentence)

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Call a function later."""
        self.scheduler.at(self.now + seconds, then)

    def delay(self) -> float:
        """Return the delay of a message, in seconds."""
        return self.scenario.latency_s * self.random.uniform(0.5, 1.5)

    def tells_late(self) -> bool:
        """True if a watch reports a change a second time, later."""
        if self._late_news and self.random.random() < 0.3:
            self._late_news -= 1
            return True
        return False

    def content(self, content: bytes) -> bytes:
        """Return what a body writes: sometimes more than the engine takes."""
        if self._large_contents and self.random.random() < 0.5:
            self._large_contents -= 1
            return content * MAX_CONTENT_BYTES
        return content

    def is_coming(self, task: TaskId) -> bool:
        """True if a producer will still enqueue a task; sending its entry again does not count."""
        return any(outbox.is_coming(task, self.engine.tallies) for outbox in self.outboxes)

    def is_ready(self, stored: Stored) -> bool:
        """True if any worker may claim a task now: neither a limit nor a pause holds it back."""
        if self.oracle.paused_at is not None:
            return False
        state, head = stored.state, stored.head
        is_due = state.status is Status.WAITING and state.due <= self.now
        return is_due and not head.max_running and all(each in self.oracle.completed for each in head.after)

    def assign(self, partition: int, *, is_told: bool) -> None:
        """Assign a partition to another process; the old one learns it at once, or much later."""
        before = [each for each in self.tenancies if each.partition == partition and not each.is_over]
        for tenancy in before:
            if is_told:
                tenancy.end()
            else:
                self.after(self.random.uniform(0.5, 2 * TTL_S), tenancy.end)
        holders = {tenancy.process for tenancy in before}
        others = [process for process in self.owners if process not in holders] or self.owners
        self._tokens += 1
        process = self.random.choice(others)
        self.say("group", f"partition {partition} is given to {process.name} by token {self._tokens}")
        self.tenancies[:] = [each for each in self.tenancies if each.process.alive and not each.is_over]
        self._present[partition] = Tenancy(process, partition, self._tokens)
        self.tenancies.append(self._present[partition])

    def replace(self, process: Process) -> None:
        """Kill a process; another of its kind starts, for an owner after its lease has ended."""
        process.kill()
        if isinstance(process, SimulatedWorker):
            self.after(SLOT_LEASE_S, lambda: self.engine.end_slots(process.name))
            self.workers.remove(process)
            self.after(self.random.uniform(0.1, 0.6), lambda: self.workers.append(self._worker()))
        elif isinstance(process, PoolWorker):
            self._succeed(process, self.pools, self._pool)
        elif isinstance(process, ServerProcess):
            self._succeed(process, self.servers, self._server)
        elif isinstance(process, HttpClient):
            self._succeed(process, self.clients, self._client)
        elif isinstance(process, Producer):
            self.producers.remove(process)
            outbox = process.outbox
            self.after(self.random.uniform(0.1, 1.0), lambda: self.producers.append(self._producer(outbox)))
        elif isinstance(process, OwnerProcess):
            self.owners.remove(process)
            self.owners.append(self._owner())
            self.after(self.random.uniform(0.2, 1.0), self._reassign_unowned)

    def _succeed(self, process: ProcessT, processes: list[ProcessT], start: Callable[[], ProcessT]) -> None:
        """Start another process of a kind soon, unless this one has been replaced already."""
        if process in processes:
            processes.remove(process)
            self.after(self.random.uniform(0.1, 0.6), lambda: processes.append(start()))

    def befall(self, fault: Fault) -> None:
        """Inject a fault where it is possible."""
        if fault in (Fault.CANCEL, Fault.REQUEUE) and not self.engine.tasks:
            return
        self.hits[fault] += 1
        self.say("world", f"FAULT {fault}")
        random = self.random
        match fault:
            case Fault.DEPOSE | Fault.DEPOSE_UNSEEN:
                partition = random.randrange(self.scenario.partitions)
                self.assign(partition, is_told=fault is Fault.DEPOSE)
            case Fault.WATCH_LOST:
                self._break_watch()
            case Fault.WATCH_LATE:
                self._late_news += 1
            case Fault.TOO_LARGE:
                self._large_contents += 1
            case Fault.ENGINE_DOWN:
                self.network.engine_away_until = self.now + random.uniform(0.2, 1.0)
            case Fault.FULL | Fault.READ_ONLY | Fault.LOCKED:
                self.network.refuse(fault, self.now + random.uniform(0.2, 2.0))
            case Fault.CANCEL | Fault.REQUEUE | Fault.PAUSE_QUEUE | Fault.PAUSE_SCHEDULE | Fault.TOGETHER:
                self._operate(fault)
            case Fault.BUG | Fault.STOP:
                self._befall_pool(fault)
            case _:
                self._befall_process(fault)

    def _break_watch(self) -> None:
        watching: list[OwnerProcess | ClaimingProcess] = [*self.owners, *self.pools, *self.servers]
        if watching:
            self.random.choice(watching).drop_changes(self.now + self.random.uniform(0.1, 2.0))

    def _operate(self, fault: Fault) -> None:
        if fault is Fault.PAUSE_QUEUE:
            self.operator.pause(self.random.uniform(0.1, 1.5))
            return
        if fault is Fault.PAUSE_SCHEDULE:
            self.operator.pause(self.random.uniform(1.0, 5.0), PLAIN)
            return
        if fault is Fault.TOGETHER:
            self.random.choice(self.producers).make_together()
            return
        pending = self.operator.cancel if fault is Fault.CANCEL else self.operator.requeue
        tasks = [task for task, each in self.engine.tasks.items() if each.state.status in OPEN]
        pending(self.random.choice(tasks if self.pools and tasks else list(self.engine.tasks)))

    def _befall_pool(self, fault: Fault) -> None:
        claiming: list[PoolWorker | ServerProcess] = [*self.pools, *self.servers]
        for each in self.random.sample(claiming, min(1, len(claiming))):
            if fault is Fault.STOP:
                each.stop()
            else:
                each.bug_until = self.now + self.random.uniform(0.1, 2.0)

    def _befall_process(self, fault: Fault) -> None:
        processes = self._processes()
        if not processes:
            return
        process = self.random.choice(processes)
        match fault:
            case Fault.KILL:
                self.replace(process)
            case Fault.PAUSE_SHORT:
                self._pause(process, self.random.uniform(0.1, 0.9) * TTL_S)
            case Fault.PAUSE_LONG:
                self._pause(process, self.random.uniform(1.1, 2.2) * TTL_S)
                self._end_slots(process, process.resumes_at)
            case Fault.CUT:
                process.cut_until = self.now + self.random.uniform(0.2, 1.5 * TTL_S)
                self._end_slots(process, process.cut_until)

    def _pause(self, process: Process, seconds: float) -> None:
        """Pause a process for some seconds, or longer if it is paused for longer already."""
        process.resumes_at = max(process.resumes_at, self.now + seconds)

    def _end_slots(self, process: Process, until: float) -> None:
        """Let a worker's lease of slots end, if it can't be kept until then."""
        if isinstance(process, SimulatedWorker) and until > self.now + SLOT_LEASE_S:
            self.after(SLOT_LEASE_S, lambda: self.engine.end_slots(process.name))

    def _processes(self) -> list[Process]:
        """Return the live processes; busy workers four times, as these become stale."""
        workers: list[SimulatedWorker | PoolWorker | HttpClient] = [*self.workers, *self.pools, *self.clients]
        at_work = [worker for worker in workers if worker.is_at_work]
        return [*self.owners, *workers, *self.servers, *self.producers, *at_work, *at_work, *at_work]

    def heal(self) -> None:
        """End all faults, requeue tasks that are dead because of them, and set the wall clocks."""
        self.say("world", "everything is healed")
        self._healed_at = self.now
        self.network.fault_ratio = 0.0
        self.network.engine_away_until = min(self.network.engine_away_until, self.now)
        self.network.refuses_until = min(self.network.refuses_until, self.now)
        self._late_news = self._large_contents = 0
        for host in self.hosts:
            host.skew_s = 0.0
        for each in (*self.pools, *self.servers):
            each.bug_until = min(each.bug_until, self.now)
        for process in self._processes():
            process.cut_until = min(process.cut_until, self.now)
        self.operator.requeue_for_ever()
        if self.has_pauses or self.is_ticking:
            self.operator.resume()

    def _host(self, number: int) -> Host:
        skew_s = self.random.choice((0.0, -SKEW_S, SKEW_S, 1.0))
        rate = 1 + self.random.uniform(-DRIFT_RATIO, DRIFT_RATIO)
        return Host(number, rate, self.random.uniform(0.0, 100_000.0), skew_s)

    def _name(self, kind: str) -> tuple[str, Host]:
        self._started += 1
        return f"{kind}{self._started}", self.random.choice(self.hosts)

    def _owner(self) -> OwnerProcess:
        owner = OwnerProcess(self, *self._name("o"))
        if self.is_ticking:
            SimulatedTicker(owner)
        return owner

    def _worker(self) -> SimulatedWorker:
        return SimulatedWorker(self, *self._name("w"), self.tenancies)

    def _pool(self) -> PoolWorker:
        return PoolWorker(self, *self._name("pool"))

    def _server(self) -> ServerProcess:
        return ServerProcess(self, *self._name("server"))

    def _client(self) -> HttpClient:
        return HttpClient(self, *self._name("client"), self.servers)

    def _producer(self, outbox: Outbox) -> Producer:
        # A producer's outbox is on one host, whose clock is in its ids.
        return Producer(self, self._name("p")[0], self.hosts[outbox.number % len(self.hosts)], outbox)

    def _reassign_unowned(self) -> None:
        for partition, tenancy in list(self._present.items()):
            if not tenancy.process.alive:
                self.assign(partition, is_told=True)
