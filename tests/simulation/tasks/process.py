"""Hosts with their clocks, and processes that are stopped, cut off and killed.

A process is a generator that yields *wishes* (``tasks.network``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rebalanser.core.tasks.model import TaskId
from simulation.kernel.scheduler import Scheduler
from simulation.tasks.network import Ends, Network, Resume, Wish
from simulation.tasks.oracle import Oracle

Script: TypeAlias = Generator[Wish, Any, Any]


class Surroundings(Ends, Protocol):
    """The world of a process: time, chance, the engine, and the network to it."""

    scheduler: Scheduler
    oracle: Oracle
    network: Network
    ids: list[TaskId]
    """Ids that producers have made, in their order."""
    is_ticking: bool
    """True if owners enqueue the ticks of a schedule."""
    is_without_overlap: bool
    """True if a tick is left out while the task of an earlier one is open."""
    left_out: set[TaskId]
    """Tasks of such ticks."""

    @property
    def has_pauses(self) -> bool:
        """True if an operator may pause the queue."""
        ...

    @property
    def is_quiet(self) -> bool:
        """True once all faults and their effects are over."""
        ...

    def read_pause(self, process: Process) -> Script:
        """Read the pause of the queue."""
        ...

    def tells_late(self) -> bool:
        """True if a watch reports a change a second time, later."""
        ...

    def content(self, content: bytes) -> bytes:
        """Return what a body writes: sometimes more than the engine takes."""
        ...

    def is_coming(self, task: TaskId) -> bool:
        """True if a producer will still enqueue a task."""
        ...

    def replace(self, process: Process) -> None:
        """Kill a process; another of its kind starts."""


@dataclass
class Host:
    """A machine: its monotonic clock has a rate and an origin of its own, its wall clock is off."""

    number: int
    rate: float
    origin_s: float
    skew_s: float

    @property
    def clock(self) -> str:
        """Name of the monotonic clock."""
        return f"boot-{self.number}"


class ProcessClock:
    """A ``Clock`` as a process reads it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        """Seconds of the host's monotonic clock."""
        return self._process.now

    def wall(self) -> float:
        """Seconds of the host's wall clock."""
        return self._process.wall


class Process:
    """A process of a host."""

    def __init__(self, world: Surroundings, name: str, host: Host) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.clock = ProcessClock(self)
        self.alive = True
        self.resumes_at = 0.0
        self.cut_until = 0.0
        world.say(name, f"starts on host {host.number}")

    @property
    def now(self) -> float:
        """Time of its monotonic clock, in seconds."""
        return self.host.origin_s + self.world.now * self.host.rate

    @property
    def wall(self) -> float:
        """Time of its wall clock, in seconds since the world began."""
        return self.world.now + self.host.skew_s

    @property
    def is_cut(self) -> bool:
        """True if it can't reach the engine."""
        return self.world.now < self.cut_until

    def kill(self) -> None:
        """Kill it."""
        self.alive = False
        self.world.say(self.name, "is killed")

    def spawn(self, script: Script) -> None:
        """Run a script beside its others."""
        self._go(script, None)

    def received(self, then: Callable[[], None]) -> None:
        """Call a function now, or once the process runs again; never if it is killed before."""
        if not self.alive:
            return
        if self.world.now < self.resumes_at:
            self.world.scheduler.at(self.resumes_at, lambda: self.received(then))
        else:
            then()

    def sleep(self, seconds: float) -> Wish:
        """Wish to resume later."""

        def wish(resume: Resume) -> None:
            self.world.scheduler.at(self.world.now + seconds, lambda: resume(None))

        return wish

    def _go(self, script: Script, value: Any) -> None:
        def step() -> None:
            try:
                wish = script.send(value)
            except StopIteration:
                return
            wish(lambda answer: self._go(script, answer))

        self.received(step)
