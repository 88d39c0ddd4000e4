"""Shiva's benchmarks, on a broker of their own or the one that KAFKA names. Nothing is asserted here."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from rebalanser.core.shiva.changes import change_between
from rebalanser.core.shiva.leader import Leader
from rebalanser.core.shiva.messages import (
    CaughtUp,
    LeaderEvent,
    PartRead,
    PongRead,
    PublishDocument,
    Published,
    RecordMetadata,
    SendPing,
    SendPong,
    StartRead,
    TookOver,
    Wakeup,
)
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    LeaderAnnouncement,
    Pong,
    RunReport,
    StartCommand,
)
from rebalanser.core.shiva.runs import Run
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Incarnation,
    Mode,
    RunState,
    WorkerEntry,
)
from rebalanser.core.shiva.worker import Worker
from rebalanser.errors import RegistryRefused
from rebalanser.registry.urls import parse_url
from rebalanser.shiva import Cluster, TopicNames, open_cluster, status_of
from rebalanser.testing.kafka_server import KafkaCluster, addresses_from_environment
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.log import NewRecord, TransactionalWriter
from rebalanser_kafka.records import LogRecord
from rebalanser_kafka.shiva.decoding import RECORD_OVERHEAD_BYTES, ReplayedCommands
from rebalanser_kafka.shiva.last_records import newest
from rebalanser_kafka.shiva.topics import MAX_MESSAGE_BYTES, ensure
from rebalanser_kafka.shiva.wire import PartKey, encode, key_of

SHIVA = (sys.executable, "-m", "rebalanser", "shiva")
WORKERS = ("worker-1", "worker-2", "worker-3")
ROUND_S = 1.0
STOP_TIMEOUT_S = 1.0
TIMEOUT_S = 30.0
PATIENCE_S = 120.0
SINGLE_STARTS = 50
KILLS = 5
APPLICATIONS_WHEN_KILLED = 30
PUBLISHES = 10
MAX_WAKEUPS = 10
console = Console()


def until(reached: Callable[[], bool], what: str, look_s: float = 0.02) -> None:
    """Wait for other processes."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(look_s)


