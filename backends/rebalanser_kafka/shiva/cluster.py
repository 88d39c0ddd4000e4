"""Connection to a Shiva cluster on Kafka: a client, which also runs leaders and workers."""

from __future__ import annotations

import queue
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import (
    AssignmentDocument,
    OutputAnswer,
    OutputRequest,
    ScaleCommand,
    StartCommand,
    StopCommand,
    WorkerCommand,
)
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    CommandId,
    Cordon,
    LeaderId,
    Mode,
    WorkerId,
    check_part,
)
from rebalanser.core.shiva.worker_options import DEFAULT_WORKER_OPTIONS, WorkerOptions
from rebalanser.errors import (
    AccessDenied,
    ApplicationFailed,
    FixConfiguration,
    InvalidSettings,
    NotSettled,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
    UnknownApplication,
    UnknownWorker,
)
from rebalanser.history import HistorySink
from rebalanser.registry.urls import RegistryUrl
from rebalanser.shiva.cluster import (
    Cluster,
    Commanded,
    DocumentWatch,
    OnDocument,
    Progress,
    Start,
    TopicNames,
)
from rebalanser.shiva.status import LastHeard
from rebalanser_kafka.connection import Connection, patiently, reach
from rebalanser_kafka.log import LogWriter
from rebalanser_kafka.reader import LogReader
from rebalanser_kafka.records import NewRecord
from rebalanser_kafka.shiva import topics as shiva_topics
from rebalanser_kafka.shiva.candidate import LeaderCandidate
from rebalanser_kafka.shiva.commands import LastCommands, Publication, last_commanded, packed_starts
from rebalanser_kafka.shiva.decoding import output_answer
from rebalanser_kafka.shiva.effect import CommandProgress, Effects, not_cordoned_yet
from rebalanser_kafka.shiva.follower import ReadBatch, TopicFollower, TopicLost
from rebalanser_kafka.shiva.last_records import end_of, last_document, last_heard, read_on
from rebalanser_kafka.shiva.wire import encode, key_of
from rebalanser_kafka.shiva.worker import KafkaWorker

KNOWN_SHOWN: Final = 10
LOOK_S: Final = 0.5
FOLLOW_S: Final = 30.0
"""Seconds for which a worker sends new lines, unless the request is repeated."""
ASK_AGAIN_S: Final = 10.0
ReadT = TypeVar("ReadT")
MAX_REMEMBERED: Final = 20_000
"""Number of commands of this connection, before the last call, whose effect can be waited for."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A command of this connection: its offset, and True if it is a start."""

    offset: int | None
    starts: bool
    replicas: int | None = None
    """Number of replicas that it is for, if it is nothing but that (SH-28)."""


_UNKNOWN: Final = _Sent(None, starts=False)


