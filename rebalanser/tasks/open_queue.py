"""A queue at its engine, which is opened when it is first needed."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rebalanser import folders, forks
from rebalanser.core.clock import Clock
from rebalanser.core.tasks.failures import LoopFailure
from rebalanser.core.tasks.model import EnqueueAnswer, Stored, TaskId, is_seconds
from rebalanser.core.tasks.retention import Retention
from rebalanser.errors import InvalidArgument, RetryLater, UnknownQueue, UnknownTask
from rebalanser.group import default_label
from rebalanser.history.journal import boot
from rebalanser.registry.keys import check_name
from rebalanser.registry.urls import RegistryUrl, url_or_default
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.logs import get_logger
from rebalanser.settings import Settings
from rebalanser.tasks import pauses, waiting
from rebalanser.tasks.ancestry import Ancestry
from rebalanser.tasks.context import Context, OpenedQueue, QueueOpener, TaskHistory, load_engine
from rebalanser.tasks.execution.bodies import Middleware
from rebalanser.tasks.functions import TaskBody, is_count, require_id, require_revision
from rebalanser.tasks.id_files import IdSource
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.metrics import TaskMetrics
from rebalanser.tasks.outbox import Outbox, engine_name
from rebalanser.tasks.pauses import Pauses
from rebalanser.tasks.periodic import Schedule

IN_MEMORY: Final = "memory://"
DEFAULT_NAME: Final = "tasks"
"""Name of a queue that was given a URL only."""
DEFAULT_PARTITIONS: Final = 16
BUFFER_RATIO: Final = 0.1
"""Default of ``buffer_s``, relative to ``claim_ttl_s``."""
_DEFAULT_RETENTION: Final = Retention()
_log = get_logger()


class OpenQueue(ABC):
    """A queue's connection to its engine: opened when it is first needed, and again after a fork."""

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        claim_ttl_s: float = 30.0,
        buffer_s: float | None = None,
        partitions: int = DEFAULT_PARTITIONS,
        settings: Settings | None = None,
        node: str | None = None,
        middleware: Sequence[Middleware] = (),
        timeout_s: float = 10.0,
        state_folder: Path | None = None,
        create: bool = True,
        outbox: Path | None = None,
        clock: Clock | None = None,
        retention: Retention | None = _DEFAULT_RETENTION,
    ) -> None:
        refuse_options(
            claim_ttl_s=claim_ttl_s,
            buffer_s=buffer_s,
            partitions=partitions,
            settings=settings,
            node=node,
            middleware=middleware,
            timeout_s=timeout_s,
            state_folder=state_folder,
            create=create,
            outbox=outbox,
            clock=clock,
            retention=retention,
        )
        name, url = name_and_url(name, url)
        self.name = check_name(name, "queue")
        self.retention = retention
        """Retention of closed tasks; counts from the next start on (SK-22)."""
        self._url = url
        self._timeout_s = timeout_s
        self._buffer_s = claim_ttl_s * BUFFER_RATIO if buffer_s is None else buffer_s
        self._settings = settings or Settings()
        self._node = node
        self._middleware = tuple(middleware)
        self.functions: dict[str, TaskBody] = {}
        """The functions that are registered, by name."""
        self._schedules: list[Schedule] = []
        self._ids_folder = (state_folder or folders.state_folder()) / "flakes"
        self._engine_url, self._opener = load_engine(url)
        self._outbox_folder = outbox
        self._count_on(clock)
        self._warned: set[str] = set()
        self._is_closed = False
        self._has_left_worker = False
        """True in a child whose parent has a worker, until that is logged."""

        def opened(within_s: float | None) -> OpenedQueue:
            limit_s = timeout_s if within_s is None else min(timeout_s, within_s)
            if self._has_left_worker:
                self._has_left_worker = False
                _log.warning(
                    "the worker of this queue runs in the parent of this process, and not here",
                    action="tasks_worker_not_forked",
                    queue=name,
                )
            engine = self._opener(self._engine_url, limit_s)
            try:
                if not create:
                    _refuse_unknown(name, engine.queues(limit_s), self._engine_url)
                number = engine.define(name, partitions, limit_s)
                for reason in engine.capabilities.unsafe_reasons if create else ():
                    _log.warning(reason, action="unsafe_engine", queue=name)
                context = Context(
                    engine,
                    name,
                    clock=self._clock,
                    clock_name="" if self._has_own_clock else boot() or "",
                    ttl_s=claim_ttl_s,
                    timeout_s=timeout_s,
                    history=TaskHistory.opened(name, self._label, self._settings, self._clock),
                    errors=self.errors,
                    metrics=self.metrics,
                )
            except BaseException:
                engine.close()
                raise
            return OpenedQueue(context, number, Ancestry(context.read))

        self._open_engine = opened
        self._begin()
        if self._opened_outbox() is None:
            self._opening.opened()
        forks.in_child(self._forked)

    def _count_on(self, clock: Clock | None) -> None:
        """Use a clock, that of the host if None, also for ids.

        Ids of another clock than the host's keep no marks: these would set the times of the host's ids.
        """
        _require_clock(clock)
        self._has_own_clock = clock is not None
        self._clock: Clock = clock or SystemClock()
        if clock is None:
            self._ids = IdSource(self._ids_folder)
        else:
            self._ids = IdSource(None, lambda: int(clock.wall() * 1000))

    def _begin(self) -> None:
        """Set up the state of a process that uses the queue for the first time."""
        self._label = self._node or default_label()
        self.errors = ErrorPolicy(self.name, self._clock, self._end_process)
        """Policy for errors of this process's loops."""
        self.metrics = TaskMetrics()
        """Counts this process's tasks."""
        self.notifier = waiting.CompletionNotifier(lambda: self.context)
        """Notifies callers that wait for tasks."""
        self._opening = QueueOpener(self._open_engine)
        self._outbox: Outbox | None = None
        self._outbox_opening = threading.Lock()

    def _opened_outbox(self) -> Outbox | None:
        """Return the outbox of this process, opened at its first use; None if the queue has none."""
        if self._outbox_folder is None or self._outbox is not None:
            return self._outbox
        with self._outbox_opening:
            if self._outbox is None:
                is_away = self._is_away()
                try:
                    outbox = Outbox(
                        self._outbox_folder,
                        self.name,
                        self._engine_url,
                        self._opening,
                        self._timeout_s,
                        self.errors,
                    )
                except BaseException:
                    self._opening.close()
                    raise
                outbox.start(is_away=is_away)
                self._outbox = outbox
            return self._outbox

    def _is_away(self) -> bool:
        """True if the engine can't be opened now."""
        try:
            self._opening.opened()
        except RetryLater:
            return True
        return False

    @property
    def url(self) -> str:
        """The URL of its registry."""
        return self._url

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self._url!r})"

    @property
    def context(self) -> Context:
        """State that this process shares with its claims of the queue."""
        return self._opening.opened().context

    @property
    def troubles(self) -> tuple[LoopFailure, ...]:
        """Failures in this process that are retried now, such as claiming while the engine is away.

        Empty if all is well. An unforeseen error that lasts for 60 s ends the process, see
        ``start``.
        """
        return self.errors.troubles

    @property
    def partition_count(self) -> int:
        """Number of partitions that the queue was made with."""
        return self._opening.opened().partitions

    def get(self, task: TaskId, *, at_least: int = 0) -> Stored:
        """Return a task as it is now, or at revision ``at_least`` or later (SK-11).

        Raises:
            UnknownTask: there is no task of this id.
            InvalidArgument: ``task`` is not text.
            UnusableStore: the store has not seen that revision.
            RegistryUnavailable: the engine did not answer in time.
        """
        require_id(task)
        require_revision(at_least)
        return self.get_within(self._timeout_s, task, at_least)

    def get_within(self, timeout_s: float, task: TaskId, at_least: int = 0) -> Stored:
        """``get``, within ``timeout_s`` seconds."""
        found = self.context.engine.read(self.name, [task], timeout_s, at_least=at_least).get(task)
        if found is None:
            raise UnknownTask(f"there is no task {task} in queue {self.name!r}")
        return found

    def find_within(self, timeout_s: float, task: TaskId) -> Stored | None:
        """``get_within``; None of a task in an outbox that the engine does not have yet."""
        try:
            return self.get_within(timeout_s, task)
        except UnknownTask:
            if getattr(task, "answer", None) is not EnqueueAnswer.SPOOLED:
                raise
            return None

    def wait_limit(self, timeout_s: float) -> waiting.WaitLimit:
        """Return the limit of the requests of a wait that begins now; opens the engine within it."""
        limit = waiting.WaitLimit(timeout_s, self._timeout_s)
        self._opening.opened(limit.request_s)
        return limit

    def pauses(self) -> Pauses:
        """Read the pauses in force: of the queue itself, and of its schedules by function (SK-23)."""
        return Pauses.of(pauses.read_pauses(self.context))

    @abstractmethod
    def _end_process(self) -> None:
        """End a process whose loops can't go on."""

    @abstractmethod
    def _forked(self) -> None:
        """Forget the parent's state in a forked child."""


