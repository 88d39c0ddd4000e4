"""Keeps a group's resource list, in any registry, equal to the running applications of a cluster (SH-19).

A feed touches only what it fed itself: each resource that it adds carries its mark and the epoch of the
document that named it. What operators added is left alone, whatever it is called.

**What never happens.** A source that is away, or not read to its end, changes nothing. A document older than
the newest that was fed undoes nothing: the newest epoch stands at the resources themselves, so that it
outlives the feed; where that lasts, as after the source's topics were made anew, the feed says so and what
to do. Two feeds of the same source do no lasting harm: one that lags behind may add what has
just been stopped, or, where nothing newer stands, remove what has just been started, and the next look of
either puts that right.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

import tenacity

from rebalanser.admin import Admin
from rebalanser.core.shiva.records import AssignmentDocument
from rebalanser.core.shiva.types import ApplicationState
from rebalanser.errors import InvalidState, RebalanserError, RetryLater
from rebalanser.redaction import redact
from rebalanser.registry.urls import load_opener, parse_url
from rebalanser.runtime.logs import get_logger
from rebalanser.settings import Settings
from rebalanser.shiva.cluster import ENTRY_POINT_GROUP, Cluster, DocumentWatch, open_cluster
from rebalanser.state import ResourceState

FED_BY: Final = "fed-by"
"""The attribute that names the feed of a resource."""
FED_EPOCH: Final = "fed-epoch"
"""The attribute that names the document by which a resource was fed last."""
STARTED: Final = frozenset(
    {
        ApplicationState.WAITING,
        ApplicationState.MOVING,
        ApplicationState.ASSIGNED,
        ApplicationState.RUNNING,
    }
)
"""The states of applications that were started and have neither been stopped nor ended."""
STEP_S: Final = 0.5
"""Maximum seconds of one wait for the source, and so of the delay of a stop."""
LOOKS: Final = 60
"""Number of steps without a change after which source and group are compared anyway."""
RETRY_MAX_S: Final = 30.0

DocumentEpoch: TypeAlias = tuple[int, int]

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Applications:
    """Running applications by one complete document of a cluster's leader."""

    epoch: DocumentEpoch
    names: frozenset[str]


class ApplicationSource(Protocol):
    """Source of a feed: reads the running applications."""

    @property
    def name(self) -> str:
        """The same for every connection to the same cluster, and for no other one."""

    def read(self, timeout_s: float) -> Applications | None:
        """Return the running applications by the last document, None before the first.

        Raises:
            RetryLater: the source could not be read to its end within ``timeout_s`` seconds.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until there may be a new document, at most ``timeout_s`` seconds; whether there may be."""

    def close(self) -> None:
        """Close the connection."""


def started_applications(document: AssignmentDocument) -> Applications:
    """The applications of a document that were started and have neither been stopped nor ended."""
    return Applications(
        epoch=(document.epoch.term, document.epoch.number),
        names=frozenset(
            str(application.whole)
            for application, entry in document.applications.items()
            if entry.state in STARTED
        ),
    )


class ClusterSource:
    """A Shiva cluster as a source."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._watch: DocumentWatch | None = None
        self._seen: DocumentEpoch | None = None

    @property
    def name(self) -> str:
        """The cluster's identity."""
        return self._cluster.identity

    def read(self, timeout_s: float) -> Applications | None:
        """Return the running applications by the last document; see ``ApplicationSource``."""
        document = self._cluster.read(timeout_s)
        if document is None:
            return None
        applications = started_applications(document)
        self._seen = applications.epoch
        return applications

    def wait(self, timeout_s: float) -> bool:
        """Follow the cluster's documents; see ``ApplicationSource``.

        Where they cannot be followed any more, ``read`` says why, or the next call follows them anew.
        """
        if self._watch is None:
            self._watch = self._cluster.watch(self._timeout_s)
            if self._is_another(self._watch.document):
                return True
        try:
            return self._watch.wait(timeout_s) and self._is_another(self._watch.document)
        except RebalanserError:
            self._end_watch()
            return True

    def _is_another(self, document: AssignmentDocument | None) -> bool:
        return document is not None and (document.epoch.term, document.epoch.number) != self._seen

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def close(self) -> None:
        """Close the connection."""
        self._end_watch()
        self._cluster.close()