class KafkaShivaCluster(Cluster):
    """One connection to a cluster whose broker has answered once."""

    def __init__(self, connection: Connection, timeout_s: float, names: TopicNames, kafka_id: str) -> None:
        self._connection = connection
        self._kafka_id = kafka_id
        self._timeout_s = timeout_s
        self._topics = names.of(connection.cluster)
        self._writer = LogWriter(connection, delivery_timeout_s=timeout_s)
        self._ensured = self._has_command = False
        self._sent: OrderedDict[CommandId, _Sent] = OrderedDict()

    @property
    def identity(self) -> str:
        return f"{self._connection.cluster}@{self._kafka_id}"

    def start_all(
        self, starts: Sequence[Start], progress: Progress = lambda _done, _total: None
    ) -> list[CommandId]:
        packed = packed_starts(starts)
        self._ensure_topics()
        command_topic = shiva_topics.found(self._connection, self._topics.command, self._timeout_s)
        document = self.read(self._timeout_s)
        for each, archive in zip(starts, packed, strict=True):
            if document is not None and each.mode is Mode.EXCLUSIVE:
                _check_deadline(each.application, document, archive.manifest.stop_timeout_s)
        sizes = {each.application: archive.size_bytes for each, archive in zip(starts, packed, strict=True)}
        self._check_budget(sizes, command_topic, document)
        publication = Publication(
            self._writer, self._topics.command, self._timeout_s, command_topic.max_message_bytes, progress
        )
        commands, offsets = publication.publish(starts, packed)
        self._remember(
            {command: _Sent(at, starts=True) for command, at in zip(commands, offsets, strict=True)}
        )
        return commands

    def _check_budget(
        self,
        sizes: Mapping[ApplicationId, int],
        topic: shiva_topics.CommandTopic,
        document: AssignmentDocument | None,
    ) -> None:
        """Refuse what the leader would refuse, before anything is sent (SH-15)."""
        options = topic.retained(LeaderOptions())
        others = {} if document is None else document.applications
        taken = sum(
            entry.archive.size_bytes
            for name, entry in others.items()
            if name == name.whole and name not in sizes and entry.state is not ApplicationState.REFUSED
        )
        needed = sum(sizes.values())
        if taken + needed > options.budget_bytes:
            what = (
                f"the archive of {next(iter(sizes))} has"
                if len(sizes) == 1
                else f"the archives of {len(sizes):,} applications have"
            )
            raise RequestTooLarge(
                f"{what} {needed:,} bytes, and those of the other applications "
                f"{taken:,}; together they may have {options.budget_bytes:,} of the "
                f"{options.retention_bytes:,} bytes that {self._topics.command} holds; nothing was sent"
            )

    def stop_all(self, applications: Sequence[ApplicationId], *, keep_data: bool = False) -> Commanded:
        document = self.read(self._timeout_s)
        known = {} if document is None else document.applications
        there = {application.whole for application in known}
        unknown = [application for application in applications if application not in there]
        last = self._last_commanded(document, self._timeout_s) if unknown else {}
        never = {each for each in unknown if not isinstance(last.get(each), StartCommand)}
        stops = [
            StopCommand(application, uuid.uuid4().hex, keep_data)
            for application in dict.fromkeys(applications)
            if application not in never
        ]
        return self._commanded(stops, self._unknown(never, document))

    def restart_all(self, applications: Sequence[ApplicationId]) -> Commanded:
        document = self.read(self._timeout_s)
        last = self._last_commanded(document, self._timeout_s)
        known = {} if document is None else document.applications
        starts: list[StartCommand] = []
        gone: set[ApplicationId] = set()
        left_out: dict[ApplicationId, UnknownApplication | ApplicationFailed] = {}
        for application in dict.fromkeys(applications):
            command = last.get(application)
            entry = _unless_stopped(known.get(application), command)
            if isinstance(command, StartCommand):
                starts.append(replace(command, command=uuid.uuid4().hex))
            elif entry is None:
                gone.add(application)
            elif entry.state is ApplicationState.REFUSED:
                left_out[application] = _refused(application, entry)
            else:
                replicas = command.replicas if isinstance(command, ScaleCommand) else entry.replicas
                start = StartCommand.of(application, entry)
                starts.append(replace(start, command=uuid.uuid4().hex, replicas=replicas))
        return self._commanded(starts, {**left_out, **self._unknown(gone, document)})

    def scale(self, application: ApplicationId, replicas: int) -> CommandId:
        scale = ScaleCommand(application, uuid.uuid4().hex, replicas)
        document = self.read(self._timeout_s)
        last = self._last_commanded(document, self._timeout_s).get(application)
        known = {} if document is None else document.applications
        entry = _unless_stopped(known.get(application), last)
        if not isinstance(last, StartCommand):
            if entry is None:
                raise self._unknown([application], document)[application]
            if entry.state is ApplicationState.REFUSED:
                raise _refused(application, entry)
        (command,) = self._append_commands([scale])
        return command

    def applications(self, timeout_s: float) -> dict[ApplicationId, ApplicationState]:
        document = self.read(timeout_s)
        known = {} if document is None else document.applications
        states = {name: entry.state for name, entry in known.items() if name == name.whole}
        for application, command in self._last_commanded(document, timeout_s).items():
            if isinstance(command, StartCommand):
                states[application] = ApplicationState.WAITING
            elif isinstance(command, StopCommand) and application in states:
                states[application] = ApplicationState.STOPPING
        return states

    def _last_commanded(self, document: AssignmentDocument | None, timeout_s: float) -> LastCommands:
        def read(connection: Connection, topic: str, left_s: float) -> LastCommands:
            return last_commanded(connection, topic, document, left_s)

        return self._once_there(self._topics.command, read, timeout_s)

    def _commanded(
        self,
        commands: Sequence[StartCommand | StopCommand],
        left_out: Mapping[ApplicationId, UnknownApplication | ApplicationFailed],
    ) -> Commanded:
        ids = self._append_commands(commands)
        published = zip((each.application for each in commands), ids, strict=True)
        return Commanded(dict(published), left_out)

    def _unknown(
        self, applications: Collection[ApplicationId], document: AssignmentDocument | None
    ) -> dict[ApplicationId, UnknownApplication]:
        """Return the errors of applications that the cluster does not know, or is stopping."""
        known = {} if document is None else document.applications
        shown = _shown(known.keys() - applications) if applications else ""
        return {
            application: UnknownApplication(
                f"cluster {self._connection.cluster} knows no application {application}; it knows {shown}"
            )
            for application in sorted(applications)
        }

    def cordon(self, worker: WorkerId, cordon: Cordon | None) -> CommandId:
        document = self.read(self._timeout_s)
        known = _workers_of(document)
        if worker not in known:
            raise UnknownWorker(
                f"cluster {self._connection.cluster} knows no worker {worker}; it knows {_shown(known)}"
            )
        (command,) = self._append_commands([WorkerCommand(worker, uuid.uuid4().hex, cordon)])
        return command

    def wait_cordoned(
        self,
        worker: WorkerId,
        cordon: Cordon | None,
        timeout_s: float,
        on_document: OnDocument = lambda _document: None,
        command: CommandId = "",
    ) -> None:
        offset = self._sent.get(command, _UNKNOWN).offset
        progress = "no leader has published anything yet"
        for document in self.documents(timeout_s):
            on_document(document)
            progress = not_cordoned_yet(document, worker, cordon, offset)
            if not progress:
                return
        raise NotSettled(f"timed out after {timeout_s:g} s: {progress}")

    def _append(self, key: str, value: bytes) -> int:
        self._require_command()
        return self._writer.append_and_wait(
            self._topics.command, key.encode(), value, timeout_s=self._timeout_s
        )

    def _append_commands(
        self, commands: Sequence[StartCommand | StopCommand | ScaleCommand | WorkerCommand]
    ) -> list[CommandId]:
        self._require_command()
        records = [
            NewRecord(self._topics.command, key_of(command).encode(), encode(command)) for command in commands
        ]
        offsets = self._writer.append_all(records, timeout_s=self._timeout_s)
        sent = {
            command.command: _Sent(
                offset,
                isinstance(command, StartCommand),
                command.replicas if isinstance(command, ScaleCommand) else None,
            )
            for command, offset in zip(commands, offsets, strict=True)
        }
        self._remember(sent)
        return list(sent)

    def _remember(self, sent: Mapping[CommandId, _Sent]) -> None:
        """Remember the commands of one call: without its offset, a start would seem to have its effect."""
        self._sent.update(sent)
        while len(self._sent) > MAX_REMEMBERED + len(sent):
            self._sent.popitem(last=False)

    def _ensure_topics(self) -> None:
        if not self._ensured:
            shiva_topics.ensure(self._connection, self._topics, self._timeout_s)
            self._ensured = self._has_command = True

    def _require_command(self) -> None:
        """Check that COMMAND is there before it is written to: else brokers make it, with other settings.

        Raises:
            RegistryRefused: it is not there.
        """
        if not self._has_command:
            topic = self._topics.command
            if not shiva_topics.exists(self._connection, topic, self._timeout_s):
                raise self._missing(topic)
            self._has_command = True

    def _missing(self, topic: str) -> RegistryRefused:
        return RegistryRefused(
            f"there is no cluster {self._connection.cluster}: topic {topic} does not exist; the first "
            "leader, worker or start command makes it"
        )

    def read(self, timeout_s: float) -> AssignmentDocument | None:
        """Return the last document on ASSIGNEMENT, the source of the status; None before any (SH-11).

        Raises:
            InvalidSettings: there can be no document, as a topic has several partitions.
        """
        chain, _ = self._read_back(timeout_s)
        return chain.document

    def _read_back(self, timeout_s: float) -> tuple[DocumentChain, int]:
        """Return the last document and the end of ASSIGNEMENT; errors as ``read``."""
        chain, end = self._once_there(self._topics.assignement, last_document, timeout_s)
        if chain.document is None:
            shiva_topics.require_one_partition(self._connection, self._topics, timeout_s)
        return chain, end

    def heard(self, timeout_s: float) -> LastHeard:
        return self._once_there(self._topics.control, last_heard, timeout_s)

    def _once_there(
        self, topic: str, read: Callable[[Connection, str, float], ReadT], timeout_s: float
    ) -> ReadT:
        """Read a topic; retry one that was just created and that not all brokers know yet."""

        def ask(left_s: float) -> ReadT:
            try:
                return read(self._connection, topic, left_s)
            except AccessDenied:
                raise
            except RegistryRefused as error:
                if shiva_topics.exists(self._connection, topic, left_s):
                    raise RegistryUnavailable(f"{error}; the topic has just been made") from error
                raise self._missing(topic) from error

        return patiently(ask, timeout_s)

    def documents(
        self, timeout_s: float | None = None, repeat_s: float | None = None
    ) -> Iterator[AssignmentDocument]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with closing(self.watch(self._timeout_s)) as watch:
            if watch.document is not None:
                yield watch.document
            while deadline is None or time.monotonic() < deadline:
                is_newer = watch.wait(_shortest_s(repeat_s, deadline))
                if watch.document is not None and (is_newer or repeat_s is not None):
                    yield watch.document

    def watch(self, timeout_s: float) -> KafkaDocumentWatch:
        return KafkaDocumentWatch(self._connection, self._topics.assignement, self._read_back, timeout_s)

    def wait_all(
        self,
        commands: Mapping[ApplicationId, CommandId],
        timeout_s: float,
        on_document: OnDocument = lambda _document: None,
    ) -> dict[ApplicationId, ApplicationEntry | None]:
        sent = {application: self._sent.get(command, _UNKNOWN) for application, command in commands.items()}
        effects = Effects(
            {
                application: CommandProgress(
                    application,
                    command,
                    sent[application].offset,
                    starts=sent[application].starts,
                    replicas=sent[application].replicas,
                )
                for application, command in commands.items()
            }
        )
        for document in self.documents(timeout_s):
            on_document(document)
            if effects.have_come(document):
                return effects.entries
        raise NotSettled(f"timed out after {timeout_s:g} s: {effects.summary}")

    def output(
        self, application: ApplicationId, lines: int, timeout_s: float, worker: WorkerId | None = None
    ) -> OutputAnswer:
        with closing(self._answers(self._request_for(application, lines, worker), timeout_s)) as answers:
            return next(answers)

    def follow_output(
        self, application: ApplicationId, lines: int, timeout_s: float, worker: WorkerId | None = None
    ) -> Iterator[OutputAnswer]:
        request = replace(self._request_for(application, lines, worker), follow_s=FOLLOW_S)
        with closing(self._answers(request, timeout_s)) as answers:
            yield from (answer for answer in answers if answer.lines or answer.omitted)

    def _request_for(self, application: ApplicationId, lines: int, worker: WorkerId | None) -> OutputRequest:
        asked = self._keeper_of(application) if worker is None else check_part(worker, "worker")
        return OutputRequest(asked, uuid.uuid4().hex, application, lines)

    def _answers(self, request: OutputRequest, timeout_s: float) -> Generator[OutputAnswer, None, None]:
        """Request output from a worker and yield its answers; repeat the request to follow it.

        Raises:
            FixConfiguration: it has no such output, or can't follow it.
            NotSettled: it has not answered within ``timeout_s``.
        """
        end = self._once_there(self._topics.control, end_of, timeout_s)
        with LogReader(self._connection, self._topics.control, end) as reader:
            self._append(key_of(request), encode(request))
            asked_at = time.monotonic()
            silent_since: float | None = asked_at
            while silent_since is None or time.monotonic() < silent_since + timeout_s:
                until = None if silent_since is None else silent_since + timeout_s
                for answer in map(output_answer, reader.poll(_shortest_s(LOOK_S, until))):
                    if answer is not None and answer.request == request.request:
                        if answer.error:
                            raise FixConfiguration(f"{request.worker}: {answer.error}")
                        silent_since = None
                        yield answer
                if request.follow_s and time.monotonic() >= asked_at + ASK_AGAIN_S:
                    self._append(key_of(request), encode(replace(request, lines=0)))
                    asked_at = time.monotonic()
                    silent_since = silent_since or asked_at
        raise NotSettled(f"worker {request.worker} has not answered within {timeout_s:g} s")

    def _keeper_of(self, application: ApplicationId) -> WorkerId:
        document = self.read(self._timeout_s)
        entry = document.applications.get(application) if document is not None else None
        if entry is None:
            raise self._unknown([application], document)[application]
        worker = entry.worker or (
            entry.leaving.worker if entry.leaving else next(iter(entry.failed_on), None)
        )
        if worker is None:
            raise FixConfiguration(
                f"no worker has {application}, which is {entry.state}; name one that had it"
            )
        return worker

    def run_leader(
        self, leader: LeaderId, options: LeaderOptions, history: HistorySink | None = None
    ) -> LeaderCandidate:
        options.check()
        self._ensure_topics()
        topic = shiva_topics.found(self._connection, self._topics.command, self._timeout_s)
        retained = topic.retained(options)
        retained.check()
        name = check_part(leader, "leader")
        running = LeaderCandidate(self._connection, self._topics, name, retained, self._timeout_s, history)
        running.begin()
        return running

    def run_worker(
        self, worker: WorkerId, data: Path, options: WorkerOptions, history: HistorySink | None = None
    ) -> KafkaWorker:
        self._ensure_topics()
        name = check_part(worker, "worker")
        running = KafkaWorker(self._connection, self._topics, name, data, options, self._timeout_s, history)
        running.begin()
        return running

    def close(self) -> None:
        self._writer.close()