class Site:
    """A leader and three workers, each a process of its own, and applications that tell when they begin.

    With ``daemons`` each of the workers is a daemon, and one of them leads. ``options`` are the leaders'.
    """

    def __init__(
        self,
        kafka: str,
        folder: Path,
        *,
        daemons: bool = False,
        options: Sequence[str] = ("--round", f"{ROUND_S:g}"),
    ) -> None:
        self._daemons = daemons
        self._options = options
        self.name = f"bench-{uuid4().hex[:8]}"
        self.url = f"kafka://{kafka}/{self.name}"
        self._folder = folder
        self._started = folder / "started"
        self._started.mkdir()
        self._application = folder / "application"
        self._application.mkdir()
        note = f'touch "{self._started}/$SHIVA_APPLICATION.$SHIVA_WORKER"; exec sleep infinity'
        manifest = {"command": ["sh", "-c", note], "stop_timeout_s": STOP_TIMEOUT_S}
        (self._application / "shiva.json").write_text(json.dumps(manifest))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cluster: Cluster = open_cluster(self.url, TIMEOUT_S)

    def __enter__(self) -> Self:
        if not self._daemons:
            self._begin("leader-1", "leader", *self._options)
        for worker in WORKERS:
            self.hire(worker)
        until(lambda: self._known() == set(WORKERS), "the leader knows all workers", look_s=0.3)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()
        self.cluster.close()

    def hire(self, worker: str) -> None:
        """Start a worker, or a daemon, in its folder."""
        kind, options = ("daemon", self._options) if self._daemons else ("worker", ())
        self._begin(worker, kind, "--data", str(self._folder / worker), *options)

    def _begin(self, name: str, *words: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*SHIVA, *words, "--id", name, "--registry", self.url], stdout=log, stderr=log
            )

    def _document(self) -> AssignmentDocument | None:
        try:
            return self.cluster.read(TIMEOUT_S)
        except RegistryRefused:  # before the first process has made the topics
            time.sleep(0.5)
            return None

    def _known(self) -> set[str]:
        document = self._document()
        return set(document.workers) if document else set()

    def start(self, name: str, mode: Mode = Mode.AVAILABLE) -> float:
        """Start an application; when the call began, by the host's clock."""
        began = time.time()
        self.cluster.start(ApplicationId("bench", "main", name), self._application, mode=mode)
        return began

    def stop(self, name: str) -> None:
        """Stop an application, and wait until the leader knows it no more."""
        application = ApplicationId("bench", "main", name)
        self.cluster.wait(application, self.cluster.stop(application), TIMEOUT_S)

    def begun(self, name: str) -> dict[str, float]:
        """When a process of the application last began, by worker."""
        return {
            path.name.rpartition(".")[2]: path.stat().st_mtime for path in self._started.glob(f"{name}.*")
        }

    def settle(self, applications: int) -> None:
        """Wait until so many applications run, evenly on all workers."""

        def even() -> bool:
            document = self._document()
            status = status_of("bench", document)
            counts = {each.worker: each.applications for each in status.workers}
            return (
                status.settled
                and set(counts) == set(WORKERS)
                and sum(counts.values()) == applications
                and max(counts.values()) - min(counts.values()) <= 1
            )

        until(even, f"{applications} applications run evenly", look_s=0.3)

    def on(self, worker: str) -> list[str]:
        """The applications that are to run on a worker."""
        entries = self.document().applications
        return [name.application for name, entry in entries.items() if entry.worker == worker]

    def document(self) -> AssignmentDocument:
        """The last document, of which there is one by now."""
        document = self._document()
        if document is None:
            raise RuntimeError("there is no document")
        return document

    def end(self, worker: str, number: signal.Signals = signal.SIGKILL) -> float:
        """``kill -9`` a worker, or let it stop; when, by the host's clock."""
        process = self._processes.pop(worker)
        at = time.time()
        process.send_signal(number)
        process.wait()
        return at

    def last_begun(self, names: Sequence[str], at: float) -> float:
        """When the last of these applications began after ``at``, once all have."""

        def begun(name: str) -> float:
            return max((begun for begun in self.begun(name).values() if begun > at), default=0.0)

        until(lambda: all(map(begun, names)), "all run elsewhere")
        return max(map(begun, names))


def single_starts(site: Site) -> list[float]:
    """From the call of start to the process running, one application at a time."""
    seconds = []
    for number in range(SINGLE_STARTS):
        name = f"single-{number}"
        began = site.start(name)
        until(lambda name=name: bool(site.begun(name)), f"{name} runs")  # type: ignore[misc]
        seconds.append(min(site.begun(name).values()) - began)
        site.stop(name)
    return seconds


def many_starts(site: Site, count: int) -> list[float]:
    """The same for each of ``count`` applications that one client starts one right after the other."""
    names = [f"many-{number}" for number in range(count)]
    began = {name: site.start(name) for name in names}
    until(lambda: all(site.begun(name) for name in names), "all run")
    return [min(site.begun(name).values()) - began[name] for name in names]


def kills(site: Site) -> list[float]:
    """From ``kill -9`` of a worker to the last of its applications running elsewhere."""
    for number in range(APPLICATIONS_WHEN_KILLED):
        site.start(f"kept-{number}")
    seconds = []
    for _ in range(KILLS):
        site.settle(APPLICATIONS_WHEN_KILLED)
        victim = WORKERS[1]
        concerned = site.on(victim)
        at = site.end(victim)
        seconds.append(site.last_begun(concerned, at) - at)
        site.hire(victim)
    return seconds