@dataclass(frozen=True, slots=True)
class ResourceChanges:
    """Changes of a group's resource list."""

    add: frozenset[str] = frozenset()
    remove: frozenset[str] = frozenset()
    mark: str | None = None
    """A resource that stays, to be marked with the epoch of a document that only removes."""

    def __bool__(self) -> bool:
        return bool(self.add or self.remove)


def changes_for(applications: Applications, present: Iterable[ResourceState], feed: str) -> ResourceChanges:
    """Return the changes after which the resources added by ``feed`` are the running applications.

    There are none if a newer document has fed the list. Resources added by others are never touched.
    """
    theirs: set[str] = set()
    mine: dict[str, DocumentEpoch] = {}
    for state in present:
        if state.removed:
            continue
        epoch = _fed_epoch(state.attributes, feed)
        if epoch is None:
            theirs.add(state.resource)
        else:
            mine[state.resource] = epoch
    if any(epoch > applications.epoch for epoch in mine.values()):
        return ResourceChanges()
    stays = applications.names & mine.keys()
    add = applications.names - mine.keys() - theirs
    remove = frozenset(mine.keys() - applications.names)
    return ResourceChanges(add, remove, min(stays) if remove and stays and not add else None)


def newest_fed(present: Iterable[ResourceState], feed: str) -> DocumentEpoch | None:
    """The newest document that ``feed`` fed and that still stands at a resource."""
    epochs = (_fed_epoch(state.attributes, feed) for state in present if not state.removed)
    return max((epoch for epoch in epochs if epoch is not None), default=None)


def _fed_epoch(attributes: Mapping[str, str], feed: str) -> DocumentEpoch | None:
    """The epoch at which this feed fed the resource; None where it did not."""
    if attributes.get(FED_BY) != feed:
        return None
    term, _, number = attributes.get(FED_EPOCH, "").partition(".")
    return (int(term), int(number)) if term.isdigit() and number.isdigit() else (0, 0)