class KafkaDocumentWatch(DocumentWatch):
    """Follows ASSIGNEMENT from the end as it was once. Made by ``KafkaShivaCluster.watch``."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        read_back: Callable[[float], tuple[DocumentChain, int]],
        timeout_s: float,
    ) -> None:
        """``read_back`` reads the last document and the topic's end within a number of seconds."""
        self._read_back = read_back
        self._timeout_s = timeout_s
        self._chain, end = read_back(timeout_s)
        self._arrived: queue.SimpleQueue[ReadBatch | TopicLost] = queue.SimpleQueue()
        self._follower = TopicFollower(connection, topic, end, self._arrived.put)
        self._follower.begin()

    @property
    def document(self) -> AssignmentDocument | None:
        return self._chain.document

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        before = self.document
        while True:
            try:
                item = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if isinstance(item, TopicLost):
                raise item.error
            read_on(self._chain, item.records)
            item.taken.set()
            if self._chain.missed:
                self._chain, _ = self._read_back(self._timeout_s)
            now = self.document
            if now is not None and (before is None or now.epoch > before.epoch):
                return True

    def close(self) -> None:
        self._follower.close()


def _unless_stopped(
    entry: ApplicationEntry | None, last: StartCommand | StopCommand | ScaleCommand | None
) -> ApplicationEntry | None:
    """Return the entry of an application; None if it is not there, or is being stopped."""
    if entry is None or isinstance(last, StopCommand) or entry.state is ApplicationState.STOPPING:
        return None
    return entry


