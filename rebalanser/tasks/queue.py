"""The queue: what a host application holds to enqueue tasks, to work on them and to look at them."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from rebalanser import folders, forks
from rebalanser.admin import Admin
from rebalanser.errors import (
    InvalidArgument,
    InvalidHandlers,
    InvalidState,
    InvalidTask,
    RebalanserError,
    RegistryUnavailable,
    RetryLater,
    UnknownQueue,
    UnknownTask,
)
from rebalanser.group import Group, default_label
from rebalanser.history.journal import boot
from rebalanser.protocol import Fact, FactKind
from rebalanser.registry.contract import Settles
from rebalanser.registry.keys import check_name
from rebalanser.registry.urls import RegistryUrl, url_or_default
from rebalanser.runtime.clock import Clock, SystemClock
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.running import run_until_stopped
from rebalanser.settings import Settings
from rebalanser.tasks import pauses, rules, waiting
from rebalanser.tasks.ancestry import Ancestry, with_blockers
from rebalanser.tasks.asks import EnqueueAsk, MoveAsk
from rebalanser.tasks.bodies import Bodies, Caller, ThreadCaller
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.claim_source import ClaimSource, IndexClaims
from rebalanser.tasks.collection import Archive, Collected, collect
from rebalanser.tasks.context import Context, TaskHistory
from rebalanser.tasks.engine import (
    ClaimsFromIndex,
    Duplicate,
    Engine,
    Enqueue,
    EnqueueAll,
    Exists,
    Unknown,
    enqueued,
)
from rebalanser.tasks.functions import (
    FAR_FUTURE_S,
    NO_OPTIONS,
    EnqueueOptions,
    GivenOptions,
    GivenTaskOptions,
    TaskBody,
    TaskOptions,
    chosen_options,
    dependencies,
    refuse_no_expression,
    refuse_required,
    task_name,
    task_options,
)
from rebalanser.tasks.id_files import Flakes
from rebalanser.tasks.ids import born_at, first_of, partition_of, place_of
from rebalanser.tasks.inline import InlineWorker
from rebalanser.tasks.loops import ErrorPolicy, Trouble
from rebalanser.tasks.metrics import Measurement, TaskMetrics
from rebalanser.tasks.middleware import Middleware
from rebalanser.tasks.model import EnqueueAnswer, Enqueued, Head, State, Status, Stored, Task, TaskId, Update
from rebalanser.tasks.opening import Opened, Opening, load_engine
from rebalanser.tasks.outbox.outbox import Outbox, engine_name
from rebalanser.tasks.outbox.spool import UNPLACED
from rebalanser.tasks.partitions import Partitions
from rebalanser.tasks.pauses import Pause, Pauses
from rebalanser.tasks.periodic import KEPT_S, Schedule, Ticker
from rebalanser.tasks.results import PlannedCall, in_order, refuse_too_many
from rebalanser.tasks.retention import MIN_AGE_S, STEP, Record, Retention, Sweeper
from rebalanser.tasks.rules import Decision, Refused
from rebalanser.tasks.sharing import SharedConcurrency
from rebalanser.tasks.status import QueueStatus, WorkerNote, workers_of
from rebalanser.tasks.worker import Worker

IN_MEMORY: Final = "memory://"
ALONE: Final = "tasks"
"""Name of a queue that was given a URL only."""
PARTITIONS: Final = 16
BUFFER_RATIO: Final = 0.1
GRACE_S: Final = 30.0
MAX_WARNED: Final = 100
"""Maximum number of names without a function that are warned about."""
MAX_SHOWN: Final = 20
CHANGED_AT_ONCE: Final = 500
"""Number of tasks that are cancelled or requeued together."""
NEWEST_S: Final = 1.0
"""Seconds back from now within which the newest tasks are looked for first."""
FARTHER: Final = 8.0
"""So many times as far back they are looked for next."""
EXIT_CODE: Final = 70
"""Of a process that ends as a loop of its queue fails for a reason that nobody foresaw: EX_SOFTWARE."""
EXIT_LIMIT_S: Final = 2 * GRACE_S
"""Seconds within which such a process ends, whatever stopping gracefully comes to."""
RETRIES: Final = int(TaskOptions().retries)
"""How often a task whose function is not known here is tried again, unless it is said."""

BodyPlace: TypeAlias = Literal["threads", "processes"]
"""Where bodies run: in threads of the worker, or in processes of their own, which can be ended."""
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
_DEFAULT_RETENTION: Final = Retention()
_log = get_logger()
NO_WORKER: Final = "; no worker has reported itself: start one, or in a test call run_until_idle()"


class TaskFunction(Generic[P, R]):
    """A function whose calls can be enqueued; calling it calls the function itself, with a claim.

    ``P`` are its parameters after the claim, ``R`` is what it returns, or its coroutine.
    """

    def __init__(self, queue: Queue, body: TaskBody, options: EnqueueOptions = NO_OPTIONS) -> None:
        self._queue = queue
        self._options = options
        self.body = body
        """The function itself, and how its arguments are stored."""
        self.name = body.name
        """The name under which its tasks are stored."""

    def __call__(self, claim: Claim, *arguments: P.args, **named: P.kwargs) -> Any:
        """Call the function, as in a test; a coroutine function gives a coroutine."""
        return self.body.function(claim, *arguments, **named)

    def options(self, **options: Unpack[GivenOptions]) -> TaskFunction[P, R]:
        """The function with options for the tasks that are enqueued by what this returns.

        These are the fields of :class:`~rebalanser.tasks.functions.EnqueueOptions`: ``delay_s``, ``after``,
        ``after_failure``, ``priority``, ``task_id``, ``waits_for_unknown``, ``unique_key``, ``unique_for_s``,
        ``key``. They replace those given before.

        Raises:
            InvalidTask: an option is unknown or out of range.
        """
        return TaskFunction(self._queue, self.body, chosen_options(self.name, options))

    def call(self, *arguments: P.args, **named: P.kwargs) -> Call[R]:
        """A call with these arguments that is not enqueued yet.

        Its ``result`` may be an argument of another call, which then waits for this one; see :class:`Call`.
        """
        return Call(self._queue, self.body, self._options, arguments, named)

    def enqueue(self, *arguments: P.args, **named: P.kwargs) -> Enqueued[R]:
        """Enqueue a call with these arguments; the task's id, once the engine has it for good (SK-3).

        With an outbox it may be on this host's disk only: ``answer`` of what is returned says so (SK-4). It
        is ``duplicate``, and the id that of an earlier task, if that one keeps this one out: see
        ``unique_key`` (SK-23).
        :meth:`options` says when and how, such as ``send.options(delay_s=5).enqueue("a@example.org")``. An
        argument may be the ``result`` of a task that is enqueued, or a list of results.

        Raises:
            InvalidTask: the arguments don't fit the function.
            TaskExists: the id is taken by other content.
            UnknownTask: it is to come after a task that does not exist.
            DependencyCycle: it would wait for itself.
            RequestTooLarge: the arguments are over the engine's limit.
            RegistryUnavailable: the engine is away; nothing was enqueued.
            OutcomeUnknown: nobody knows whether it was; enqueue the same ``task_id`` again.
            UnusableFolder: the outbox can't be written; nothing was enqueued.
        """
        return self.enqueue_many([(arguments, named)])[0]

    def enqueue_many(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Enqueued[R]]:
        """Enqueue many calls, each as positional arguments and a mapping of named ones, in few transactions.

        All have the same :meth:`options`.

        Raises what :meth:`enqueue` does, for the first that failed; others may have been enqueued.
        """
        made = self._queue.made
        return self._queue.commit(
            [made(self.body, tuple(arguments), named, self._options) for arguments, named in calls]
        )


class Call(PlannedCall[R]):
    """A call of a function that is to be one task, made by :meth:`TaskFunction.call`.

    Give its ``result``, or a list of results, as an argument of another call, or say it by :meth:`then`; and
    enqueue the last one. All are enqueued together, and each begins once those are complete whose results it
    gets. The results are read from the store as the body begins.
    """

    def then(
        self,
        function: TaskFunction[Concatenate[R, Q], S],
        /,
        *arguments: Q.args,
        **named: Q.kwargs,
    ) -> Call[S]:
        """A call of another function, whose first argument is the result of this one."""
        return function.call(self.result, *arguments, **named)

    def enqueue(self) -> Enqueued[R]:
        """Enqueue it and all calls whose results it gets, all or none (SK-3).

        Enqueueing it again makes no further task. With an outbox all are synced to its disk together, and are
        forwarded one after the other.

        Raises:
            InvalidTask: arguments don't fit a function, or there are more than
                :data:`~rebalanser.tasks.results.MAX_TOGETHER` calls.
            RegistryUnavailable: the engine is away; nothing was enqueued.
            OutcomeUnknown: nobody knows whether all were or none; enqueue it again.

        What else :meth:`TaskFunction.enqueue` raises is of one of the calls; then none was enqueued.
        """
        (enqueued,) = cast("Queue", self.queue).enqueue_all([self])
        return enqueued


class Registers(Protocol):
    """The decorator that registers a function as a task."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Claim, P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Claim, P], R], /) -> TaskFunction[P, R]: ...


