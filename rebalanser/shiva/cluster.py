"""The contract of a Shiva cluster: what a person or a program can do with one, on any log.

A backend registers an ``OpenCluster`` by URL scheme under the entry-point group ``rebalanser.shiva``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import AssignmentDocument, OutputAnswer
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    CommandId,
    Cordon,
    LeaderId,
    Mode,
    Tag,
    WorkerId,
    check_replicas,
)
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import ApplicationFailed, InvalidName, UnknownApplication
from rebalanser.history import HistorySink
from rebalanser.registry.urls import RegistryUrl, check_topic_name, load_opener, parse_url
from rebalanser.shiva.archives import NO_ENVIRONMENT
from rebalanser.shiva.status import LastHeard

ENTRY_POINT_GROUP = "rebalanser.shiva"
Progress: TypeAlias = Callable[[int, int], None]
"""Called with the published bytes of archives, and all their bytes."""
OnDocument: TypeAlias = Callable[[AssignmentDocument], None]


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Names of the three topics; empty for the default of the cluster's name (SH-1)."""

    command: str = ""
    control: str = ""
    assignement: str = ""

    def __post_init__(self) -> None:
        """Check the given names.

        Raises:
            InvalidName: one is invalid, or two are the same to Kafka, which takes ``.`` and ``_`` for one.
        """
        given = [check_topic_name(name) for name in (self.command, self.control, self.assignement) if name]
        if len({name.replace(".", "_") for name in given}) < len(given):
            raise InvalidName(
                f"the topics of a cluster need different names, '.' and '_' taken for one: {', '.join(given)}"
            )

    def of(self, cluster: str) -> TopicNames:
        """Return the names, with ``{cluster}-command`` and so on in place of empty ones.

        Raises:
            InvalidName: a given name is the default of another topic.
        """
        return TopicNames(
            self.command or f"{cluster}-command",
            self.control or f"{cluster}-control",
            self.assignement or f"{cluster}-assignement",
        )


@dataclass(frozen=True, slots=True)
class Start:
    """An application to be started, as ``Cluster.start`` takes it."""

    application: ApplicationId
    source: Path
    tags: Sequence[Tag] = ()
    mode: Mode = Mode.AVAILABLE
    environment: Mapping[str, str] = field(default_factory=lambda: NO_ENVIRONMENT)
    replicas: int | None = None
    """Number of replicas (SH-28); None for what the manifest says."""

    def __post_init__(self) -> None:
        """Check what it names.

        Raises:
            InvalidName: it names a single replica, or the number of replicas is invalid.
        """
        self.application.require_whole()
        if self.replicas is not None:
            check_replicas(self.replicas)


@dataclass(frozen=True, slots=True)
class Commanded:
    """Outcome of ``Cluster.stop_all`` or ``Cluster.restart_all``; it has each application once."""

    commands: Mapping[ApplicationId, CommandId]
    """Commands that were published, as ``Cluster.wait_all`` takes them."""
    left_out: Mapping[ApplicationId, UnknownApplication | ApplicationFailed]
    """Applications without a command, each with the error that ``Cluster.stop`` or
    ``Cluster.restart`` raises for it: such as one that another client has stopped meanwhile."""

    def of(self, application: ApplicationId) -> CommandId:
        """Return the command of an application, or raise the error for which it was left out."""
        if application in self.left_out:
            raise self.left_out[application]
        return self.commands[application]


class Running(Protocol):
    """A leader or a worker that runs in threads of this process."""

    def stop(self) -> None:
        """Ask for a graceful stop, from any thread; returns at once."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; True if it has.

        Raises:
            RebalanserError: the error that ended it, unless ``stop`` did.
        """


class DocumentWatch(Protocol):
    """Follows the assignment documents of a cluster. For one thread at a time."""

    @property
    def document(self) -> AssignmentDocument | None:
        """The last document that was read; None before any."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for a newer document, at most ``timeout_s`` seconds; True if there is one.

        It retries while brokers are away.

        Raises:
            RebalanserError: the documents cannot be followed any more, such as those of a topic made anew.
        """

    def close(self) -> None:
        """Stop following. Closing twice does nothing."""


