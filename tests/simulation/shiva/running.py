"""Application processes, and who supervises them beside the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from rebalanser.core.shiva.messages import ProcessExited, ProcessStarted, StartProcess
from rebalanser.core.shiva.types import RestartPolicy
from simulation.shiva.faults import Fault
from simulation.shiva.process import AnyMachine, ProcessWorld
from simulation.shiva.scenario import POLICY

if TYPE_CHECKING:
    from collections.abc import Callable

    from rebalanser.core.allocation import Capacity
    from rebalanser.core.shiva.types import ApplicationId, CommandId

SIGKILL: Final = -9
_SPAWN_S = 0.02
_DIES_WITHIN_S = 0.3


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the processes of a start command behave, as its archive has it."""

    policy: RestartPolicy = POLICY
    exits_after_s: float | None = None
    """Every process of it ends by itself after about so long."""
    code: int = 1
    ignores_sigterm: bool = False
    unusable: bool = False
    """Its files are refused everywhere."""

    @property
    def ends(self) -> bool:
        """Whether it runs to an end, and is not started again."""
        return self.exits_after_s is not None and self.policy.restart == "never"

    @property
    def fails(self) -> bool:
        """Whether it can run nowhere for long."""
        return self.unusable or (self.exits_after_s is not None and not self.ends)


class RunJudge(Protocol):
    """Judges application processes."""

    def started(self, process: ApplicationProcess) -> None:
        """A process begins to exist."""

    def ended(self, process: ApplicationProcess, code: int) -> None:
        """A process is no more."""


class RunningWorld(ProcessWorld, Protocol):
    """The world of an application process."""

    behaviours: dict[CommandId, Behaviour]
    kills_at_deadline: bool

    @property
    def oracle(self) -> RunJudge:
        """Its judge."""
        ...

    def pause(self, host: AnyMachine, seconds: float, kind: Fault) -> None:
        """Stop the processes of a machine for a while."""

    def lock_released(self, host: AnyMachine) -> None:
        """A process of an earlier incarnation has ended."""


class Supervisor(Protocol):
    """The worker of an application process."""

    host: AnyMachine
    capacity: Capacity | None
    processes: dict[int, ApplicationProcess]

    @property
    def world(self) -> RunningWorld:
        """Its world."""
        ...

    @property
    def now(self) -> float:
        """Its host's monotonic clock, in seconds."""
        ...

    def later(self, seconds: float, channel: str, action: Callable[[], None]) -> None:
        """Do something after true ``seconds``, if it still lives."""

    def take(self, event: ProcessStarted | ProcessExited) -> None:
        """Take in what became of a process."""


class ApplicationProcess:
    """One process of an application; it lives on its own while its worker is stopped (SIGSTOP)."""

    def __init__(self, worker: Supervisor, start: StartProcess) -> None:
        self.worker = worker
        self.host = worker.host
        self.world = worker.world
        self.application: ApplicationId = start.application
        self.command: CommandId = start.command
        self.run = start.run
        self.token = start.token
        self.deadline = start.deadline
        self.exclusive = start.deadline is not None
        self.behaviour = self.world.behaviours[start.command]
        self.started_at = 0.0
        self.alive = False
        self.over = False
        self._told_to_stop = False

    def spawn(self) -> None:
        """Start it soon; a worker that is paused just then starts it when it goes on."""
        if self.host.strikes(Fault.PAUSE_AT_SPAWN, told=False):
            self.world.pause(self.host, self.world.random.uniform(1.0, 12.0), Fault.PAUSE_AT_SPAWN)
        self.worker.later(self.world.random.random() * _SPAWN_S, "spawn", self._begin)

    def _begin(self) -> None:
        if self.over:
            return
        if self.deadline is not None and self.worker.now >= self.deadline:
            self.over = True
            self.worker.processes.pop(self.run, None)
            self._tell(ProcessExited(self.application, self.run, None, "its deadline has passed"))
            return
        self.alive = True
        self.started_at = self.world.now
        self.host.processes.append(self)
        self.world.oracle.started(self)
        self._tell(ProcessStarted(self.application, self.run))
        self._watch_deadline()
        lives_s = self.behaviour.exits_after_s
        if lives_s is not None:
            self.world.after(
                lives_s * self.world.random.uniform(0.5, 1.5), lambda: self.end(self.behaviour.code)
            )
        if self._told_to_stop:
            self._terminate()

    def _watch_deadline(self) -> None:
        if self.deadline is not None and self.alive:
            deadline = self.deadline
            self.world.scheduler.at(self.host.clock.true(deadline), lambda: self._deadline_came(deadline))

    def _deadline_came(self, deadline: float) -> None:
        if not self.alive or self.deadline != deadline:
            return
        if self.host.clock.local(self.world.now) < deadline - 1e-9:
            self._watch_deadline()
        elif self.world.kills_at_deadline:
            self.end(SIGKILL)

    def clock_changed(self) -> None:
        """The host's clock runs at another rate."""
        self._watch_deadline()

    def extend(self, deadline: float) -> None:
        """It may live until later."""
        self.deadline = deadline
        self._watch_deadline()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after the stop timeout."""
        if self._told_to_stop:
            return
        self._told_to_stop = True
        if self.alive:
            self._terminate()

    def _terminate(self) -> None:
        timeout_s = self.behaviour.policy.stop_timeout_s
        ignores = self.behaviour.ignores_sigterm or self.host.strikes(Fault.HANG)
        self.world.after(
            timeout_s if ignores else self.world.random.random() * 0.1,
            lambda: self.end(SIGKILL if ignores else 0),
        )

    def orphaned(self) -> None:
        """Its worker has died: its shim ends it."""
        if self.alive:
            self.world.after(self.world.random.random() * _DIES_WITHIN_S, lambda: self.end(SIGKILL))
        else:
            self.over = True

    def end(self, code: int) -> None:
        """It ends, now."""
        if not self.alive:
            return
        self.alive, self.over = False, True
        self.host.processes.remove(self)
        self.world.oracle.ended(self, code)
        self.worker.processes.pop(self.run, None)
        self._tell(ProcessExited(self.application, self.run, code))
        self.world.lock_released(self.host)

    def _tell(self, event: ProcessStarted | ProcessExited) -> None:
        self.worker.later(self.world.random.random() * 0.01, "processes", lambda: self.worker.take(event))