@dataclass(slots=True)
class Clocked:
    """A leader machine that is told events, with a clock of its own for the machine and ours for the cost."""

    leader: Leader
    now: float = 0.0
    spent_s: float = 0.0

    def tell(self, event: LeaderEvent) -> AssignmentDocument | None:
        """Tell it an event; the document that it wants to publish, if it does."""
        before = time.perf_counter()
        effects = self.leader.handle(event, self.now, int(self.now * 1000))
        self.spent_s += time.perf_counter() - before
        return next((each.document for each in effects if isinstance(each, PublishDocument)), None)

    def document(self) -> AssignmentDocument:
        """Let time pass until it publishes.

        Raises:
            RuntimeError: it does not.
        """
        for _ in range(MAX_WAKEUPS):
            self.now = max(self.now, self.leader.next_wakeup or self.now)
            if (document := self.tell(Wakeup())) is not None:
                return document
        raise RuntimeError("the leader has nothing to publish")


@dataclass(frozen=True, slots=True)
class Documents:
    """What documents of one size cost."""

    first_s: float
    worker_lost_s: float
    moved: int
    size_bytes: int
    encode_s: float
    publish_s: Sequence[float]


def documents(kafka: str, applications: int, workers: int) -> Documents:
    """Compute a first document, and the one after a worker left; encode it, and write it as a leader does."""
    names = [ApplicationId("tenant", "channel", f"application-{n:05}") for n in range(applications)]
    clocked = Clocked(Leader("bench", LeaderOptions(retention_bytes=10 * 2**30)))
    clocked.tell(TookOver(0, None))
    for number, name in enumerate(names):
        archive = Archive(hashlib.sha256(str(name).encode()).hexdigest(), 1000 + number, 1)
        at = 2 * number + 1
        clocked.tell(PartRead(RecordMetadata(at, 0, 1000), name, archive.sha256, 0))
        start = StartCommand(name, uuid4().hex, archive, Mode.AVAILABLE)
        clocked.tell(StartRead(RecordMetadata(at + 1, 0, 300), start))
    pongs = [
        Pong(f"worker-{n:03}", Incarnation(uuid4().hex, 1), 1, 0, -1, None, host=f"10.0.0.{n}")
        for n in range(workers)
    ]
    for pong in pongs:
        clocked.tell(PongRead(pong))
    clocked.spent_s = 0.0
    first = clocked.tell(CaughtUp()) or clocked.document()
    first_s, clocked.spent_s = clocked.spent_s, 0.0
    if clocked.tell(Published(3 * applications)) is not None:
        raise RuntimeError("nothing has changed, and it publishes")
    gone = Pong(pongs[0].worker, pongs[0].incarnation, 2, 0, -1, first.epoch, leaving=True)
    after = clocked.tell(PongRead(gone)) or clocked.document()
    worker_lost_s = clocked.spent_s
    moved = sum(after.applications[name].worker != entry.worker for name, entry in first.applications.items())
    before = time.perf_counter()
    encoded = encode(after)
    encode_s = time.perf_counter() - before
    return Documents(first_s, worker_lost_s, moved, len(encoded), encode_s, publishes(kafka, encoded))


def publishes(kafka: str, encoded: bytes) -> list[float]:
    """How long a document takes to stand on both topics, in one transaction each time."""
    connection = Connection.from_url(parse_url(f"kafka://{kafka}/bench-{uuid4().hex[:8]}"), TIMEOUT_S)
    topics = TopicNames().of(connection.cluster)
    ensure(connection, topics, TIMEOUT_S)
    records = [
        NewRecord(topics.command, b"assignement", encoded),
        NewRecord(topics.assignement, b"assignement", encoded),
    ]
    seconds = []
    writer = TransactionalWriter(
        connection, connection.cluster, TIMEOUT_S, max_record_bytes=MAX_MESSAGE_BYTES
    )
    with writer:
        writer.init()
        for _ in range(PUBLISHES):
            before = time.perf_counter()
            writer.transaction(records)
            seconds.append(time.perf_counter() - before)
    return seconds