class ResourceFeed:
    """Keeps the resources of ``group`` at ``target_url`` equal to the applications running at ``source_url``.

    ``source_url`` names a Shiva cluster, such as ``kafka://HOST:PORT/CLUSTER``, or is a source of one's own.
    Both sides may go away and come back at any time: it tries again, after a growing delay of at most 30 s.
    ``run`` it in this thread, or ``start`` and ``stop`` it, or use it as a context manager.

    Raises:
        InvalidUrl: the source's URL is none.
    """

    def __init__(
        self,
        source_url: str | ApplicationSource,
        group: str,
        target_url: str,
        *,
        settings: Settings | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._source = source_url
        if isinstance(source_url, str):
            parse_url(source_url)
        parse_url(target_url)
        self._group = group
        self._target_url = target_url
        self._settings = settings or Settings()
        self._timeout_s = timeout_s
        self._newest: DocumentEpoch | None = None
        self._behind: DocumentEpoch | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to feed, in a thread of its own, and return at once.

        Raises:
            InvalidState: it runs already.
            UnknownScheme: no backend has the scheme of one of the URLs.
            MissingExtra: the packages of a backend are not installed.
        """
        if self._thread is not None:
            raise InvalidState(f"the feed of group {self._group!r} runs already")
        self._load_backends()
        self._stopping.clear()
        self._failure = None
        self._thread = threading.Thread(
            target=self._run_aside, name=f"rebalanser-feed-{self._group}", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a feed that was started has ended by itself; True if it has."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop feeding; the resources stay. Stopping twice does nothing.

        What is under way, such as an attempt to connect, is waited for, ``timeout_s`` seconds at most where
        given; after that it ends by itself.

        Raises:
            FixConfiguration: the feed has ended by itself, and a person must change something.
        """
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                return
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def request_stop(self) -> None:
        """Ask it to stop, and return at once; may be called from a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Feed in this thread until ``request_stop``.

        Raises:
            FixConfiguration: a name, a URL, the source or the registry has to be changed by a person.
        """
        self._load_backends()
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(RetryLater),
            stop=tenacity.stop_when_event_set(self._stopping),
            wait=tenacity.wait_exponential(multiplier=0.2, max=RETRY_MAX_S) + tenacity.wait_random(0, 0.2),
            sleep=self._pause,
            before_sleep=self._warn,
            reraise=True,
        )
        while not self._stopping.is_set():
            try:
                attempts(self._feed_until_failure)
            except RetryLater:
                if not self._stopping.is_set():
                    raise

    def _load_backends(self) -> None:
        if isinstance(self._source, str):
            load_opener(parse_url(self._source).scheme, ENTRY_POINT_GROUP)
        load_opener(parse_url(self._target_url).scheme)

    def _run_aside(self) -> None:
        try:
            self.run()
        except Exception as error:
            self._failure = error
            _log.error("the feed has ended", action="feed_ended", group=self._group, error=redact(str(error)))

    def _pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def _warn(self, attempt: tenacity.RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome is not None else None
        _log.warning(
            "the feed changes nothing until source and registry answer",
            action="feed_waits",
            group=self._group,
            error=redact(str(error)),
        )

    def _feed_until_failure(self) -> None:
        with ExitStack() as stack:
            source = self._opened_source(stack)
            if self._stopping.is_set():
                return
            admin = stack.enter_context(
                Admin(self._group, self._target_url, settings=self._settings, timeout_s=self._timeout_s)
            )
            while not self._stopping.is_set():
                self._feed(source, admin)
                self._wait(source)

    def _opened_source(self, stack: ExitStack) -> ApplicationSource:
        if not isinstance(self._source, str):
            return self._source
        cluster = open_cluster(self._source, self._timeout_s)
        source = ClusterSource(cluster, self._timeout_s)
        stack.callback(source.close)
        return source

    def _wait(self, source: ApplicationSource) -> None:
        """Until the source may have changed, or it is time to look; in steps, so that a stop is not late."""
        for _ in range(LOOKS):
            if self._stopping.is_set() or source.wait(STEP_S):
                return

    def _feed(self, source: ApplicationSource, admin: Admin) -> None:
        applications = source.read(self._timeout_s)
        if applications is None:
            return
        if self._newest is not None and applications.epoch < self._newest:
            self._warn_if_behind(applications.epoch, self._newest)
            return
        feed = f"shiva:{source.name}"
        present = admin.state().resources
        self._warn_if_behind(applications.epoch, newest_fed(present, feed))
        changes = changes_for(applications, present, feed)
        term, number = applications.epoch
        marks = {FED_BY: feed, FED_EPOCH: f"{term}.{number}"}
        if changes.mark is not None:
            # Before the removal: else a feed that lags behind could not see that it does.
            admin.add(changes.mark, attributes=marks)
        if changes.remove:
            admin.remove(sorted(changes.remove))
        if changes.add:
            admin.add(sorted(changes.add), attributes=marks)
        if changes:
            _log.info(
                "fed",
                action="fed",
                group=self._group,
                epoch=f"{term}.{number}",
                added=len(changes.add),
                removed=len(changes.remove),
            )
        self._newest = applications.epoch

    def _warn_if_behind(self, epoch: DocumentEpoch, fed: DocumentEpoch | None) -> None:
        if fed is None or fed <= epoch or self._behind == fed:
            return
        self._behind = fed
        _log.warning(
            "the source's last document is older than what was fed, and changes nothing; if the source was "
            "made anew, remove the resources that were fed from it and start the feed again",
            action="feed_behind",
            group=self._group,
            epoch=f"{epoch[0]}.{epoch[1]}",
            fed=f"{fed[0]}.{fed[1]}",
        )
