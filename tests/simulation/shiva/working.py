"""A worker's process: the machine, driven as production drives it, with files and processes beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from rebalanser.core.shiva.messages import (
    CaughtUp,
    DropFiles,
    ExtendDeadline,
    FilesFound,
    FilesRefused,
    FilesStored,
    Finished,
    PartRead,
    PingRead,
    RecordMetadata,
    Report,
    SendPong,
    StartProcess,
    Stop,
    StopProcess,
    StoreFiles,
    Unreadable,
    Wakeup,
    WorkerEffect,
    WorkerEvent,
)
from rebalanser.core.shiva.records import Ping, Pong
from rebalanser.core.shiva.types import Incarnation
from simulation.shiva.events import command_event, part_key, size_bytes
from simulation.shiva.faults import Fault
from simulation.shiva.log import Part, Poison, Record, Write
from simulation.shiva.process import AnyMachine, Feed, Process
from simulation.shiva.running import ApplicationProcess, RunJudge, RunningWorld

if TYPE_CHECKING:
    from rebalanser.core.shiva.messages import Fact
    from rebalanser.core.shiva.types import ApplicationId, CommandId, Epoch
    from rebalanser.core.shiva.worker import Worker

_AGAIN_S: Final = 0.5
"""Seconds until an archive that could not be fetched is asked for again."""


class WorkerJudge(RunJudge, Protocol):
    """Judges workers."""

    def acted(self, worker: WorkerProcess) -> None:
        """A worker has acted on what it has read."""

    def asked_to_start(self, worker: WorkerProcess, start: StartProcess) -> None:
        """A worker wants a process."""

    def asked_to_store(self, worker: WorkerProcess, store: StoreFiles) -> None:
        """A worker wants the files of an application."""

    def dropped(self, worker: WorkerProcess, application: ApplicationId, gone: set[str]) -> None:
        """A worker has removed files."""


class WorkerWorld(RunningWorld, Protocol):
    """The world of a worker."""

    @property
    def oracle(self) -> WorkerJudge:
        """Its judge."""

    def make_worker(self, process: WorkerProcess) -> Worker:
        """Return the machine of a new incarnation."""

    def report(self, process: Process, fact: Fact) -> None:
        """Take in a fact."""

    def exited(self, process: Process) -> None:
        """A process has stopped gracefully."""


class WorkerProcess(Process):
    """One incarnation of a worker from its start to its end."""

    world: WorkerWorld
    role = "worker"

    def __init__(self, world: WorkerWorld, host: AnyMachine) -> None:
        super().__init__(world, host)
        host.incarnations += 1
        assert host.plan.worker is not None
        self.id = host.plan.worker
        self.incarnation = Incarnation(host.lineage, host.incarnations)
        self.capacity = host.plan.capacity(self.incarnation.number)
        self.machine = world.make_worker(self)
        self.processes: dict[int, ApplicationProcess] = {}
        """By run number: what was started and has not ended."""
        self.stored: dict[tuple[ApplicationId, CommandId], str] = {}
        """The sha256 of what it has stored for each command."""
        self.highest: Epoch | None = None
        """The greatest epoch that it has acted on."""
        self.stopping = False
        self.was_known = False
        """Whether a document knew it."""
        self._parts: dict[str, int] = {}
        """The offset of each part on COMMAND."""
        self._position = 0

    def begin(self) -> None:
        """Read COMMAND from its first record, and CONTROL from its end."""
        broker = self.world.broker
        end = broker.command.stable_end
        told = [False]

        def caught_up(position: int) -> None:
            self._position = position
            if position >= end and not told[0]:
                told[0] = True
                self.take(FilesFound(frozenset(application for application, _ in self.host.files)))
                self.take(CaughtUp())

        Feed(self, broker.command, 0, self._command_record, at_position=caught_up).wake()
        Feed(self, broker.control, broker.control.end, self._control_record, "pi").wake()

    def ask_stop(self) -> None:
        """Stop gracefully."""
        self.stopping = True
        self.take(Stop())

    def take(self, event: WorkerEvent) -> None:
        """Tell the machine, and do what it wants."""
        if not self.alive:
            return
        for effect in self.machine.handle(event, self.now):
            self._carry_out(effect)
            if not self.alive:
                return
        self.world.oracle.acted(self)
        self.arm(self.machine.next_wakeup)

    def wakeup(self) -> None:
        """The machine's time has come."""
        self.take(Wakeup())

    def _command_record(self, record: Record) -> None:
        event = command_event(record)
        if event is None:
            return
        if isinstance(event, PartRead):
            self._parts.pop(record.key, None)
            if isinstance(record.value, Part):
                self._parts[record.key] = record.offset
        self.take(event)

    def _control_record(self, record: Record) -> None:
        match record.value:
            case Ping() as ping:
                self.take(PingRead(ping))
            case Poison(reason):
                at = RecordMetadata(record.offset, record.timestamp_ms, record.size_bytes)
                self.take(Unreadable(at, record.key, reason, on_control=True))

    def _carry_out(self, effect: WorkerEffect) -> None:
        match effect:
            case Report(fact):
                self.world.report(self, fact)
            case StoreFiles():
                self.world.oracle.asked_to_store(self, effect)
                self._store(effect)
            case DropFiles():
                self._drop(effect)
            case SendPong(pong):
                self._send(pong)
            case Finished():
                self.world.exited(self)
            case _:
                self._supervise(effect)

    def _supervise(self, effect: StartProcess | StopProcess | ExtendDeadline) -> None:
        match effect:
            case StartProcess():
                self.world.oracle.asked_to_start(self, effect)
                process = self.processes[effect.run] = ApplicationProcess(self, effect)
                process.spawn()
            case StopProcess(run=run):
                if run in self.processes:
                    self.processes[run].stop()
            case ExtendDeadline(runs, deadline):
                for run in sorted(set(runs.values()) & set(self.processes)):
                    self.processes[run].extend(deadline)

    def _store(self, effect: StoreFiles) -> None:
        world, archive = self.world, effect.archive
        behaviour = world.behaviours[effect.command]
        takes_s = 0.01 + 0.1 * world.random.random()
        if self.host.strikes(Fault.FILES_SLOW):
            takes_s += world.random.uniform(0.5, 6.0)
        files = effect.application, archive.sha256
        reason = ""
        if behaviour.unusable:
            reason = "its manifest cannot be read"
        elif self.host.strikes(Fault.FILES_REFUSED):
            reason = "no space left on device"

        def answer() -> None:
            if reason:
                self.take(FilesRefused(effect.application, effect.command, reason))
            else:
                self.host.files.add(files)
                self.stored[effect.application, effect.command] = archive.sha256
                self.take(FilesStored(effect.application, effect.command, behaviour.policy))

        def fetch(read_to: int | None = None) -> None:
            """Fetch it; what is missing may be behind what was read, up to ``read_to``."""
            if files in self.host.files or self._are_there(effect):
                answer()
            elif self.is_cut_off or (read_to is not None and self._position < read_to):
                self.later(_AGAIN_S, "files", lambda: fetch(read_to))
            elif read_to is None:
                end = world.broker.command.stable_end
                self.later(_AGAIN_S, "files", lambda: fetch(end))
            else:
                missing = "a part of its archive is missing"
                self.take(FilesRefused(effect.application, effect.command, missing))

        self.later(takes_s, "files", fetch)

    def _are_there(self, store: StoreFiles) -> bool:
        """True if the broker can be reached and has all parts where they were read last."""
        archive, command = store.archive, self.world.broker.command
        keys = [part_key(store.application, archive.sha256, number) for number in range(archive.parts)]
        offsets = [self._parts.get(key) for key in keys]
        there = {record.offset for record in command.records}
        return not self.is_cut_off and all(offset in there for offset in offsets)

    def _drop(self, effect: DropFiles) -> None:
        self.stored.pop((effect.application, effect.command), None)
        others = {sha256 for (a, _), sha256 in self.stored.items() if a == effect.application}
        gone = {sha256 for a, sha256 in self.host.files if a == effect.application} - others
        self.host.files -= {(effect.application, sha256) for sha256 in gone}
        self.world.oracle.dropped(self, effect.application, gone)

    def _send(self, pong: Pong) -> None:
        world = self.world
        control = world.broker.control
        write = Write(control, f"pong:{pong.worker}", pong, size_bytes(pong))
        if self.host.strikes(Fault.PAUSE_AT_PONG, told=False):
            world.pause(self.host, world.random.uniform(1.0, 15.0), Fault.PAUSE_AT_PONG)
        times = 2 if self.host.strikes(Fault.DUPLICATE) else 1
        for _ in range(times):
            self.request(
                lambda: world.broker.append(world.now, write), lambda _: None, lambda _: None, channel="pongs"
            )

    def end(self) -> None:
        """The process is no more; its shim ends what it ran."""
        super().end()
        for process in list(self.processes.values()):
            process.orphaned()