class Crasher:
    """An application whose process ends a second after each start, on whatever worker it is."""

    def __init__(self, application: ApplicationId) -> None:
        self.application = application
        self.worker: str | None = None
        self.run: Run | None = None
        self._named: tuple[str | None, str] | None = None
        self._exits_at = 0.0
        self._processes = 0

    def step(self, entry: ApplicationEntry, now: float) -> set[str | None]:
        """Let time pass; return the workers that have something to report."""
        before = self.worker, self.run.report if self.run is not None else None
        if (entry.worker, entry.command) != self._named:
            self._named = entry.worker, entry.command
            self.worker = entry.worker
            self.run = Run(self.application, entry.command, entry.mode) if entry.worker else None
        run = self.run
        if run is not None:
            if run.state is RunState.BACKING_OFF and now >= run.restart_at:
                run.elapsed()
            if run.state is RunState.PENDING:
                self._processes += 1
                run.start(self._processes, 1)
                run.started(now)
                self._exits_at = now + 1.0
            elif run.state is RunState.RUNNING and now >= self._exits_at:
                run.exited(1, "", now)
        after = self.worker, run.report if run is not None else None
        return {before[0], after[0]} if before != after else set()


class Fleet:
    """A leader machine with workers that are nothing but pongs, and the documents that it writes."""

    def __init__(self, applications: int, workers: int, crashing: int) -> None:
        self.clocked = Clocked(Leader("bench", LeaderOptions(retention_bytes=10 * 2**30)))
        self.now = 0.0
        self.written: list[int] = []
        names = [ApplicationId("tenant", "channel", f"application-{n:05}") for n in range(applications)]
        self._crashers = {name: Crasher(name) for name in names[:crashing]}
        self._workers = {f"worker-{n:03}": Incarnation(uuid4().hex, 1) for n in range(workers)}
        self._document: AssignmentDocument | None = None
        self._sequence = 0
        self._handle(TookOver(0, None))
        for number, name in enumerate(names):
            archive = Archive(hashlib.sha256(str(name).encode()).hexdigest(), 1000 + number, 1)
            at = 2 * number + 1
            self._handle(PartRead(RecordMetadata(at, 0, 1000), name, archive.sha256, 0))
            start = StartCommand(name, uuid4().hex, archive, Mode.AVAILABLE)
            self._handle(StartRead(RecordMetadata(at + 1, 0, 300), start))
        self._handle(CaughtUp())

    def _handle(self, event: LeaderEvent) -> None:
        events = [event]
        while events:
            for effect in self.clocked.leader.handle(events.pop(0), self.now, int(self.now * 1000)):
                if isinstance(effect, PublishDocument):
                    record = effect.change or effect.document
                    self.written.append(len(encode(record)) + len(key_of(record)) + RECORD_OVERHEAD_BYTES)
                    self._document = effect.document
                    events.append(Published(10**6 + len(self.written)))

    def _pong(self, worker: str) -> None:
        self._sequence += 1
        applications = {} if self._document is None else self._document.applications
        reports = {
            name: RunReport(entry.command, RunState.RUNNING)
            for name, entry in applications.items()
            if entry.worker == worker and name not in self._crashers
        }
        for crasher in self._crashers.values():
            if crasher.worker == worker and crasher.run is not None:
                reports[crasher.application] = crasher.run.report
        seen = self._document.epoch if self._document is not None else None
        self._handle(
            PongRead(
                Pong(
                    worker,
                    self._workers[worker],
                    self._sequence,
                    1,
                    0,
                    seen,
                    host=f"10.0.0.{worker[-3:]}",
                    applications=reports,
                    reads_changes=True,
                )
            )
        )

    def run(self, seconds: float, step_s: float = 0.25) -> None:
        """Let time pass: rounds of 30 s, and a pong whenever a process starts or ends."""
        until, rounds = self.now + seconds, -1
        while self.now < until:
            due: set[str | None] = set()
            if self.now // 30 != rounds:
                rounds = self.now // 30
                due |= self._workers.keys()
            applications = {} if self._document is None else self._document.applications
            for crasher in self._crashers.values():
                if crasher.application in applications:
                    due |= crasher.step(applications[crasher.application], self.now)
            for worker in sorted(filter(None, due)):
                self._pong(worker)
            self._handle(Wakeup())
            self.now += step_s


