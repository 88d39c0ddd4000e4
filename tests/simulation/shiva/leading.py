"""A leader's process: the machine, driven as production drives it, over the simulated broker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.leader import Leader
from rebalanser.core.shiva.messages import (
    CaughtUp,
    Deposed,
    DropRecords,
    KeepCommands,
    Kept,
    LeaderEffect,
    LeaderEvent,
    PartRead,
    PongRead,
    PublishDocument,
    Published,
    RecordMetadata,
    Report,
    SendPing,
    StepDown,
    Stop,
    TookOver,
    Unreadable,
    Wakeup,
)
from rebalanser.core.shiva.records import AssignmentDocument, LeaderAnnouncement, Pong
from simulation.shiva.events import command_event, part_key, size_bytes
from simulation.shiva.faults import Fault
from simulation.shiva.log import Fenced, Part, Poison, Record, Transaction, Write
from simulation.shiva.process import AnyMachine, Feed, Process, ProcessWorld

if TYPE_CHECKING:
    from rebalanser.core.shiva.messages import Fact
    from rebalanser.core.shiva.types import ApplicationId, Archive
    from simulation.shiva.group import LeaderGroup
    from simulation.shiva.log import Topic, Value

_REJOINS_AFTER_S = 0.4
TakenOver: TypeAlias = tuple[DocumentChain, tuple[Pong, ...], int, int]
"""The documents on ASSIGNEMENT, the last pongs, and the ends of COMMAND and CONTROL."""


@dataclass(frozen=True, slots=True)
class Work:
    """One transaction that the machine asked for."""

    writes: tuple[Write, ...]
    done: Callable[[list[Record]], None]
    commits_offset: bool = False


class LeaderJudge(Protocol):
    """Judges leaders."""

    def took_over(self, leader: LeaderProcess) -> None:
        """A leader has begun its term."""

    def committed(self, leader: LeaderProcess, records: list[Record]) -> None:
        """A leader's transaction is committed."""

    def drops_archives(self, archives: Iterable[tuple[ApplicationId, Archive]], read_to: int) -> None:
        """A leader drops archives."""

    def archives_dropped(self, archives: Iterable[tuple[ApplicationId, Archive]]) -> None:
        """The tombstones of archives are on COMMAND."""


class LeaderWorld(ProcessWorld, Protocol):
    """The world of a leader."""

    group: LeaderGroup[LeaderProcess]
    kept: int

    @property
    def oracle(self) -> LeaderJudge:
        """Its judge."""
        ...

    def make_leader(self, name: str) -> Leader:
        """Return the machine of a new term."""
        ...

    def group_allows(self, generation: int | None) -> bool:
        """True if offsets may be committed in this generation."""
        ...

    def last_document(self) -> DocumentChain:
        """Return all of ASSIGNEMENT, put together."""
        ...

    def leader_announced(self) -> None:
        """A leader has announced itself."""

    def lose_change(self, records: Sequence[Record]) -> None:
        """Drop a document or change, if one is to be lost."""

    def report(self, process: Process, fact: Fact) -> None:
        """Take in a fact."""

    def exited(self, process: Process) -> None:
        """A process has stopped gracefully."""


