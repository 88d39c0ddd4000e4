"""A worker on Kafka: follows COMMAND and CONTROL, and carries out the effects of the state machine.

Threads: the loop owns the state machine and never blocks. One thread follows each of the two topics. A few
fetch, store and remove files, in order within each application. Each process reports its end from its own
thread.

Of archives on COMMAND the loop notes only the offsets. A thread reads an archive from there once an
assignment names this worker for its application (SH-4).
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, assert_never

from rebalanser.core.shiva.messages import (
    CaughtUp,
    ChangeRead,
    CommandEvent,
    DocumentRead,
    DropFiles,
    ExtendDeadline,
    Fact,
    FilesFound,
    FilesRefused,
    FilesStored,
    Finished,
    HealthChecked,
    PartRead,
    PingRead,
    ProcessExited,
    ProcessStarted,
    RecordMetadata,
    Report,
    SendPong,
    StartProcess,
    StartRead,
    Stop,
    StopProcess,
    StopRead,
    StoreFiles,
    Unreadable,
    Wakeup,
    WorkerEffect,
    WorkerEvent,
)
from rebalanser.core.shiva.records import (
    KeptCommand,
    OutputAnswer,
    OutputRequest,
    Ping,
    Pong,
    Progress,
    StartCommand,
)
from rebalanser.core.shiva.types import ApplicationEntry, ApplicationId, ApplicationState, CommandId, WorkerId
from rebalanser.core.shiva.worker import Worker
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import (
    InternalError,
    InvalidArchive,
    InvalidManifest,
    RebalanserError,
    RegistryUnavailable,
)
from rebalanser.history import HistorySink
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.logs import get_logger
from rebalanser.shiva.cluster import TopicNames
from rebalanser.shiva.data_folder import DataFolder, folder_name
from rebalanser.shiva.manifest import Manifest
from rebalanser.shiva.processes import ApplicationProcesses
from rebalanser_kafka.connection import Connection, patiently
from rebalanser_kafka.log import LogReader, LogRecord, LogWriter
from rebalanser_kafka.shiva.decoding import ReplayedCommands, control_record, output_request
from rebalanser_kafka.shiva.facts import FactWriter
from rebalanser_kafka.shiva.follower import LagGroup, ReadBatch, TopicFollower, TopicLost
from rebalanser_kafka.shiva.outputs import OutputServer
from rebalanser_kafka.shiva.parts import ArchiveReader, FileThreads, PartIndex, PartsMissing
from rebalanser_kafka.shiva.throttled_warning import ThrottledWarning
from rebalanser_kafka.shiva.wire import PartKey, encode, key_of

OUTPUTS: Final = ""
"""Name for the folder of outputs, among those of applications, in jobs on files."""
LOOK_AT_CLOCK_S: Final = 0.5
LOOK_S: Final = 2.0
"""Seconds for a request of a topic's end."""
LAST_PONG_S: Final = 2.0
"""Seconds that a worker that stops waits for the acknowledgement of its last pong."""
PONG_TIMEOUT_S: Final = 30.0
READ_AHEAD_BYTES: Final = 64 * 1024
"""Bytes of an archive that are fetched at a time: little beyond its end is fetched."""
FETCH_AGAIN_S: Final = 1.0
"""Seconds until reading an archive is retried after the broker failed."""

_log = get_logger("rebalanser.shiva")


@dataclass(frozen=True, slots=True)
class _Lacking:
    """An archive that could not be fetched; it is retried from ``again_at`` on (monotonic seconds).

    If compaction removed parts because the leader had written them again, the new ones are before ``end``. It
    is None if the broker did not answer.
    """

    store: StoreFiles
    end: int | None
    again_at: float


_Told: TypeAlias = FilesStored | FilesRefused | ProcessStarted | ProcessExited | HealthChecked | Stop
_Item: TypeAlias = ReadBatch | TopicLost | _Lacking | _Told