def show_growth(applications: int, workers: int, crashing: int, minutes: int) -> None:
    """Print how many bytes crashing applications add to each of the two topics."""
    fleet = Fleet(applications, workers, crashing)
    fleet.run(60.0)
    first = len(fleet.written)
    table = Table(
        title=f"{crashing} crashing applications of {applications:,} on {workers} workers",
        title_justify="left",
    )
    for column in ("minute", "documents", "bytes to each topic"):
        table.add_column(column, justify="right")
    for minute in range(minutes):
        fleet.run(60.0)
        sizes, first = fleet.written[first:], len(fleet.written)
        table.add_row(str(minute + 2), str(len(sizes)), f"{sum(sizes):,}")
    console.print(table)


def week(applications: int, workers: int, hours: int, changes_an_hour: int) -> list[LogRecord]:
    """COMMAND with the changes of a week: each starts an application anew; a whole document each hour."""
    records: list[LogRecord] = []

    def write(key: str, value: bytes) -> None:
        records.append(
            LogRecord(len(records), 0, True, key.encode(), value, size_bytes=len(key) + len(value))
        )

    names = [ApplicationId("tenant", "channel", f"application-{n:05}") for n in range(applications)]
    known = {
        f"worker-{n:03}": WorkerEntry(Incarnation(uuid4().hex, 1), host=f"10.0.0.{n}") for n in range(workers)
    }
    archives = {name: Archive(hashlib.sha256(str(name).encode()).hexdigest(), 1000, 1) for name in names}
    entries: dict[ApplicationId, ApplicationEntry] = {}

    def start(number: int, name: ApplicationId) -> None:
        command = StartCommand(name, uuid4().hex, archives[name], Mode.AVAILABLE)
        entries[name] = ApplicationEntry(
            command.command,
            ApplicationState.RUNNING,
            command.mode,
            command.archive,
            worker=f"worker-{number % workers:03}",
            offset=len(records),
        )
        write(key_of(command), encode(command))

    for number, name in enumerate(names):
        write(str(PartKey(name, archives[name].sha256, 0)), bytes(1000))
        start(number, name)
    announcement = LeaderAnnouncement("bench")
    term = len(records)
    write(key_of(announcement), encode(announcement))
    document: AssignmentDocument | None = None
    for count in range(hours * changes_an_hour):
        start(count, names[count % applications])
        after = AssignmentDocument(
            Epoch(term, count + 1), "bench", len(records) - 1, 120.0, known, dict(entries), reads_changes=True
        )
        whole = document is None or count % changes_an_hour == 0
        record = after if document is None or whole else change_between(document, after)
        write(key_of(record), encode(record))
        document = after
    return records