def _refuse_unknown(name: str, queues: Iterable[str], url: RegistryUrl) -> None:
    """Check that a queue exists, so that a mistyped name makes none."""
    known = sorted(queues)
    if name not in known:
        raise UnknownQueue(
            f"there is no queue {name!r} in {url if url.hosts else engine_name(url)}; "
            + (f"there are: {', '.join(known)}" if known else "there is none at all")
        )


def _refuse_times(claim_ttl_s: float, buffer_s: float | None, timeout_s: float) -> None:
    if not is_seconds(claim_ttl_s) or claim_ttl_s == 0:
        raise InvalidArgument(
            f"claim_ttl_s is how many seconds a claim lasts, more than 0, not {claim_ttl_s!r}"
        )
    if buffer_s is not None and not is_seconds(buffer_s):
        raise InvalidArgument(f"buffer_s is a number of seconds, 0 or more, not {buffer_s!r}")
    if not is_seconds(timeout_s) or timeout_s == 0:
        raise InvalidArgument(
            f"timeout_s is how many seconds a call may take, more than 0, not {timeout_s!r}"
        )


def refuse_options(
    *,
    claim_ttl_s: float,
    buffer_s: float | None,
    partitions: object,
    settings: object,
    node: object,
    middleware: object,
    timeout_s: float,
    state_folder: object,
    create: object,
    outbox: object,
    clock: object,
    retention: object,
) -> None:
    """Refuse options of a wrong type at once: otherwise they fail later, in a thread of the worker.

    Raises:
        InvalidArgument: an option is of a wrong type, or a time is out of range; the message names it.
    """
    _refuse_times(claim_ttl_s, buffer_s, timeout_s)
    if not isinstance(middleware, list | tuple) or any(isinstance(each, type) for each in middleware):
        raise InvalidArgument(
            f"middleware is {_shown(middleware)}: give a list of objects, such as [Reports()], not classes"
        )
    for option, folder in (("outbox", outbox), ("state_folder", state_folder)):
        if folder is not None and not isinstance(folder, Path):
            raise InvalidArgument(f"{option} is {folder!r}: give a folder as pathlib.Path, or None")
    if settings is not None and not isinstance(settings, Settings):
        raise InvalidArgument(f"settings are {_shown(settings)}: give rebalanser.Settings(…), or None")
    if node is not None and not isinstance(node, str):
        raise InvalidArgument(f"node is {node!r}: give a text, the label of this process, or None")
    if not isinstance(create, bool):
        raise InvalidArgument(f"create is {create!r}: give True or False")
    _require_clock(clock)
    if retention is not None and not isinstance(retention, Retention):
        raise InvalidArgument(
            f"retention is {retention!r}: give Retention(completed_s=…), or None to keep all tasks"
        )
    if not is_count(partitions, 1):
        raise InvalidArgument(f"partitions is {partitions!r}: give a number of partitions, 1 or more")


def _require_clock(clock: object) -> None:
    if clock is not None and (isinstance(clock, type) or not hasattr(clock, "wall")):
        raise InvalidArgument(f"clock is {_shown(clock)}: give a clock, such as FakeClock(), or None")


def _shown(given: object) -> str:
    """Return a value for a message, a class by its name."""
    return f"the class {given.__name__}" if isinstance(given, type) else repr(given)


def name_and_url(name: str, url: str | None) -> tuple[str, str]:
    """Return the name and the URL of a queue, which may be given its URL alone.

    Raises:
        InvalidUrl: there is no URL, nor one in ``REBALANSER_REGISTRY``.
    """
    given: object = name
    if url is None and isinstance(given, str) and "://" in name:
        name, url = DEFAULT_NAME, name
    return name, named_in_memory(url_or_default(url))


def named_in_memory(url: str) -> str:
    """Return the URL; a store in memory without a name gets a unique one."""
    return f"{url}~{secrets.token_hex(8)}" if url == IN_MEMORY else url