class LeaderProcess(Process):
    """Takes part in the group of leaders from its start to its end."""

    world: LeaderWorld
    role = "leader"

    def __init__(self, world: LeaderWorld, host: AnyMachine) -> None:
        super().__init__(world, host)
        self.machine: Leader | None = None
        self.term = -1
        self.stopping = False
        self._generation: int | None = None
        self._epoch = 0
        self._work: deque[Work] = deque()
        self._busy = False
        self._attempt = 0
        self._parts: dict[str, Part] = {}
        self._read_to = -1
        """The offset of the last record of COMMAND that was read."""
        self._control_position = 0
        self._stop_at: int | None = None

    @property
    def leads(self) -> bool:
        """Whether its machine has caught up and leads, as far as it knows."""
        return self.alive and self.machine is not None and self.machine.leads

    def begin(self) -> None:
        """Join the group."""
        self.world.group.join(self)

    def ask_stop(self) -> None:
        """Stop gracefully, once CONTROL is read to its present end."""
        self.stopping = True
        if self.machine is None:
            self._leave("asked to stop")
            return
        machine, broker = self.machine, self.world.broker

        def read_to(end: int) -> None:
            if self.machine is machine:
                self._stop_at = end
                self._control_read(self._control_position)

        def failed(reason: str) -> None:
            if self.machine is machine:
                self.take(Deposed(f"the end of CONTROL is not known: {reason}"))

        self.request(lambda: broker.control.end, read_to, failed)

    def _control_read(self, position: int) -> None:
        self._control_position = position
        if self._stop_at is not None and position >= self._stop_at:
            self._stop_at = None
            self.take(Stop())

    def assigned(self, generation: int) -> None:
        """The group gives it the partition: fence, announce, read, lead."""
        if not self.world.group.is_current(generation) and self.world.random.random() < 0.5:
            return
        if self._generation is not None:
            self.lost(self._generation)
            return
        self._generation = generation
        attempt = self._attempt = self._attempt + 1
        broker = self.world.broker

        def unless_over(action: Callable[[], None]) -> None:
            if self.alive and attempt == self._attempt and self.machine is None:
                action()

        def failed(reason: str) -> None:
            unless_over(lambda: self._leave(f"cannot take over: {reason}"))

        def fenced(epoch: int) -> None:
            self._epoch = epoch
            write = self._write(broker.command, "leader", LeaderAnnouncement(self.host.plan.name))
            unless_over(lambda: self._transact(Work((write,), announced), failed))

        def announced(records: list[Record]) -> None:
            self.term = records[0].offset
            self.world.leader_announced()
            unless_over(lambda: self.request(last_document, read, failed))

        def last_document() -> TakenOver:
            chain = self.world.last_document()
            last = {record.key: record.value for record in broker.control.read(0)[0]}
            pongs = tuple(value for value in last.values() if isinstance(value, Pong))
            return chain, pongs, broker.command.stable_end, broker.control.end

        def read(answer: TakenOver) -> None:
            unless_over(lambda: self._take_over(*answer))

        self.request(broker.begin_producer, fenced, failed)

    def _take_over(self, chain: DocumentChain, pongs: tuple[Pong, ...], end: int, control_end: int) -> None:
        self.machine = self.world.make_leader(self.host.plan.name)
        self.world.oracle.took_over(self)
        self._stop_at, self._control_position, self._read_to = None, control_end, -1
        document = None if chain.missed else chain.document
        self.take(TookOver(self.term, document, pongs, chain.missed))
        broker = self.world.broker
        told = [False]

        def caught_up(position: int) -> None:
            if position >= end and not told[0]:
                told[0] = True
                self.take(CaughtUp())

        if self.machine is not None:
            Feed(self, broker.command, 0, self._command_record, at_position=caught_up).wake()
            Feed(
                self, broker.control, control_end, self._control_record, "p", at_position=self._control_read
            ).wake()

    def lost(self, generation: int) -> None:
        """The group says that the partition is somebody else's."""
        if self._generation is None or generation < self._generation:
            return
        if self.machine is not None:
            self.take(Deposed("the group gave the partition to another leader"))
        else:
            self._leave("lost the partition while taking over")

    def expelled(self) -> None:
        """The group says that its session had ended."""
        if self.machine is not None:
            self.take(Deposed("its session in the group of leaders had ended"))
        elif not self.stopping:
            self._leave("its session in the group of leaders had ended")

    def take(self, event: LeaderEvent) -> None:
        """Tell the machine, and do what it wants."""
        machine = self.machine
        if machine is None or not self.alive:
            return
        effects = machine.handle(event, self.now, int(self.world.now * 1000))
        for effect in effects:
            self._carry_out(effect)
        if self.machine is machine:
            self.arm(machine.next_wakeup)
            self._work_on()

    def wakeup(self) -> None:
        """The machine's time has come."""
        self.take(Wakeup())

    def _command_record(self, record: Record) -> None:
        self._read_to = record.offset
        if isinstance(record.value, Part):
            self._parts[record.key] = record.value
        event = command_event(record)
        if event is not None:
            if isinstance(event, PartRead) and not event.at.size_bytes:
                self._parts.pop(record.key, None)
            self.take(event)

    def _control_record(self, record: Record) -> None:
        match record.value:
            case Pong() as pong:
                self.take(PongRead(pong))
            case Poison(reason):
                at = RecordMetadata(record.offset, record.timestamp_ms, record.size_bytes)
                self.take(Unreadable(at, record.key, reason, on_control=True))

    def _write(self, topic: Topic, key: str, value: Value) -> Write:
        return Write(topic, key, value, size_bytes(value))

    def _carry_out(self, effect: LeaderEffect) -> None:
        broker = self.world.broker
        match effect:
            case Report(fact):
                self.world.report(self, fact)
            case StepDown(reason):
                self._leave(reason)
            case SendPing(ping):
                self._work.append(Work((self._write(broker.control, "ping", ping),), lambda _: None))
            case PublishDocument(document, change):
                key = "assignement" if change is None else change.key
                writes = [
                    self._write(topic, key, change or document)
                    for topic in (broker.command, broker.assignement)
                ]
                self._work.append(
                    Work(tuple(writes), lambda records: self._published(document, records), True)
                )
            case KeepCommands():
                self._keep(effect)
            case DropRecords(kept, archives):
                keys = [f"keep:{application}" for application in sorted(kept)]
                keys += [
                    part_key(application, archive.sha256, number)
                    for application, archive in sorted(archives, key=str)
                    for number in range(archive.parts)
                ]
                writes = [self._write(broker.command, key, None) for key in keys]
                self.world.oracle.drops_archives(archives, self._read_to)
                self._work.append(Work(tuple(writes), lambda _: self.world.oracle.archives_dropped(archives)))

    def _published(self, document: AssignmentDocument, records: list[Record]) -> None:
        self.world.say(self.name, f"document {document.epoch} stands at {records[0].offset}")
        self.take(Published(records[0].offset))

    def _keep(self, effect: KeepCommands) -> None:
        command = self.world.broker.command
        writes: list[Write] = []
        for kept in effect.commands:
            start = kept.start
            for number in range(start.archive.parts):
                key = part_key(start.application, start.archive.sha256, number)
                if key in self._parts:
                    writes.append(self._write(command, key, self._parts[key]))
            writes.append(self._write(command, f"keep:{start.application}", kept))

        def done(records: list[Record]) -> None:
            at = {
                kept.start.application: RecordMetadata(record.offset, record.timestamp_ms, record.size_bytes)
                for kept in effect.commands
                for record in records
                if record.key == f"keep:{kept.start.application}"
            }
            self.world.kept += 1
            self.take(Kept(at))

        self._work.append(Work(tuple(writes), done))

    def _work_on(self) -> None:
        if self._busy or not self._work or self.machine is None:
            return
        self._busy = True
        machine = self.machine
        work = self._work.popleft()

        def committed(records: list[Record]) -> None:
            if self.machine is machine:
                self._busy = False
                work.done(records)
                self._work_on()

        def failed(reason: str) -> None:
            if self.machine is machine:
                self.take(Deposed(f"a transaction failed: {reason}"))

        self._transact(Work(work.writes, committed, work.commits_offset), failed)

    def _transact(self, work: Work, failed: Callable[[str], None]) -> None:
        world, broker = self.world, self.world.broker
        generation = self._generation

        def write() -> tuple[Transaction, list[Record]]:
            if work.commits_offset and not world.group_allows(generation):
                raise Fenced
            return broker.write(world.now, self._epoch, work.writes)

        def written(answer: tuple[Transaction, list[Record]]) -> None:
            transaction, records = answer
            if self.host.strikes(Fault.COMMIT_LOST):
                self.later(
                    world.scenario.request_timeout_s, "replies", lambda: failed("no answer to a commit")
                )
                return

            def commit() -> Sequence[Record]:
                broker.commit(transaction)
                world.oracle.committed(self, records)
                world.lose_change(records[:1])
                return records

            self.request(commit, lambda _: work.done(records), failed)

        self.request(write, written, failed)

    def _leave(self, reason: str) -> None:
        """Lead no more; be there for another term soon."""
        self.say(f"leads no more: {reason}")
        self.machine = None
        self._generation = None
        self._attempt += 1
        self._work.clear()
        self._busy = False
        self._parts.clear()
        self._armed = None
        self._timer += 1
        self.close_feeds()
        self.world.group.leave(self)
        if self.stopping:
            self.world.exited(self)
        else:
            self.later(
                _REJOINS_AFTER_S * (0.5 + self.world.random.random()),
                "group",
                lambda: self.world.group.join(self),
            )

    def end(self) -> None:
        """The process is no more."""
        super().end()
        self.machine = None