def show_beginning(applications: int, workers: int) -> None:
    """Processor time of a new leader to its first ping, and of a new worker to its first pong."""
    hours, changes_an_hour = 168, 50
    records = week(applications, workers, hours, changes_an_hour)
    on_assignement = [record for record in records if (record.key or b"").startswith((b"assign", b"change"))]
    before = time.process_time()
    document = newest(on_assignement[-2000:]).document
    leader, log = Leader("bench", LeaderOptions(retention_bytes=10 * 2**30)), ReplayedCommands()
    leader.handle(TookOver(len(records), document), 0.0, 0)
    for record in records:
        for event in log.events(record):
            leader.handle(event, 0.0, 0)
    effects = [effect for event in (*log.end(), CaughtUp()) for effect in leader.handle(event, 0.0, 0)]
    leader_s = time.process_time() - before
    if not any(isinstance(effect, SendPing) for effect in effects):
        raise RuntimeError("the leader does not ping")
    before = time.process_time()
    worker, log = Worker("worker-000", Incarnation("new", 1)), ReplayedCommands()
    for record in records:
        for event in log.events(record):
            worker.handle(event, 0.0)
    answers = [effect for event in (*log.end(), CaughtUp()) for effect in worker.handle(event, 0.0)]
    worker_s = time.process_time() - before
    if not any(isinstance(answer, SendPong) for answer in answers):
        raise RuntimeError("the worker does not pong")
    before = time.process_time()
    newest(on_assignement[-16:])
    watch_s = time.process_time() - before
    table = Table(
        title=f"Processor time after {hours * changes_an_hour:,} changes, {applications:,} applications "
        f"on {workers} workers",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("size of COMMAND", f"{sum(record.size_bytes for record in records):,} bytes")
    table.add_row("new leader to its first ping", f"{leader_s:.2f} s")
    table.add_row("new worker to its first pong", f"{worker_s:.2f} s")
    table.add_row("the end of ASSIGNEMENT, as a watcher reads it", f"{watch_s * 1000:,.0f} ms")
    console.print(table)


def milliseconds(seconds: Sequence[float]) -> tuple[str, str, str]:
    """Median, 99th percentile and largest, in milliseconds."""
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return tuple(f"{value * 1000:,.0f}" for value in (statistics.median(seconds), p99, max(seconds)))  # type: ignore[return-value]


@contextmanager
def broker() -> Iterator[str]:
    """The Kafka that the environment names, else one broker of our own."""
    if given := ",".join(addresses_from_environment()):
        yield given
        return
    with KafkaCluster() as cluster:
        yield cluster.bootstrap


def show_times(kafka: str, only: set[str], applications: int) -> None:
    """Starts and kills, on processes."""
    table = Table(title=f"Times in ms, {len(WORKERS)} workers, rounds of {ROUND_S:g} s", title_justify="left")
    for column in ("what", "n", "p50", "p99", "max"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def measured(what: str, measure: Callable[[Site], list[float]]) -> None:
        with tempfile.TemporaryDirectory() as folder, Site(kafka, Path(folder)) as site:
            seconds = measure(site)
        table.add_row(what, str(len(seconds)), *milliseconds(seconds))

    if "start" in only:
        measured("start to process running, 1 application", single_starts)
        measured(
            f"the same, {applications} applications one after the other",
            lambda site: many_starts(site, applications),
        )
    if "kill" in only:
        measured(f"worker killed to its third of {APPLICATIONS_WHEN_KILLED} applications elsewhere", kills)
    console.print(table)


def show_documents(kafka: str, applications: int, workers: int) -> None:
    """What documents cost."""
    found = documents(kafka, applications, workers)
    table = Table(
        title=f"Documents of {applications:,} applications on {workers} workers", title_justify="left"
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("compute: all workers arrive, everything is placed", f"{found.first_s * 1000:,.0f} ms")
    table.add_row(
        f"compute: a worker left, {found.moved} applications move", f"{found.worker_lost_s * 1000:,.0f} ms"
    )
    table.add_row("encode", f"{found.encode_s * 1000:,.0f} ms")
    table.add_row("size as a record", f"{found.size_bytes:,} bytes")
    median, p99, largest = milliseconds(found.publish_s)
    table.add_row(f"publish to both topics, p50 of {PUBLISHES}", f"{median} ms")
    table.add_row("the same, p99 and max", f"{p99} and {largest} ms")
    console.print(table)


def main() -> None:
    """Run what is asked for and print the tables."""
    parts = ["start", "kill", "documents", "growth", "beginning"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=parts, action="append")
    parser.add_argument("--starts", type=int, default=100, help="applications that are started at once")
    parser.add_argument("--applications", type=int, default=10_000, help="of the documents")
    parser.add_argument("--workers", type=int, default=200, help="of the documents")
    arguments = parser.parse_args()
    only = set(arguments.only or parts)
    console.print(
        f"{platform.python_implementation()} {platform.python_version()}, {platform.system()}, "
        f"{os.cpu_count()} cores"
    )
    if "growth" in only:
        show_growth(2_000, 100, crashing=20, minutes=10)
    if "beginning" in only:
        show_beginning(2_000, 100)
    if not only & {"start", "kill", "documents"}:
        return
    with broker() as kafka:
        if only & {"start", "kill"}:
            show_times(kafka, only, arguments.starts)
        if "documents" in only:
            show_documents(kafka, arguments.applications, arguments.workers)


if __name__ == "__main__":
    main()