class Queue:
    """A queue of tasks at an engine's URL: ``sqlite:///PATH``, ``etcd://HOST:PORT``, ``memory://NAME``.

    Where no URL is given it is that of ``REBALANSER_REGISTRY``. ``memory://`` without a name is an empty
    store of this queue alone, which ends with it; ``Queue("memory://")`` is such a queue, named ``tasks``.
    ``clock`` is one that a test moves, such as :class:`rebalanser.testing.FakeClock`: see
    :meth:`run_until_idle`.

    ``claim_ttl_s`` is how long a claim lasts unless it is renewed, which a worker does as long as the body
    runs; so it is how long a dead worker's task waits, with ``buffer_s`` on top, which has to cover how far
    two clocks can drift apart in that time (a tenth of it where None). ``partitions`` counts only for a new
    queue. Where the engine does not hand out claims itself, as SQLite's does, the workers of the queue form a
    group (``settings``) and own its partitions; ``node`` is a label of this one.
    ``state_folder`` is where the ids' marks are kept (SK-1). Without ``create`` the queue must exist.
    ``outbox`` is a folder on this host's disk by way of which everything is enqueued, so that it can be while
    the engine is away, also when the queue is made (SK-4); see :mod:`rebalanser.tasks.outbox.outbox`.
    ``retention`` says how long a worker of the queue keeps closed tasks, None for ever; give all workers the
    same (SK-22).

    A forked child opens the engine and the outbox anew at their first use. A worker that was started before
    the fork runs in the parent only.

    Raises:
        InvalidName: the queue's name can't be stored.
        InvalidArgument: a claim is to last for no time, or the buffer is less than none.
        UnknownQueue: there is none of this name, and none is to be made; the message names those there are.
        FixConfiguration: the URL or the engine has to be changed by a person.
        RegistryUnavailable: the engine did not answer within ``timeout_s``, and there is no outbox.
        UnusableFolder: the outbox can't be written.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        claim_ttl_s: float = 30.0,
        buffer_s: float | None = None,
        partitions: int = PARTITIONS,
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
        name, url = name_and_url(name, url)
        self.name = check_name(name, "queue")
        _refuse_times(claim_ttl_s, buffer_s)
        self.retention = retention
        """How long closed tasks are kept; counts for the next start (SK-22)."""
        self._url = url
        self._timeout_s = timeout_s
        self._buffer_s = claim_ttl_s * BUFFER_RATIO if buffer_s is None else buffer_s
        self._settings = settings or Settings()
        self._node = node
        self._middleware = tuple(middleware)
        self.functions: dict[str, TaskBody] = {}
        """The functions that are registered, by name."""
        self._schedules: list[Schedule] = []
        self._flakes_folder = (state_folder or folders.state_folder()) / "flakes"
        self._engine_url, self._opener = load_engine(url)
        self._outbox_folder = outbox
        self._count_on(clock)
        self._warned: set[str] = set()
        self._is_closed = False
        self._has_left_worker = False
        """True in a child whose parent has a worker, until that is logged."""

        def opened() -> Opened:
            if self._has_left_worker:
                self._has_left_worker = False
                _log.warning(
                    "the worker of this queue runs in the parent of this process, and not here",
                    action="tasks_worker_not_forked",
                    queue=name,
                )
            engine = self._opener(self._engine_url, timeout_s)
            try:
                if not create:
                    _refuse_unknown(name, engine.queues(timeout_s), self._engine_url)
                number = engine.define(name, partitions, timeout_s)
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
            return Opened(context, number, Ancestry(context.read))

        self._open_engine = opened
        self._begin()
        if self._opened_outbox() is None:
            self._opening.opened()
        forks.in_child(self._forked)

    def _count_on(self, clock: Clock | None) -> None:
        """Take the time from ``clock``, the host's where None; ids too.

        Ids of another clock than the host's keep no marks: these would set the times of the host's ids.
        """
        self._has_own_clock = clock is not None
        self._clock: Clock = clock or SystemClock()
        if clock is None:
            self._flakes = Flakes(self._flakes_folder)
        else:
            self._flakes = Flakes(None, lambda: int(clock.wall() * 1000))

    @contextmanager
    def in_memory(self, clock: Clock | None = None) -> Iterator[Self]:
        """Make it an empty queue in memory within a context, as a test does; its functions stay.

        ``clock`` is as in ``Queue(clock=)``. No other thread may use the queue as the context begins or ends.

        Raises:
            InvalidState: the queue is started.
        """
        self._refuse_started()
        before = vars(self).copy()
        self._url = _named_in_memory(IN_MEMORY)
        self._engine_url, self._opener = load_engine(self._url)
        self._outbox_folder = None
        self._count_on(clock)
        self._begin()
        try:
            self._opening.opened()
            yield self
        finally:
            self.stop()
            self._opening.close()
            self._flakes.close()
            vars(self).update(before)

    def _begin(self) -> None:
        """Begin with nothing that is open, in a process that uses the queue for the first time."""
        self._label = self._node or default_label()
        self._group: Group | None = None
        self._worker: Worker | None = None
        self._bodies: Bodies | None = None
        self._note: WorkerNote | None = None
        self._ticker: Ticker | None = None
        self._inline_ticker: Ticker | None = None
        self._caller: Caller | None = None
        self._source: ClaimSource | None = None
        self._sweeper: Sweeper | None = None
        self._stopped = threading.Event()
        self.errors = ErrorPolicy(self.name, self._clock, self._end_process)
        """What follows from the errors of this process's loops."""
        self.metrics = TaskMetrics()
        """Counts this process's tasks."""
        self.bell = waiting.Bell(lambda: self._context)
        """Tells who waits for a task."""
        self._opening = Opening(self._open_engine)
        self._outbox: Outbox | None = None
        self._outbox_opening = threading.Lock()

    def _forked(self) -> None:
        """Forget, in a forked child, what is the parent's; a closed queue stays closed."""
        if self._is_closed:
            return
        self._has_left_worker |= self._source is not None
        self._begin()

    def _opened_outbox(self) -> Outbox | None:
        """The outbox of this process, opened at its first use; None if the queue has none."""
        if self._outbox_folder is None or self._outbox is not None:
            return self._outbox
        with self._outbox_opening:
            if self._outbox is None:
                is_away = self._opens_later(may_be_away=True)
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

    def _opens_later(self, *, may_be_away: bool) -> bool:
        """Open the engine; whether it is away, where it may be."""
        try:
            self._opening.opened()
        except RetryLater:
            if not may_be_away:
                raise
            return True
        return False

    @property
    def url(self) -> str:
        """The URL of its registry."""
        return self._url

    @property
    def _context(self) -> Context:
        return self._opening.opened().context

    @property
    def _partition_count(self) -> int:
        return self._opening.opened().partitions

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Queue({self.name!r}, {self._url!r})"

    @overload
    def task(
        self, function: Callable[Concatenate[Claim, P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R]: ...

    @overload
    def task(self, function: Callable[Concatenate[Claim, P], R], /) -> TaskFunction[P, R]: ...

    @overload
    def task(self, name: str | None = None, **options: Unpack[GivenTaskOptions]) -> Registers: ...

    def task(self, name: str | Callable[..., Any] | None = None, **options: Unpack[GivenTaskOptions]) -> Any:
        """Register a function for tasks, under its own name or another; ``options`` as in TaskOptions.

        Without any of these ``@queue.task`` will do.

        Raises:
            InvalidHandlers: the function can't be called with stored arguments, or the name is taken.
            InvalidTask: an option is unknown or out of range.
        """
        if callable(name):
            return self.task()(name)
        chosen = task_options(options)

        def register(function: Callable[..., Any]) -> TaskFunction[..., Any]:
            body = TaskBody(function, task_name(function, name), chosen)
            if body.name in self.functions:
                raise InvalidHandlers(f"task {body.name!r} is registered already")
            self.functions[body.name] = body
            return TaskFunction(self, body)

        return register

    @property
    def schedules(self) -> Sequence[Schedule]:
        """The schedules of periodic functions that are registered."""
        return tuple(self._schedules)

    def periodic(
        self,
        expression: str,
        name: str | None = None,
        *,
        time_zone: str = "UTC",
        jitter_s: float = 0.0,
        overlap: bool = True,
        **options: Unpack[GivenTaskOptions],
    ) -> Registers:
        """Register a function whose tasks come by a cron expression while a worker runs (SK-15).

        The expression is by the clocks of ``time_zone``, such as ``Europe/Rome``. Each task is due up to
        ``jitter_s`` seconds after its tick, so that the tasks of many schedules do not come together; see
        :class:`~rebalanser.tasks.periodic.Schedule`. Without ``overlap`` a tick is left out while the task of
        an earlier one is open, waiting or running; it may still come within a minute once that is closed. It
        is short for ``unique_for_s=0`` (SK-23).

        It takes no arguments but the claim that have no default. Each tick makes one task, whatever number of
        workers there are; one that no worker saw within a minute is left out. The first tick of a new
        schedule is the next one that is due.

        Raises:
            InvalidTask: the expression or the time zone is none, or an option is out of range.
            InvalidHandlers: as :meth:`task`.
        """
        refuse_no_expression(expression)
        register = self.task(name, **(options if overlap else {"unique_for_s": 0.0, **options}))

        def scheduled(function: Callable[..., Any]) -> TaskFunction[..., Any]:
            schedule = Schedule(self.name, task_name(function, name), expression, time_zone, jitter_s)
            refuse_required(function, schedule.name)
            registered = register(function)
            self._schedules.append(schedule)
            return registered

        return cast("Registers", scheduled)

    def adopt(self, functions: dict[str, TaskBody], schedules: list[Schedule]) -> None:
        """Work with functions and schedules that are registered elsewhere, also later, instead of its own."""
        self.functions = functions
        self._schedules = schedules

    def made(
        self,
        body: TaskBody,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        options: EnqueueOptions = NO_OPTIONS,
    ) -> Enqueue:
        """A task of a function, from a call; raises InvalidTask where it can't be one."""
        payload = body.payload(arguments, named)
        unique_key, unique_for_s = options.unique(body.options.unique_for_s, payload)
        limit_key, max_running = body.options.limit(options.key)
        task_id = options.task_id or self._flakes.next()
        head = Head(
            id=task_id,
            queue=self.name,
            name=body.name,
            priority=body.options.priority if options.priority is None else options.priority,
            after=dependencies(options.after, payload),
            after_failure=options.after_failure,
            retries=body.options.retries,
            timeout_s=body.options.timeout_s,
            unique_key=unique_key,
            unique_for_s=unique_for_s,
            limit_key=limit_key,
            max_running=max_running,
        )
        return self._placed(head, payload, options)

    def made_raw(
        self,
        name: str,
        payload: bytes,
        options: EnqueueOptions,
        *,
        retries: int = RETRIES,
        timeout_s: float | None = None,
        max_running: int | None = None,
        max_running_per_key: int | None = None,
    ) -> Enqueue:
        """A task of a function that is registered elsewhere, with its payload as it is to be stored.

        Raises:
            InvalidName: the function's name can't be stored.
            InvalidTask: a limit is out of range, or there are two.
        """
        check_name(name, "task")
        self._warn_of_unknown(name)
        unique_key, unique_for_s = options.unique(None, payload)
        limits = task_options({"max_running": max_running, "max_running_per_key": max_running_per_key})
        limit_key, max_running = limits.limit(options.key)
        task_id = options.task_id or self._flakes.next()
        head = Head(
            id=task_id,
            queue=self.name,
            name=name,
            priority=options.priority or 0,
            after=dependencies(options.after, payload),
            after_failure=options.after_failure,
            retries=retries,
            timeout_s=timeout_s,
            unique_key=unique_key,
            unique_for_s=unique_for_s,
            limit_key=limit_key,
            max_running=max_running,
        )
        return self._placed(head, payload, options)

    def _warn_of_unknown(self, name: str) -> None:
        """Warn once of a name that no function has, where there are functions."""
        if not self.functions or name in self.functions or name in self._warned:
            return
        if len(self._warned) < MAX_WARNED:
            self._warned.add(name)
            _log.warning(
                "no function of this name is registered here: its tasks wait for a worker that has one; "
                "is it misspelt?",
                action="task_name_unknown",
                queue=self.name,
                name=name,
                known=", ".join(sorted(self.functions)[:MAX_SHOWN]),
            )

    def _placed(self, head: Head, payload: bytes, options: EnqueueOptions) -> Enqueue:
        if options.task_id is not None:
            self._refuse_far_future(options.task_id)
        due = self._clock.wall() + options.delay_s if options.delay_s else 0.0
        partition = UNPLACED if self._outbox_folder else place_of(head, self._partition_count)
        return Enqueue(Task(head, payload), partition, State(due=due), options.waits_for_unknown)

    def _refuse_far_future(self, task: TaskId) -> None:
        """See that the time in a given id is not far ahead of the clock, and of the ids made here."""
        ahead_s = born_at(task) - self._clock.wall()
        if ahead_s > FAR_FUTURE_S and born_at(task) - born_at(self._flakes.next()) > FAR_FUTURE_S:
            raise InvalidTask(
                f"the id {task} has a time {ahead_s / FAR_FUTURE_S:.0f} years ahead, so that its task "
                "would never be collected; ids come from new_id(), not from elsewhere such as a hash"
            )

    def new_id(self) -> TaskId:
        """An id for a task to come, so that enqueueing it more than once is harmless (SK-1, SK-3)."""
        return self._flakes.next()

    def enqueue_all(self, calls: Sequence[PlannedCall[R]]) -> list[Enqueued[R]]:
        """Enqueue calls, with all whose results they get, all or none; the ids of the given ones.

        Raises what :meth:`Call.enqueue` does.
        """
        self.enqueue_ordered(in_order(calls, self))
        return [call.enqueued for call in calls if call.enqueued is not None]

    def enqueue_ordered(self, calls: Sequence[PlannedCall[Any]]) -> None:
        """Enqueue calls, all or none, each of which comes after those whose results it gets."""
        made = [
            self.made(call.body, call.arguments, call.named, call.options(self._flakes.next))
            for call in calls
        ]
        for call, done in zip(calls, self.commit(made, together=len(made) > 1), strict=True):
            call.enqueued = done

    def commit(self, tasks: Sequence[Enqueue], *, together: bool = False) -> list[Enqueued[Any]]:
        """Enqueue tasks that were made, ``together`` all or none; their ids.

        The id is that of an earlier task where the task is a duplicate of it (SK-23). One of those that are
        enqueued together may depend on those before it, and none has a unique key; what is there already
        stays.

        Raises what :meth:`TaskFunction.enqueue` does.
        """
        done: list[Enqueued[Any]] = []
        for each, answer in zip(tasks, self._answers(tasks, together=together), strict=True):
            done.append(answer)
            if answer.answer is EnqueueAnswer.DUPLICATE:
                continue
            self.metrics.enqueued(each.task.head.name)
            for hook in self._middleware:
                self._told(hook, each.task.head)
        return done

    def _told(self, hook: Middleware, head: Head) -> None:
        try:
            hook.enqueued(head)
        except Exception as error:  # whatever a hook does, the task is enqueued
            self.errors.ignored(f"middleware {type(hook).__qualname__}.enqueued", error)

    def _answers(self, tasks: Sequence[Enqueue], *, together: bool) -> Iterator[Enqueued[Any]]:
        """The id of each task and where it is, once all are enqueued; raises at the first that is not."""
        if together:
            refuse_too_many(len(tasks))
            if any(each.task.head.unique_key for each in tasks):
                raise InvalidTask("tasks that are enqueued together can't have unique_key or unique_for_s")
        outbox = self._opened_outbox()
        if outbox is not None:
            for each, outcome in zip(tasks, outbox.enqueue(tasks), strict=True):
                if isinstance(outcome, RebalanserError):
                    raise outcome
                if isinstance(outcome, Duplicate):
                    yield Enqueued(outcome.id, EnqueueAnswer.DUPLICATE)
                else:
                    yield Enqueued(each.task.head.id, outcome)
            return
        ancestry = self._opening.opened().ancestry
        coming: dict[TaskId, Head] = {}
        for each in tasks:
            ancestry.refuse_cycle(each.task.head, coming)
            coming[each.task.head.id] = each.task.head
        if together:
            self._enqueue_together(tasks)
            yield from (Enqueued(each.task.head.id) for each in tasks)
            return
        asks = [EnqueueAsk(each) for each in tasks]
        self._context.ledger.write_all(asks)
        for each, ask in zip(tasks, asks, strict=True):
            yield enqueued(each, ask.future.result())

    def _enqueue_together(self, tasks: Sequence[Enqueue]) -> None:
        """Enqueue tasks, all or none of those that are not there; raises what is wrong with one of them."""
        left = {each.task.head.id: each for each in tasks}
        if len(left) < len(tasks):
            raise InvalidTask("two of the tasks that are enqueued together have one id")
        for _ in range(len(tasks) + 1):
            if not left:
                return
            ask = EnqueueAsk(EnqueueAll(tuple(left.values())))
            self._context.ledger.write_all([ask])
            match ask.future.result():
                case Exists():
                    present = self._present(left)
                    left = {task: each for task, each in left.items() if task not in present}
                case Unknown(ids=ids) as answer:
                    needed = set(ids)
                    waits = (each for each in left.values() if not needed.isdisjoint(each.task.head.after))
                    enqueued(next(waits), answer)
                case _:
                    return
        raise RegistryUnavailable("tasks with these ids came and went again and again; try again")

    def _present(self, tasks: Mapping[TaskId, Enqueue]) -> Collection[TaskId]:
        """Those of the tasks that are there already; raises TaskExists where one is another."""
        ids = list(tasks)
        found = self._context.read(ids)
        payloads = self._context.engine.payloads(self.name, ids, self._timeout_s)
        present = found.keys() & payloads.keys()
        for task in present:
            enqueued(tasks[task], Exists(found[task], payloads[task]))
        return present

    @property
    def context(self) -> Context:
        """What this process shares with its claims of the queue."""
        return self._context

    @property
    def troubles(self) -> tuple[Trouble, ...]:
        """What of this process fails and is retried now, such as claiming while the engine is away.

        Empty if all is well. What nobody foresaw and goes on for 60 s ends the process, see :meth:`start`.
        """
        return self.errors.troubles

    def measure(self) -> Measurement:
        """What this process has counted, what fails in it, and how long the oldest ready task has waited.

        The store is asked for the latter on SQLite. Raises nothing.
        """
        oldest_ready_s: float | None = None
        try:
            oldest_ready_s = self._oldest_ready_s()
        except RebalanserError as error:
            self.errors.ignored("a measurement", error)
        return Measurement(
            self.name, self.metrics.total(), self.errors.counts, self.errors.troubles, oldest_ready_s
        )

    def _oldest_ready_s(self) -> float | None:
        wall, source, engine = self._clock.wall(), self._source, self._context.engine
        if source is not None:
            since = source.ready_since(wall)
        elif isinstance(engine, ClaimsFromIndex):
            since = engine.ready_since(self.name, wall, self._timeout_s)
        else:
            return None
        return 0.0 if since is None else wall - since

    @property
    def partition_count(self) -> int:
        """How many partitions the queue was made with."""
        return self._partition_count

    def get(self, task: TaskId, *, at_least: int = 0) -> Stored:
        """A task as it is now, or at revision ``at_least`` or later (SK-11).

        Raises:
            UnknownTask: there is none of this id.
            UnusableStore: the store has not seen that revision.
            RegistryUnavailable: the engine did not answer in time.
        """
        found = self._context.engine.read(self.name, [task], self._timeout_s, at_least=at_least).get(task)
        if found is None:
            raise UnknownTask(f"there is no task {task} in queue {self.name!r}")
        return found

    def payload(self, task: TaskId) -> bytes:
        """A task's payload as it was enqueued.

        Raises:
            UnknownTask: there is none of this id.
        """
        found = self._context.engine.payloads(self.name, [task], self._timeout_s)
        if task not in found:
            raise UnknownTask(f"there is no task {task} in queue {self.name!r}")
        return found[task]

    def log(self, task: TaskId) -> Iterator[Update]:
        """What the claims of a task wrote, the earliest first, read page by page (SK-9)."""
        claim = self.get(task).state.claim
        if claim is not None:
            yield from self._context.log(task, claim.number + 1)

    def tasks(
        self,
        statuses: frozenset[Status] | None = None,
        *,
        page: int = 1000,
        after: TaskId | None = None,
        at_least: int = 0,
        name: str | None = None,
        older_than_s: float = 0.0,
    ) -> Iterator[Stored]:
        """All tasks in the order of their ids, those greater than ``after``, read page by page (SK-12).

        Those of one function with a ``name``, and those that were enqueued more than ``older_than_s`` seconds
        ago, by the clocks of the hosts that made their ids. Each page is as of revision ``at_least`` or later
        (SK-11).

        Raises:
            InvalidArgument: ``older_than_s`` is no number of seconds from 0.
        """
        before = self._enqueued_before(older_than_s)
        while True:
            found = self._context.engine.page(
                self.name, self._timeout_s, statuses=statuses, after=after, limit=page, at_least=at_least
            )
            for each in found.items:
                if born_at(each.head.id) > before:
                    return
                if name is None or each.head.name == name:
                    yield each
            after = found.next
            if after is None:
                return

    def _enqueued_before(self, older_than_s: float) -> float:
        """The wall time before which tasks of an age were enqueued; infinity for an age of 0."""
        if not older_than_s >= 0:  # also NaN, which would choose all tasks
            raise InvalidArgument(f"older_than_s is {older_than_s}: give seconds from 0")
        return self._clock.wall() - older_than_s if older_than_s else math.inf

    def newest(
        self,
        limit: int,
        statuses: frozenset[Status] | None = None,
        *,
        name: str | None = None,
        older_than_s: float = 0.0,
    ) -> list[Stored]:
        """At most ``limit`` of the tasks that :meth:`tasks` reads: the newest ones, the newest first.

        Reads back from the present, ever farther until there are as many.

        Raises:
            InvalidArgument: ``limit`` or ``older_than_s`` is below 0.
        """
        if limit < 0:
            raise InvalidArgument(f"limit is {limit}: give a number of tasks from 0")
        self._enqueued_before(older_than_s)
        now, back_s = self._clock.wall() - older_than_s, NEWEST_S
        while True:
            first = first_of(now - back_s)
            tasks = self.tasks(statuses, after=first, name=name, older_than_s=older_than_s)
            found = deque(tasks, maxlen=limit)
            if len(found) == limit or back_s >= now:
                return list(reversed(found))
            back_s *= FARTHER

    def with_blockers(self, tasks: Iterable[Stored]) -> Iterator[tuple[Stored, tuple[Stored, ...]]]:
        """Tasks, each with dead and cancelled ones that it waits for, also by way of others; at most 10.

        Until those are requeued and complete, or it is cancelled, it waits.
        """
        return with_blockers(tasks, self._context.read)

    def count(self) -> Mapping[Status, int]:
        """Count the tasks in each status (SK-12)."""
        return self._context.engine.count(self.name, self._timeout_s)

    def status(self) -> QueueStatus:
        """The tasks by status, the age of the oldest one that waits for a worker, and the workers.

        On etcd it reads all tasks, page by page.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        engine, wall = self._context.engine, self._clock.wall()
        since = engine.ready_since(self.name, wall, self._timeout_s)
        counted = self.count()
        workers = workers_of(engine.workers(self.name, self._timeout_s))
        retained = self.retained()
        return QueueStatus(
            queue=self.name,
            counts={status: counted.get(status, 0) for status in Status},
            oldest_ready_s=None if since is None else wall - since,
            workers=tuple(sorted(workers, key=lambda each: (each.worker, each.started))),
            pauses=self.pauses(),
            deleted=retained.deleted_ever,
            swept=retained.swept_at or None,
        )

    def pause(self, reason: str = "", *, schedule: str | None = None, by: str | None = None) -> Pause:
        """Claim no more tasks of the queue, in any process, until :meth:`resume`, also after restarts.

        From when this returns on nothing is claimed (SK-23). Bodies that run go on; claims that have not
        begun are given back, their tries not counted. Tasks can be enqueued as ever. With ``schedule``, the
        name of a periodic function, only its ticks stop: what would come meanwhile is missed, and never made
        up for.

        ``by`` says who pauses it, this process's label where None. What is paused stays as it is: the pause
        that is in force is returned.

        Raises:
            InvalidTask: this process has schedules, and none of that name.
            InvalidArgument: ``reason`` or ``by`` is over 1,000 characters.
            RegistryUnavailable: the engine is away; nothing was paused.
            OutcomeUnknown: nobody knows whether it is paused; pause it again.
        """
        self._refuse_unknown_schedule(schedule)
        return pauses.pause(self._context, schedule, self._label if by is None else by, reason)

    def resume(self, *, schedule: str | None = None) -> Pause | None:
        """End the pause of the queue, or of a schedule; the pause that ended, None if there was none (SK-23).

        Idle workers begin to claim at once. A schedule goes on with its next tick.

        Raises what :meth:`pause` does.
        """
        self._refuse_unknown_schedule(schedule)
        return pauses.resume(self._context, schedule)

    def pauses(self) -> Pauses:
        """What is paused now: the queue itself, and its schedules by function (SK-23)."""
        return Pauses.of(pauses.read_pauses(self._context))

    @property
    def known_pause(self) -> Pause | None:
        """The pause of the queue as this process knows it, which must work on it; asks no store."""
        source = self._source
        return None if source is None else source.pause

    def _refuse_unknown_schedule(self, name: str | None) -> None:
        names = [each.name for each in self._schedules]
        if name is not None and names and name not in names:
            raise InvalidTask(f"no periodic function {name!r} is registered; there are: {', '.join(names)}")

    def cancel(self, task: TaskId) -> Status:
        """Want a task no more; what it is then: a completed one stays so."""
        return self._change(task, lambda stored: rules.cancel(stored.state))

    def requeue(self, task: TaskId) -> Status:
        """Try a dead or cancelled task again, with all its tries (SK-15); what it is then."""
        return self._change(task, lambda stored: rules.requeue(stored.state))

    def cancel_all(self, tasks: Iterable[Stored]) -> int:
        """Cancel tasks as :meth:`cancel` does, many at once; how many are cancelled now."""
        return self._change_all(tasks, lambda stored: rules.cancel(stored.state))

    def requeue_all(self, tasks: Iterable[Stored]) -> int:
        """Requeue tasks as :meth:`requeue` does, many at once; how many of them were dead or cancelled."""
        return self._change_all(tasks, lambda stored: rules.requeue(stored.state))

    def _change(self, task: TaskId, rule: Callable[[Stored], Decision]) -> Status:
        settled = self._context.write(MoveAsk(self.get(task), rule))
        return self.get(task).state.status if isinstance(settled, Refused) else settled.state.status

    def _change_all(self, tasks: Iterable[Stored], rule: Callable[[Stored], Decision]) -> int:
        changed, rest = 0, iter(tasks)
        while batch := list(islice(rest, CHANGED_AT_ONCE)):
            asks = [MoveAsk(stored, rule) for stored in batch]
            self._context.ledger.write_all(asks)
            changed += sum(not isinstance(ask.future.result(), Refused) for ask in asks)
        return changed

    def collect(
        self,
        older_than_s: float = 86_400.0,
        archive: Path | None = None,
        *,
        statuses: frozenset[Status] = frozenset({Status.COMPLETED}),
        name: str | None = None,
    ) -> Collected:
        """Delete complete tasks that were enqueued longer ago, each with all that it is connected to (SK-14).

        A task goes only together with all those that depend on it and that it depends on, once all of them
        are complete, or what else ``statuses`` name, and of the function ``name`` if one is given. What is
        open never goes. With ``archive`` each is first appended to that file, with its payload and its log.
        Where ``older_than_s`` is 0 also a task goes with an id whose time is yet to come.

        Raises:
            InvalidArgument: ``older_than_s`` is no number of seconds from 0.
            RetryLater: the engine was away; collecting again goes on.
            UnusableFolder: the archive can't be written.
        """
        before = self._enqueued_before(older_than_s)

        def may_go(stored: Stored) -> bool:
            head = stored.head
            return (
                stored.state.status in statuses
                and (name is None or head.name == name)
                and born_at(head.id) <= before
            )

        steps = collect(self._context, self.tasks, may_go, None if archive is None else Archive(archive))
        return sum(steps, Collected())

    def retained(self) -> Record:
        """When closed tasks were deleted last because their time was over, and how many (SK-22)."""
        return Record.of(self._context.engine.note(self.name, self._timeout_s))

    @overload
    def wait(self, task: Enqueued[R], timeout_s: float = 60.0) -> R: ...

    @overload
    def wait(self, task: TaskId, timeout_s: float = 60.0) -> Any: ...

    def wait(self, task: TaskId, timeout_s: float = 60.0) -> Any:
        """Wait until a task is complete; what its body has returned, by the function's return type.

        It has been JSON meanwhile. So it is what JSON gives where the function has no return type, or is not
        known here. ``get(task).state.result`` has the JSON itself.

        A body that waits for a task of its own queue takes part of the worker's concurrency meanwhile. Once
        all bodies of a worker do that, it logs a warning. So does a call that waits for a paused queue.

        Raises:
            TaskFailed: it is dead or cancelled; the message says by which error its last try ended.
            InvalidTask: the result does not fit the function's return type.
            NotSettled: it is neither within ``timeout_s`` seconds.
            UnknownTask: there is none of this id.
        """
        changed = threading.Event()
        deadline = self._context.clock.now() + timeout_s
        self.bell.listen(task, changed.set)
        try:
            with waiting.waiting_for(self.name) as hint:
                stored = self.get(task)
                self.pause_hint(stored, logs=True)
                while stored.state.status not in waiting.CLOSED:
                    told = hint(stored)
                    if not changed.wait(max(0.0, deadline - self._context.clock.now())):
                        raise waiting.not_settled(stored, timeout_s, told + self.pause_hint(stored))
                    changed.clear()
                    stored = self.get(task)
        finally:
            self.bell.leave(task, changed.set)
        return waiting.value_of(stored, self.functions)

    def pause_hint(self, stored: Stored, *, logs: bool = False) -> str:
        """What keeps an awaited task waiting: a pause, or that no worker is there; else empty."""
        if stored.state.status is not Status.WAITING:
            return ""
        try:
            present = self.pauses().queue
            has_worker = logs or bool(self._context.engine.workers(self.name, self._timeout_s))
        except RebalanserError as error:  # the caller waits whatever comes of this
            self.errors.ignored("a look at pauses", error)
            return ""
        if present is None:
            return "" if has_worker else NO_WORKER
        told = f"the queue is {present.told(self._clock.wall())}"
        if logs:
            _log.warning(told, action="task_waits_paused", queue=self.name, task=stored.head.id)
        return f"; {told}"

    def run(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Work on tasks until SIGINT, SIGTERM or SIGHUP, then stop gracefully; see :meth:`start`.

        Raises:
            InvalidState: not called in the main thread.
        """
        run_until_stopped(_Running(self, concurrency, bodies))

    def start(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Join the queue's workers and begin to run tasks, ``concurrency`` at a time, in threads.

        With ``bodies="processes"`` each body runs in a child process, which is killed once the body is out of
        time, or its claim is lost; its functions must be importable (SK-15).

        Errors of one task end its try and nothing else. While the engine is away or takes nothing, all that
        goes on by itself is retried for any time (:attr:`troubles`). An error that nobody foresaw is retried
        for 60 s; then the queue is stopped and the process exits with code 70, so that a supervisor can act.

        Raises:
            InvalidState: it runs already, is closed, or was given a clock.
            InvalidArgument: ``concurrency`` is less than 1.
            InvalidHandlers: a function can't be imported by a child process; the message names it.
            RegistryUnavailable: the engine did not answer in time.
        """
        self.start_with(_caller(bodies, self.functions, self.errors), concurrency)

    def run_until_idle(self, *, advance_s: float = 0.0) -> int:
        """Run all tasks that are ready in the calling thread, one after another, as a test does.

        It returns once no task is ready, those included that bodies have enqueued; how many tries it ran.
        With ``advance_s`` it then moves the queue's clock forward by that many seconds, from one due time to
        the next, and runs what becomes ready: delayed tasks, retries and ticks of schedules. Nothing sleeps.

        Bodies run as in production, save that no claim is renewed and ``timeout_s`` ends no plain function.
        On ``memory://``, no other queue may work on the same store meanwhile.

        Raises:
            InvalidState: the queue is started, or paused while tasks are ready; its engine is neither
                ``memory://`` nor ``sqlite://``; or there is time to pass and the queue has no clock that can
                be moved.
        """
        return self.run_inline(ThreadCaller(), advance_s)

    def run_inline(self, caller: Caller, advance_s: float) -> int:
        """:meth:`run_until_idle`, with somebody else who calls the bodies."""
        engine = self._context.engine
        self._refuse_started()
        source, settle = self._inline_source(engine)
        ticker = self._inline_ticker = self._inline_ticker or self._made_ticker(lambda _: True)
        bodies = Bodies(self.functions, self._middleware, self._clock, caller, self.errors, self.metrics)
        caller.open()
        try:
            return InlineWorker(self._context, source, bodies, ticker, settle).run(advance_s)
        finally:
            bodies.close()
            caller.close()
            source.close()

    def _inline_source(self, engine: Engine) -> tuple[ClaimSource, Callable[[], None]]:
        """Where to get claims without a group, and what to call for it to know of all tasks."""
        if isinstance(engine, ClaimsFromIndex):
            return IndexClaims(self._context, engine, self._label, self._buffer_s, _ignore), _ignore
        if not isinstance(engine, Settles):
            raise InvalidState("tasks run in the calling thread on memory:// and sqlite:// only")
        engine.settle()
        source = Partitions(self._context, self._label, self._buffer_s, _ignore, self._partition_count)
        source.take_all()
        return source, engine.settle

    def _made_ticker(self, is_mine: Callable[[TaskId], bool]) -> Ticker:
        return Ticker(
            self._schedules,
            self._clock,
            is_mine,
            self._context.read,
            self._enqueue_tick,
            self.errors,
            self._ticks_kept_s(),
            lambda: pauses.read_pauses(self._context),
        )

    def start_with(self, caller: Caller, concurrency: int, shared: SharedConcurrency | None = None) -> None:
        """:meth:`start`, with somebody else who calls the bodies, and places that it shares with others."""
        if concurrency < 1:
            raise InvalidArgument(
                f"concurrency is how many tasks run at a time, 1 or more, not {concurrency}"
            )
        self._refuse_second_start()
        caller.open()
        try:
            self._start(caller, concurrency, shared)
        except BaseException:
            caller.close()
            raise
        self._caller = caller

    def _start(self, caller: Caller, concurrency: int, shared: SharedConcurrency | None) -> None:
        if shared is None:
            self._stopped.clear()
        else:
            self._stopped = shared.stopped
        woken = threading.Event()
        bodies = Bodies(
            self.functions, self._middleware, self._context.clock, caller, self.errors, self.metrics
        )
        source, group = self._joined(woken.set)
        worker = Worker(self._context, source, bodies, concurrency, woken, shared)
        worker.start()
        try:
            _open(source, group)
        except BaseException:
            worker.stop(0.0)
            source.retire()  # the worker has offered its threads already
            source.close()
            bodies.close()
            raise
        self._group, self._worker, self._source, self._bodies = group, worker, source, bodies
        self._start_sweeper()
        self._ticker = self._made_ticker(lambda task: source.owns(partition_of(task, self._partition_count)))
        self._ticker.start()
        self._note = WorkerNote(self._context, self._label, concurrency, lambda: worker.running)
        self._note.start()

    def _ticks_kept_s(self) -> float:
        """How long the task of a tick is there at least, once it is closed or not."""
        shortest_s = None if self.retention is None else self.retention.shortest_s
        return KEPT_S if shortest_s is None else max(MIN_AGE_S, min(KEPT_S, shortest_s))

    def lend(self, wake: Callable[[], None]) -> ClaimSource:
        """Join the queue's workers without running bodies: claims are handed out to others.

        ``wake`` is called whenever there may be something to claim. :meth:`stop` ends it.

        Raises:
            InvalidState: it is started already, or is closed.
            RegistryUnavailable: the engine did not answer in time.
        """
        self._refuse_second_start()
        self._stopped.clear()
        source, group = self._joined(wake)
        try:
            _open(source, group)
        except BaseException:
            source.close()
            raise
        self._group, self._source = group, source
        self._start_sweeper()
        self._note = WorkerNote(self._context, self._label)
        self._note.start()
        return source

    def _start_sweeper(self) -> None:
        if self.retention is not None and self.retention.shortest_s is not None:
            tasks = partial(self.tasks, page=STEP)
            self._sweeper = Sweeper(self._context, tasks, self.retention, self._label)
            self._sweeper.start()

    def _stop_sweeper(self) -> None:
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.stop()

    def _refuse_second_start(self) -> None:
        if self._has_own_clock:
            raise InvalidState("a queue with a clock of its own runs its tasks by run_until_idle()")
        self._opening.opened()
        self._refuse_started()

    def _refuse_started(self) -> None:
        if self._source is not None:
            raise InvalidState(f"the queue {self.name!r} is worked on already by this process")

    def _joined(self, wake: Callable[[], None]) -> tuple[ClaimSource, Group | None]:
        """Where this process gets claims from; with the group that assigns it partitions, if it owns any."""
        engine = self._context.engine
        if isinstance(engine, ClaimsFromIndex):
            return IndexClaims(self._context, engine, self._label, self._buffer_s, wake), None
        self._add_partitions()
        partitions = Partitions(self._context, self._label, self._buffer_s, wake, self._partition_count)
        group = Group(group_name(self.name), self._url, node=self._label, settings=self._settings)
        group.on_start(partitions.take)
        group.on_stop(partitions.give_up)
        group.on_fact(self._heard)
        group.on_fact(partitions.heard)
        return partitions, group

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        self._stopped.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody asks to stop; whether that is so."""
        return self._stopped.wait(timeout_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Claim no more, leave, and let the bodies that run end within ``grace_s`` seconds (30 where None).

        Other workers hand out the tasks of its partitions while its bodies end. What has not ended by then
        is given back, and what it still writes is refused. How each try ended is written once this returns,
        unless the engine is away. Twice is fine. If it is interrupted, as by a second Ctrl-C, the grace is
        over at once.
        """
        group, self._group = self._group, None
        source, self._source = self._source, None
        self._stopped.set()
        if source is None:
            return
        note, self._note = self._note, None
        with ExitStack() as ends:  # the last one first, and each also where those before were interrupted
            if note is not None:
                ends.callback(note.stop)
            ends.callback(source.close)
            ends.callback(self._stop_sweeper)
            if group is not None:
                ends.callback(group.stop)
            if self._caller is not None:
                ends.callback(self._caller.close)
            if self._bodies is not None:
                ends.callback(self._bodies.close)
            if self._worker is not None:
                ends.callback(self._context.ledger.flush)
            grace_s = GRACE_S if grace_s is None else grace_s
            try:
                self._end_work(source, group, grace_s)
            except BaseException:
                self._end_work(source, group, 0.0)
                raise

    def leave(self, grace_s: float) -> None:
        """Claim no more, and let others hand out the tasks of its partitions; :meth:`stop` follows.

        What is being claimed now is given back, for which it waits for ``grace_s`` seconds at most.
        """
        if self._source is not None:
            self._leave(self._source, self._group, grace_s)

    def _leave(self, source: ClaimSource, group: Group | None, grace_s: float) -> None:
        if self._ticker is not None:
            self._ticker.stop()
        if self._worker is not None:
            self._worker.stop_claiming(grace_s)
        source.retire()
        if group is not None:
            group.request_stop()

    def _end_work(self, source: ClaimSource, group: Group | None, grace_s: float) -> None:
        """Claim no more and let bodies end; again where that was interrupted."""
        deadline = self._clock.now() + grace_s
        self._leave(source, group, grace_s)
        if self._worker is not None:
            self._worker.stop(max(0.0, deadline - self._clock.now()))

    def close(self) -> None:
        """Stop, write what waits, and let go of the engine. Closing twice does nothing."""
        self.stop()
        self._is_closed = True
        if self._outbox is not None:
            self._outbox.close()
        self._opening.close()
        self._flakes.close()

    def _heard(self, fact: Fact) -> None:
        if fact.kind is FactKind.ENGINE_FAILED:
            self.errors.give_up(f"the group of the queue has failed: {fact.detail}")

    def _end_process(self) -> None:
        """End a process that only looks alive: its claims are given back first, if that can be."""

        def end() -> None:
            try:
                self.stop()
            finally:
                os._exit(EXIT_CODE)

        limit = threading.Timer(EXIT_LIMIT_S, os._exit, [EXIT_CODE])
        limit.daemon = True
        limit.start()
        threading.Thread(target=end, name="rebalanser-tasks-end", daemon=True).start()

    def _enqueue_tick(self, name: str, task: TaskId, delay_s: float) -> None:
        if self._context.read([task]):  # by another process: where no partition is owned, all of them do it
            return
        self.commit([self.made(self.functions[name], (), {}, EnqueueOptions(task_id=task, delay_s=delay_s))])

    def _add_partitions(self) -> None:
        with Admin(group_name(self.name), self._url, settings=self._settings) as admin:
            present = {each.resource for each in admin.resources()}
            admin.add(
                [name for number in range(self._partition_count) if (name := str(number)) not in present]
            )


class Queues:
    """Several queues of one registry that a process works on together, the tasks of earlier ones first.

    All bodies share one concurrency. A task of a later queue begins only while no earlier one has a ready
    task, whatever the priorities are: a queue that always has ready tasks starves those after it. To keep a
    part of the hosts for a later queue, run another worker for that alone.

    Raises:
        InvalidArgument: there is no queue, one comes twice, or they are at different URLs.
    """

    def __init__(self, *queues: Queue) -> None:
        refuse_strange([each.name for each in queues], {each.url for each in queues})
        self._queues = queues
        self._stopped = threading.Event()

    def run(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Work on tasks until a signal, or until one of the queues is asked to stop; as :meth:`Queue.run`."""
        run_until_stopped(_Running(self, concurrency, bodies))

    def start(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Begin to run tasks, ``concurrency`` in all at a time; raises what :meth:`Queue.start` does."""
        shared = SharedConcurrency(concurrency)
        before, self._stopped = self._stopped, shared.stopped
        started: list[Queue] = []
        try:
            for each in self._queues:
                each.start_with(_caller(bodies, each.functions, each.errors), concurrency, shared)
                started.append(each)
        except BaseException:
            self._stopped = before
            for each in started:
                each.stop(0.0)
            raise

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        self._stopped.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until any of the queues is asked to stop; True if that is so."""
        return self._stopped.wait(timeout_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Leave all queues, then let the bodies that run end within ``grace_s`` seconds (30 where None).

        As :meth:`Queue.stop`, also where it is interrupted. The queues stay open.
        """
        self._stopped.set()
        grace_s = GRACE_S if grace_s is None else grace_s
        deadline = time.monotonic() + grace_s
        try:
            for each in self._queues:
                each.leave(grace_s)
            for each in self._queues:
                each.stop(max(0.0, deadline - time.monotonic()))
        except BaseException:
            with ExitStack() as ends:
                for each in self._queues:
                    ends.callback(each.stop, 0.0)
            raise


def refuse_strange(names: Sequence[str], urls: Collection[str]) -> None:
    """See that queues can be worked on together.

    Raises:
        InvalidArgument: there is none, one comes twice, or they are at different URLs.
    """
    if not names:
        raise InvalidArgument("give at least one queue")
    if len(urls) > 1:
        raise InvalidArgument(f"queues of one worker are at one URL, and {', '.join(names)} are not")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"a queue comes twice in {', '.join(names)}")


class _Running:
    """Queues that are worked on, for :func:`~rebalanser.runtime.running.run_until_stopped`."""

    def __init__(self, queue: Queue | Queues, concurrency: int, bodies: BodyPlace) -> None:
        self._queue = queue
        self._concurrency = concurrency
        self._bodies = bodies

    def start(self) -> None:
        self._queue.start(self._concurrency, bodies=self._bodies)

    def request_stop(self) -> None:
        self._queue.request_stop()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        return self._queue.wait_stopped(timeout_s)

    def stop(self, timeout_s: float | None = None) -> None:
        self._queue.stop(timeout_s)


def _open(source: ClaimSource, group: Group | None) -> None:
    """Begin to hear of what there is to claim."""
    if isinstance(source, IndexClaims):
        source.open()
    if group is not None:
        group.start()


def _caller(place: BodyPlace, functions: Mapping[str, TaskBody], errors: ErrorPolicy) -> Caller:
    if place == "threads":
        return ThreadCaller()
    from rebalanser.tasks.processes.caller import ProcessCaller  # noqa: PLC0415 - most workers have no children

    return ProcessCaller(functions, errors)


def _refuse_unknown(name: str, queues: Iterable[str], url: RegistryUrl) -> None:
    """See that a queue exists, so that a mistyped name makes none."""
    known = sorted(queues)
    if name not in known:
        raise UnknownQueue(
            f"there is no queue {name!r} in {engine_name(url)}; "
            + (f"there are: {', '.join(known)}" if known else "there is none at all")
        )


def _refuse_times(claim_ttl_s: float, buffer_s: float | None) -> None:
    if not 0 < claim_ttl_s < math.inf:
        raise InvalidArgument(
            f"claim_ttl_s is how many seconds a claim lasts, more than 0, not {claim_ttl_s}"
        )
    if buffer_s is not None and not 0 <= buffer_s < math.inf:
        raise InvalidArgument(f"buffer_s is a number of seconds, 0 or more, not {buffer_s}")


def _ignore() -> None:
    """Need no wake-up, and nothing to wait for."""


def name_and_url(name: str, url: str | None) -> tuple[str, str]:
    """The name and the URL of a queue from what it was given, which may be the URL alone.

    Raises:
        InvalidUrl: there is no URL, nor one in ``REBALANSER_REGISTRY``.
    """
    if url is None and "://" in name:
        name, url = ALONE, name
    return name, _named_in_memory(url_or_default(url))


def _named_in_memory(url: str) -> str:
    """The URL, with a name of its own for a store in memory that has none."""
    return f"{url}~{secrets.token_hex(8)}" if url == IN_MEMORY else url


def group_name(queue: str) -> str:
    """The group that the workers of a queue form; its resources are the queue's partitions, by number."""
    return f"tasks-{queue}"
