"""Clients: they write archives and commands with plain producers, and may be cut short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rebalanser.core.shiva.records import ScaleCommand, StartCommand, StopCommand, WorkerCommand
from rebalanser.core.shiva.types import (
    ApplicationId,
    Archive,
    CommandId,
    Cordon,
    Mode,
    RestartPolicy,
    WorkerId,
)
from simulation.shiva.events import PART_BYTES, part_key, size_bytes
from simulation.shiva.log import Part, Write
from simulation.shiva.running import Behaviour
from simulation.shiva.scenario import POLICY

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from rebalanser.core.allocation import Requests
    from simulation.kernel.trace import Trace
    from simulation.shiva.log import Broker, Value
    from simulation.shiva.oracle import Oracle

_BULK_PARTS = 8
_OVERSIZE_PARTS = 60


class ClientWorld(Protocol):
    """The world of clients."""

    random: Random
    trace: Trace
    broker: Broker
    oracle: Oracle
    behaviours: dict[CommandId, Behaviour]

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


class Clients:
    """All that clients do."""

    def __init__(self, world: ClientWorld) -> None:
        self._world = world
        self._commands = 0
        self.fails_next = False
        """Whether the next client is cut short somewhere."""
        self.doubles_next = False
        """Whether a command of the next client comes a second time later."""
        self.archives: dict[ApplicationId, Archive] = {}

    def start(
        self,
        application: ApplicationId,
        mode: Mode,
        tags: frozenset[str] = frozenset(),
        behaviour: Behaviour | None = None,
        parts: int = 1,
        anew: bool = True,
        requests: Requests | None = None,
        replicas: int = 1,
    ) -> None:
        """Write an archive and the command to start it; ``anew`` for an archive that is not there yet."""
        self._commands += 1
        command = f"c{self._commands}"
        archive = self.archives.get(application)
        if anew or archive is None:
            archive = Archive(f"sha{self._commands}", parts * PART_BYTES, parts)
        self.archives[application] = archive
        self._world.behaviours[command] = behaviour or Behaviour()
        values: list[tuple[str, Value]] = [
            (part_key(application, archive.sha256, n), Part(application, archive.sha256, n))
            for n in range(archive.parts)
        ]
        start = StartCommand(application, command, archive, mode, tags, requests, replicas)
        values.append((f"cmd:{application}", start))
        self._send(values)

    def start_without_parts(self, application: ApplicationId, mode: Mode) -> None:
        """Command the start of an archive that nobody has written."""
        self._commands += 1
        command, archive = f"c{self._commands}", Archive(f"sha{self._commands}", PART_BYTES, 1)
        self._world.behaviours[command] = Behaviour()
        self._world.oracle.refusable.add(command)
        start = StartCommand(application, command, archive, mode)
        self._send([(f"cmd:{application}", start)])

    def start_oversize(self, application: ApplicationId, mode: Mode) -> None:
        """Command the start of what does not fit."""
        self._world.oracle.refusable.add(f"c{self._commands + 1}")
        self._commands += 1
        command = f"c{self._commands}"
        archive = Archive(f"sha{self._commands}", _OVERSIZE_PARTS * PART_BYTES, 1)
        self._world.behaviours[command] = Behaviour()
        key = part_key(application, archive.sha256, 0)
        start = StartCommand(application, command, archive, mode)
        self._send([(key, Part(application, archive.sha256, 0)), (f"cmd:{application}", start)])

    def stop(self, application: ApplicationId) -> None:
        """Command a stop."""
        self._commands += 1
        self._send([(f"cmd:{application}", StopCommand(application, f"c{self._commands}"))])

    def scale(self, application: ApplicationId, replicas: int) -> None:
        """Command another number of replicas."""
        self._commands += 1
        scale = ScaleCommand(application, f"c{self._commands}", replicas)
        self._send([(f"scale:{application}", scale)])

    def cordon(self, worker: WorkerId, cordon: Cordon | None) -> None:
        """Cordon or drain a worker, or end both."""
        self._commands += 1
        self._send([(f"worker:{worker}", WorkerCommand(worker, f"c{self._commands}", cordon))])

    def bulk(self, application: ApplicationId) -> None:
        """Write an archive, and never start it."""
        self._commands += 1
        sha256 = f"sha{self._commands}"
        self._send(
            [(part_key(application, sha256, n), Part(application, sha256, n)) for n in range(_BULK_PARTS)]
        )

    def _send(self, values: list[tuple[str, Value]]) -> None:
        """Write one record after the other, each once the one before is there."""
        world = self._world
        if self.fails_next:
            self.fails_next = False
            values = values[: world.random.randrange(len(values) + 1)]
        doubled, self.doubles_next = self.doubles_next, False
        pending = list(values)

        def write_next() -> None:
            if not pending:
                return
            if world.broker.down:
                world.after(0.3, write_next)
                return
            key, value = pending.pop(0)
            self._append(key, value)
            if doubled and world.random.random() < 0.5:
                world.after(world.random.uniform(0.0, 2.0), lambda: self._append(key, value))
            world.after(world.latency(), write_next)

        world.after(world.latency(), write_next)

    def _append(self, key: str, value: Value) -> None:
        world = self._world
        record = world.broker.append(world.now, Write(world.broker.command, key, value, size_bytes(value)))
        if isinstance(value, Part):
            world.oracle.part_written(value)
        if isinstance(value, StopCommand | ScaleCommand | WorkerCommand):
            world.oracle.awaited(record.offset)
        if isinstance(value, WorkerCommand):
            world.oracle.cordoned(value)
            if world.trace:
                world.say("client", f"{record.offset}: {value.worker} is {value.cordon or 'uncordoned'}")
        if isinstance(value, ScaleCommand):
            world.oracle.scaled(value)
            if world.trace:
                world.say(
                    "client", f"{record.offset}: {value.application} is to have {value.replicas} replicas"
                )
        if isinstance(value, StartCommand | StopCommand):
            world.oracle.commanded(value, record.offset)
            if world.trace:
                world.say(
                    "client", f"{record.offset}: {type(value).__name__} {value.application} {value.command}"
                )


def awkward(world: ClientWorld) -> Behaviour:
    """How an application behaves that does not simply run."""
    random = world.random
    never = RestartPolicy(
        restart="never",
        max_restarts=POLICY.max_restarts,
        restart_window_s=POLICY.restart_window_s,
        stop_timeout_s=POLICY.stop_timeout_s,
    )
    return random.choice(
        (
            Behaviour(exits_after_s=0.5),
            Behaviour(policy=never, exits_after_s=3.0, code=0),
            Behaviour(ignores_sigterm=True),
            Behaviour(unusable=True),
        )
    )