class KafkaWorker:
    """Stores and runs applications until it is stopped. Made by ``KafkaShivaCluster.run_worker``."""

    def __init__(
        self,
        connection: Connection,
        topics: TopicNames,
        worker: WorkerId,
        folder: Path,
        options: WorkerOptions,
        timeout_s: float,
        history: HistorySink | None = None,
    ) -> None:
        """Lock and clean the folder, and read COMMAND's present end.

        Its process has the folder's lineage and incarnation in the history, which are never used again.

        Raises:
            UnusableFolder: another worker uses the folder, or it cannot be written.
            RegistryUnavailable: the broker did not answer within ``timeout_s`` seconds.
        """
        self._connection = connection
        self._topics = topics
        self._worker = worker
        self._clock = SystemClock()
        with LogReader(connection, topics.command, "earliest") as reader:
            self._caught_up_at: int | None = patiently(reader.end_offset, timeout_s)
        self._data = DataFolder.open(folder)
        known = self._data.incarnation
        self._machine = Worker(worker, known, socket.gethostname(), options)
        self._incarnation = known.number
        self._node = f"{worker}-{known.lineage}-{known.number}"
        self._facts = FactWriter(connection.cluster, self._node, worker, history, self._clock)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._processes = ApplicationProcesses(self._data, worker, self._items.put)
        self._index = PartIndex()
        self._archives = ArchiveReader(self._open_command, self._index)
        self._files = FileThreads(f"rebalanser-files-{worker}")
        self._mentioned: set[ApplicationId] = set()
        self._stopped_at: dict[ApplicationId, int] = {}
        """Offset of the last stop read while COMMAND is replayed."""
        self._keeping: set[ApplicationId] = set()
        """Applications stopped while this worker was away, whose data is kept."""
        self._replayed = ReplayedCommands()
        self._position = 0
        self._lacking: list[_Lacking] = []
        self._manifests: dict[ApplicationId, dict[CommandId, tuple[str, Manifest]]] = {}
        self._writer = LogWriter(connection, delivery_timeout_s=PONG_TIMEOUT_S)
        self._outputs = OutputServer(worker, self._data.path, self._send_output)
        self._pongs = ThrottledWarning("pong_not_written", {"cluster": connection.cluster, "worker": worker})
        self._failure: RebalanserError | None = None
        lag = LagGroup(connection, f"worker:{worker}")
        self._followers = [
            TopicFollower(connection, topics.control, "latest", self._items.put, lag),
            TopicFollower(connection, topics.command, "earliest", self._items.put, lag),
        ]
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-worker-{worker}", daemon=True)

    def begin(self) -> None:
        """Start the threads."""
        self._thread.start()

    def stop(self) -> None:
        """Request a graceful stop, from any thread; returns at once."""
        self._items.put(Stop())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; True if it has. Raise the error that ended it, unless ``stop`` did."""
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def _run(self) -> None:
        try:
            for follower in self._followers:
                follower.begin()
            while not self._machine.finished:
                self._step()
        except RebalanserError as error:
            self._failure = error
        except Exception as error:
            _log.exception("the worker stopped on an unexpected error", action="worker_failed")
            self._failure = InternalError(f"{type(error).__name__}: {error}")
        finally:
            self._close()

    def _close(self) -> None:
        """End everything, whatever the reason: the processes first, the folder's lock last."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._facts.close)
            closing.callback(self._data.close)
            closing.callback(self._writer.close, LAST_PONG_S)
            closing.callback(self._outputs.close)
            closing.callback(self._files.close)
            closing.callback(self._archives.close)
            for follower in self._followers:
                closing.callback(follower.close)
            closing.callback(self._tell_exits)
            closing.callback(self._processes.close)

    def _tell_exits(self) -> None:
        """Report processes that ended with the worker, as the machine gets no more events."""
        for fact in self._machine.exits("the worker ended, and everything that it ran"):
            self._tell(fact)

    def _tell(self, fact: Fact) -> None:
        self._facts.tell(fact, self._node, self._incarnation)

    def _step(self) -> None:
        wakeup = self._machine.next_wakeup
        patience_s = LOOK_AT_CLOCK_S
        if wakeup is not None:
            patience_s = min(patience_s, max(0.0, wakeup - self._clock.now()))
        item: _Item | None = None
        with contextlib.suppress(queue.Empty):
            item = self._items.get(timeout=patience_s)
        match item:
            case ReadBatch():
                self._take(item)
            case TopicLost(error=error):
                raise error
            case _Lacking():
                self._lacking.append(item)
            case None:
                pass
            case _:
                self._handle(item)
        if self._lacking:
            self._store_lacking()
        wakeup = self._machine.next_wakeup
        if wakeup is not None and self._clock.now() >= wakeup:
            self._handle(Wakeup())

    def _take(self, batch: ReadBatch) -> None:
        if batch.topic == self._topics.control:
            for record in batch.records:
                self._take_control(record)
            batch.taken.set()
            return
        for record in batch.records:
            self._take_command(record)
        self._note_position(batch.position)
        self._position = batch.position
        self._files.when_room(batch.taken.set)

    def _in_files(self, application: ApplicationId, work: Callable[[], None]) -> None:
        """Run a job on an application's files after its earlier ones."""
        self._files.submit(folder_name(str(application.whole)), work)

    def _store_lacking(self) -> None:
        """Retry archives that could not be fetched, once COMMAND was read as far as their parts can be."""
        lacking, self._lacking = self._lacking, []
        now = self._clock.now()
        for each in lacking:
            if (each.end is None or each.end <= self._position) and each.again_at <= now:
                store = partial(self._store, each.store, last_try=each.end is not None)
                self._in_files(each.store.application, store)
            else:
                self._lacking.append(each)

    def _take_control(self, record: LogRecord) -> None:
        match control_record(record):
            case Ping() as ping:
                self._handle(PingRead(ping))
            case Unreadable() as unreadable:
                self._handle(unreadable)

    def _take_command(self, record: LogRecord) -> None:
        self._note_position(record.offset)
        request = output_request(record) if self._caught_up_at is None else None
        if request is not None and request.worker == self._worker:
            self._take_request(request)
        for event in self._replayed.events(record):
            if isinstance(event, PartRead):
                key = PartKey(event.application, event.sha256, event.number)
                self._index.note(key, None if record.value is None else record.offset)
            if self._caught_up_at is not None:
                self._note_mentioned(event)
            self._handle(event)

    def _take_request(self, request: OutputRequest) -> None:
        if request.follow_s > 0:
            self._outputs.follow(request)
        else:
            self._in_files(request.application, partial(self._outputs.answer, request))

    def _send_output(self, answer: OutputAnswer) -> None:
        with contextlib.suppress(RebalanserError):
            self._writer.append(
                self._topics.control, key_of(answer).encode(), encode(answer), on_done=lambda _answer: None
            )

    def _note_mentioned(self, event: CommandEvent) -> None:
        """Note the applications that COMMAND still has: all other files are leftovers.

        A document may come late: its applications count as of its offset.
        """
        match event:
            case StartRead(record=KeptCommand(start=start)) | StartRead(record=StartCommand() as start):
                self._mentioned.add(start.application)
            case StopRead(at=at, record=stop):
                self._mentioned.discard(stop.application)
                self._stopped_at[stop.application] = at.offset
                (self._keeping.add if stop.keep_data else self._keeping.discard)(stop.application)
            case DocumentRead(at=at, record=document):
                self._note_entries(at, document.applications)
            case ChangeRead(at=at, record=change):
                self._note_entries(at, {**change.applications, **change.progress})

    def _note_entries(
        self, at: RecordMetadata, entries: Mapping[ApplicationId, ApplicationEntry | Progress | None]
    ) -> None:
        self._mentioned.update(
            application.whole
            for application, entry in entries.items()
            if entry is not None
            and entry.state is not ApplicationState.STOPPING
            and self._stopped_at.get(application.whole, -1) < at.offset
        )

    def _note_position(self, position: int) -> None:
        if self._caught_up_at is not None and position >= self._caught_up_at:
            for event in self._replayed.end():
                self._note_mentioned(event)
                self._handle(event)
            self._caught_up_at = None
            for application in self._keeping - self._mentioned:
                self._in_files(application, partial(self._keep_data, application))
            for folder in self._leftovers():
                self._files.submit(folder, partial(self._drop_leftover, folder))
            self._files.submit(OUTPUTS, self._forget_old_output)
            self._handle(FilesFound(self._data.found(self._mentioned)))
            self._mentioned, self._keeping, self._stopped_at = set(), set(), {}
            self._handle(CaughtUp())

    def _leftovers(self) -> frozenset[str]:
        """Return the folders of applications that COMMAND does not have any more.

        A finished application may be in a document only. If the newest document is not known, only stopped
        applications are known to be over: retention may have dropped the whole document and none of its
        changes.
        """
        leftovers = self._data.leftovers(self._mentioned | self._keeping)
        if self._machine.knows_assignment:
            return leftovers
        return leftovers & {folder_name(str(application)) for application in self._stopped_at}

    def _keep_data(self, application: ApplicationId) -> None:
        try:
            self._data.drop(application, keep_data=True)
        except OSError as error:
            _log.error(
                f"files could not be removed: {error}",
                action="files_not_removed",
                application=str(application),
            )

    def _drop_leftover(self, folder: str) -> None:
        try:
            self._data.drop_leftover(folder)
        except OSError as error:
            _log.error(
                f"files of an application that is not there any more could not be removed: {error}",
                action="files_not_removed",
            )

    def _forget_old_output(self) -> None:
        try:
            self._data.forget_old_output()
        except OSError as error:
            _log.error(f"old output could not be removed: {error}", action="files_not_removed")

    def _handle(self, event: WorkerEvent) -> None:
        for effect in self._machine.handle(event, self._clock.now()):
            self._perform(effect)

    def _perform(self, effect: WorkerEffect) -> None:
        match effect:
            case StoreFiles():
                self._in_files(effect.application, partial(self._store, effect))
            case DropFiles():
                self._in_files(effect.application, partial(self._drop, effect))
            case StartProcess():
                self._start(effect)
            case StopProcess(application=application, run=run):
                self._processes.stop(application, run)
            case ExtendDeadline(runs=runs, deadline=deadline):
                for application, run in runs.items():
                    self._processes.extend(application, run, deadline)
            case SendPong(pong=pong):
                self._send(pong)
            case Report(fact=fact):
                self._tell(fact)
            case Finished():
                pass
            case _:
                assert_never(effect)

    def _send(self, pong: Pong) -> None:
        try:
            self._writer.append(
                self._topics.control, key_of(pong).encode(), encode(pong), on_done=self._note_pong
            )
        except RebalanserError as error:
            self._note_pong(error)

    def _note_pong(self, answer: int | RebalanserError) -> None:
        if isinstance(answer, RebalanserError):
            self._pongs.failed(f"a pong was not written: {answer}")
        else:
            self._pongs.works("pongs are written again")

    def _start(self, start: StartProcess) -> None:
        sha256, manifest = self._manifests[start.application.whole][start.command]
        self._processes.start(
            start.application,
            start.run,
            self._data.files_of(start.application, sha256),
            manifest,
            start.token,
            start.deadline,
            replicas=start.replicas,
        )

    def _store(self, store: StoreFiles, *, last_try: bool = False) -> None:
        """Store files, in a thread for files; those that are there already are used."""
        application, command, sha256 = store.application, store.command, store.archive.sha256
        try:
            manifest = self._data.stored_manifest(application, sha256)
            if manifest is None:
                archive = self._archives.read(application, store.archive)
                manifest = self._data.unpack(application, archive, sha256)
        except PartsMissing as error:
            refused = FilesRefused(application, command, str(error))
            self._items.put(refused if last_try else self._lacking_of(store))
            return
        except RegistryUnavailable as error:
            _log.warning(
                f"the archive cannot be read now: {error}",
                action="archive_unreadable",
                application=str(application),
            )
            self._items.put(_Lacking(store, None, self._clock.now() + FETCH_AGAIN_S))
            return
        except (InvalidArchive, InvalidManifest, OSError) as error:
            self._items.put(FilesRefused(application, command, str(error)))
            return
        except Exception as error:
            _log.exception(
                "files could not be stored", action="files_not_stored", application=str(application)
            )
            self._items.put(FilesRefused(application, command, f"{type(error).__name__}: {error}"))
            return
        self._manifests.setdefault(application, {})[command] = sha256, manifest
        self._items.put(FilesStored(application, command, manifest.as_policy()))

    def _open_command(self, offset: int) -> LogReader:
        return LogReader(self._connection, self._topics.command, offset, read_ahead_bytes=READ_AHEAD_BYTES)

    def _lacking_of(self, store: StoreFiles) -> _Lacking:
        """Retry once COMMAND was read to its present end, or soon if the broker does not answer."""
        try:
            with LogReader(self._connection, self._topics.command, "earliest") as reader:
                return _Lacking(store, reader.end_offset(LOOK_S), self._clock.now())
        except RegistryUnavailable:
            return _Lacking(store, None, self._clock.now() + FETCH_AGAIN_S)

    def _drop(self, dropped: DropFiles) -> None:
        application = dropped.application
        manifests = self._manifests.get(application, {})
        manifests.pop(dropped.command, None)
        others = {sha256 for sha256, _ in manifests.values()}
        if not manifests:
            self._manifests.pop(application, None)
        try:
            if dropped.stays or others:
                self._data.drop_files(application, others)
            elif self._data.drop(application, keep_data=dropped.keep_data):
                self._files.submit(OUTPUTS, self._forget_old_output)
        except OSError as error:
            _log.error(
                f"files could not be removed: {error}",
                action="files_not_removed",
                application=str(application),
            )