def _refused(application: ApplicationId, entry: ApplicationEntry) -> ApplicationFailed:
    return ApplicationFailed(
        f"{application} was refused, so the log does not keep its archive; start it with its files: "
        f"{entry.reason}"
    )


def _check_deadline(application: ApplicationId, document: AssignmentDocument, stop_timeout_s: float) -> None:
    """Refuse what no worker would start, before anything is sent (SH-14).

    This uses the default margins; workers may have others.
    """
    try:
        DEFAULT_WORKER_OPTIONS.check_deadline(document.deadline_s, document.round_s, stop_timeout_s)
    except InvalidSettings as error:
        raise InvalidSettings(f"{application}: {error}; nothing was sent") from None


def _workers_of(document: AssignmentDocument | None) -> frozenset[WorkerId]:
    """Return the workers that a document names, present or not."""
    if document is None:
        return frozenset()
    entries = document.applications.values()
    kept = {entry.kept_for for entry in entries if entry.kept_for is not None}
    leaving = {entry.leaving.worker for entry in entries if entry.leaving is not None}
    return frozenset(document.workers.keys() | document.cordons.keys() | kept | leaving)


def _shown(names: Collection[object]) -> str:
    shown = ", ".join(sorted(map(str, names))[:KNOWN_SHOWN]) or "none"
    return shown + (f" and {len(names) - KNOWN_SHOWN} more" if len(names) > KNOWN_SHOWN else "")


def _shortest_s(repeat_s: float | None, deadline: float | None) -> float:
    wait_s = LOOK_S if repeat_s is None else repeat_s
    if deadline is None:
        return wait_s
    left_s = max(0.0, deadline - time.monotonic())
    return left_s if repeat_s is None else min(left_s, wait_s)


def open_cluster(url: RegistryUrl, timeout_s: float, topics: TopicNames) -> KafkaShivaCluster:
    """Connect to a cluster; wait at most ``timeout_s`` seconds for a first answer.

    Raises:
        InvalidUrl: the URL names no cluster, or an option is invalid.
        InvalidName: two topics have the same name.
        RegistryUnavailable: no answer; the message says what was tried, and for how long.
    """
    connection = Connection.from_url(url, timeout_s)
    names = topics.of(connection.cluster)
    broker = reach(connection, timeout_s)
    return KafkaShivaCluster(connection, timeout_s, names, broker.cluster_id)