class Cluster(ABC):
    """One connection to a cluster. Every method may be called from any thread."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The same for every connection to this cluster, whatever its URL, and for no other cluster."""

    def start(
        self,
        application: ApplicationId,
        source: Path,
        *,
        tags: Sequence[Tag] = (),
        mode: Mode = Mode.AVAILABLE,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
        progress: Progress = lambda _done, _total: None,
        replicas: int | None = None,
    ) -> CommandId:
        """Publish an application's archive and a start command; return the command's id (SH-4).

        ``source`` is a folder, or a ZIP file, with a manifest at its root. ``environment`` is added to the
        manifest's, in the archive that is sent. ``replicas`` is the number of replicas (SH-28); None for what
        the manifest says.

        Raises:
            InvalidManifest: the manifest is missing or does not validate; each error with its place.
            InvalidArchive: an entry is not allowed; nothing was sent (SH-16).
            RequestTooLarge: the archive is beyond the cluster's size budget; nothing was sent (SH-15).
            InvalidSettings: an exclusive application would be stopped between two rounds; nothing was sent.
            RegistryUnavailable: the log could not be written; the start had no effect.
            OutcomeUnknown: it may have an effect.
        """
        (command,) = self.start_all([Start(application, source, tags, mode, environment, replicas)], progress)
        return command

    @abstractmethod
    def start_all(
        self, starts: Sequence[Start], progress: Progress = lambda _done, _total: None
    ) -> list[CommandId]:
        """Start many applications as ``start`` does each; return the ids of the commands, in the same order.

        All archives are packed and checked before anything is sent, and are held in memory until then.

        Raises:
            InvalidSettings: an application is given twice; nothing was sent.
            RegistryUnavailable, OutcomeUnknown: as for ``start``; the message says how many were started.
        """

    def stop(self, application: ApplicationId, *, keep_data: bool = False) -> CommandId:
        """Publish a stop command; return its id (SH-5). With ``keep_data`` workers keep ``SHIVA_DATA``.

        Raises:
            UnknownApplication: neither the last document nor a later start command has it.
            RegistryUnavailable: the log could not be written; the stop had no effect.
        """
        return self.stop_all([application], keep_data=keep_data).of(application)

    @abstractmethod
    def stop_all(self, applications: Sequence[ApplicationId], *, keep_data: bool = False) -> Commanded:
        """Stop many applications as ``stop`` does each, in this order.

        An application that ``stop`` would refuse is left out, and all others are stopped.

        Raises:
            RegistryUnavailable, OutcomeUnknown: not all commands were written; some may have an effect.
        """

    def restart(self, application: ApplicationId) -> CommandId:
        """Start an application anew, from its archive on the log; return the command's id (SH-4).

        Tags and mode stay, its failures are forgotten. If several clients publish commands at the same time,
        the last one on the log wins (SH-2).

        Raises:
            UnknownApplication: the last document does not have it, or a later stop command does.
            ApplicationFailed: its start was refused, so that the log does not keep its archive.
            RegistryUnavailable: the log could not be written; the restart had no effect.
        """
        return self.restart_all([application]).of(application)

    @abstractmethod
    def restart_all(self, applications: Sequence[ApplicationId]) -> Commanded:
        """Restart many applications as ``restart`` does each, in this order.

        An application that ``restart`` would refuse is left out, and all others are restarted.

        Raises:
            RegistryUnavailable, OutcomeUnknown: not all commands were written; some may have an effect.
        """

    @abstractmethod
    def scale(self, application: ApplicationId, replicas: int) -> CommandId:
        """Run another number of replicas of an application; return the command's id (SH-28).

        More are started from the archive on the log, or those with the greatest numbers are stopped. The
        others go on. A later ``start`` has a number of its own, a ``restart`` keeps it.

        Raises:
            UnknownApplication: the last document does not have it, or a later stop command does.
            InvalidName: the number is invalid.
            ApplicationFailed: its start was refused, so that the log does not keep its archive.
            RegistryUnavailable: the log could not be written; the command had no effect.
        """

    @abstractmethod
    def applications(self, timeout_s: float) -> dict[ApplicationId, ApplicationState]:
        """Return all applications, also those whose start no leader has read yet (SH-25).

        One whose last command no leader has read yet is ``waiting`` after a start, ``stopping`` after a stop.
        All others are as in the last document; one with replicas is as its first one.

        Raises:
            RegistryUnavailable: the topics could not be read to their ends within ``timeout_s``.
        """

    @abstractmethod
    def read(self, timeout_s: float) -> AssignmentDocument | None:
        """Return the last document on ASSIGNEMENT, from which status is made; None before any (SH-11).

        Raises:
            RegistryUnavailable: the topic could not be read to its end within ``timeout_s``.
        """

    @abstractmethod
    def heard(self, timeout_s: float) -> LastHeard:
        """Return the last ping and the last pong of each worker on CONTROL, with their ages (SH-20).

        Raises:
            RegistryUnavailable: the topic could not be read to its end within ``timeout_s``.
        """

    @abstractmethod
    def documents(
        self, timeout_s: float | None = None, repeat_s: float | None = None
    ) -> Iterator[AssignmentDocument]:
        """Yield the last document and newer ones as they come, for ``timeout_s`` seconds; None for ever.

        With ``repeat_s`` the last one is repeated each ``repeat_s`` seconds until a newer one comes.
        """

    @abstractmethod
    def watch(self, timeout_s: float) -> DocumentWatch:
        """Read the last document, and follow the log from there without asking again where it ends.

        Raises:
            RegistryUnavailable: the topic could not be read to its end within ``timeout_s``.
        """

    def wait(
        self,
        application: ApplicationId,
        command: CommandId,
        timeout_s: float,
        on_document: OnDocument = lambda _document: None,
    ) -> ApplicationEntry | None:
        """Wait until the application runs or has finished; after a stop, until it is gone (None).

        It waits for all replicas, and returns the entry of the first one (SH-28).

        Raises:
            NotSettled: not within ``timeout_s``; the message says its state and why.
            ApplicationFailed: it failed wherever it could be placed, or was refused; with the reason.
            Superseded: a later command of another client has replaced this one.
        """
        return self.wait_all({application: command}, timeout_s, on_document)[application]

    @abstractmethod
    def wait_all(
        self,
        commands: Mapping[ApplicationId, CommandId],
        timeout_s: float,
        on_document: OnDocument = lambda _document: None,
    ) -> dict[ApplicationId, ApplicationEntry | None]:
        """Wait for the effects of many commands as ``wait`` does for each.

        A connection knows when a leader has read the commands of its last call, and 20,000 before them. A
        start of another connection that no leader has read yet counts as an application that is gone.

        Raises:
            NotSettled: not all within ``timeout_s``; the message says how many, and the state of one of them.
            ApplicationFailed: all others have their effect; the message names the first that have not.
        """

    @abstractmethod
    def cordon(self, worker: WorkerId, cordon: Cordon | None) -> CommandId:
        """Cordon or drain a worker, or end both with None; return the command's id (SH-26).

        It outlasts leaders and the worker's process.

        Raises:
            UnknownWorker: the last document does not have it.
            RegistryUnavailable: the log could not be written; the command had no effect.
        """

    @abstractmethod
    def wait_cordoned(
        self,
        worker: WorkerId,
        cordon: Cordon | None,
        timeout_s: float,
        on_document: OnDocument = lambda _document: None,
        command: CommandId = "",
    ) -> None:
        """Wait until a worker is cordoned, or drained and runs nothing any more, or, with None, is neither.

        ``command`` is what ``cordon`` returned: an earlier state does not count until a leader has read it.

        Raises:
            NotSettled: not within ``timeout_s``; the message says what it still runs.
        """

    @abstractmethod
    def output(
        self, application: ApplicationId, lines: int, timeout_s: float, worker: WorkerId | None = None
    ) -> OutputAnswer:
        """Ask a worker for the last lines of an application's output; default: the one that has it (SH-17).

        Raises:
            UnknownApplication: no worker was given, and the last document does not have the application.
            FixConfiguration: no worker has it and none was given, or the worker keeps no output of it.
            NotSettled: the worker has not answered within ``timeout_s``.
        """

    @abstractmethod
    def follow_output(
        self, application: ApplicationId, lines: int, timeout_s: float, worker: WorkerId | None = None
    ) -> Iterator[OutputAnswer]:
        """Ask for an application's last output, and for what it prints from then on (SH-17).

        It follows the worker that was asked first until it is closed, even if the application moves. If the
        application prints more than can be sent, the oldest lines are left out and counted.

        Raises:
            UnknownApplication, FixConfiguration: as ``output``.
            NotSettled: the worker has not answered for ``timeout_s``.
        """

    @abstractmethod
    def run_leader(
        self, leader: LeaderId, options: LeaderOptions, history: HistorySink | None = None
    ) -> Running:
        """Run a candidate for leading; at most one of all candidates is the active leader (SH-3).

        ``history`` takes the records of what it does, and is closed when it ends; see
        ``rebalanser.history.open_sinks``.

        Raises:
            FixConfiguration: a person must change the topics or the broker.
            RegistryUnavailable: the broker did not answer within the time to connect.
        """

    @abstractmethod
    def run_worker(
        self, worker: WorkerId, data: Path, options: WorkerOptions, history: HistorySink | None = None
    ) -> Running:
        """Store and run applications in the folder ``data``, which one worker locks at a time.

        ``history`` takes the records of what it does, and is closed when it ends.

        Raises:
            FixConfiguration: a person must change the folder, the topics or the broker.
            RegistryUnavailable: the broker did not answer within the time to connect.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Leaders and workers that run go on. Closing twice does nothing."""


OpenCluster: TypeAlias = Callable[[RegistryUrl, float, TopicNames], Cluster]
"""``open(url, timeout_s, topics)``: a cluster whose broker has answered once within ``timeout_s`` seconds."""


def open_cluster(url: str, timeout_s: float, topics: TopicNames | None = None) -> Cluster:
    """Connect to the cluster at ``url``, such as ``kafka://HOST:PORT/CLUSTER``.

    Raises:
        UnknownScheme: no backend has this scheme.
        MissingExtra: the backend's packages are not installed.
        InvalidName: a topic of ``topics`` has the default name of another one.
        RegistryUnavailable: no answer within ``timeout_s`` seconds; the message says what was tried.
    """
    parsed = parse_url(url)
    opener: OpenCluster = load_opener(parsed.scheme, ENTRY_POINT_GROUP)
    return opener(parsed, timeout_s, topics or TopicNames())
