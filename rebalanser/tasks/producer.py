"""The producer of a queue: enqueues calls of task functions and waits for them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from rebalanser.core.tasks.failures import concerning
from rebalanser.core.tasks.ids import created_at, partition_of_task
from rebalanser.core.tasks.model import EnqueueAnswer, Enqueued, Head, Status, Stored, Task, TaskId, TaskState
from rebalanser.core.tasks.store import Duplicate, Enqueue, enqueued
from rebalanser.core.tasks.writes import (
    Await,
    PendingEnqueue,
    ReadPayloads,
    ReadTasks,
    Request,
    Submit,
    enqueue_together,
    run_script,
)
from rebalanser.errors import InternalError, InvalidTask, RebalanserError
from rebalanser.registry.keys import check_name
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks import pauses, waiting
from rebalanser.tasks.batcher import await_all, result_of
from rebalanser.tasks.calls import (
    PlannedCall,
    call_place,
    call_places,
    given_calls,
    pairs_of,
    refuse_too_many,
    sort_by_dependency,
)
from rebalanser.tasks.claim import Claim
from rebalanser.tasks.execution.bodies import Middleware
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
    periodic_options,
    register_body,
    require_claim,
    require_defaults,
    require_expression,
    require_function,
    task_name,
    task_options,
)
from rebalanser.tasks.open_queue import OpenQueue
from rebalanser.tasks.pauses import Pauses
from rebalanser.tasks.periodic import Schedule
from rebalanser.tasks.spool import UNPLACED

MAX_WARNED: Final = 100
"""Maximum number of names without a function that are warned about."""
MAX_SHOWN: Final = 20
RETRIES: Final = int(TaskOptions().retries)
"""Default number of retries of a task whose function is not known here."""
READY: Final = TaskState()
"""State of a new task without a delay."""
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
DecoratorT = TypeVar("DecoratorT")
_log = get_logger()
NO_WORKER: Final = "; no worker has reported itself: start one, or in a test call run_until_idle()"


class TaskFunction(Generic[P, R]):
    """A function whose calls can be enqueued; calling it calls the function itself, with a claim.

    ``P`` are its parameters after the claim, ``R`` is what it returns, or its coroutine.
    """

    def __init__(self, queue: Producer, body: TaskBody, options: EnqueueOptions = NO_OPTIONS) -> None:
        self._queue = queue
        self._options = options
        self.body = body
        """The function itself, and how its arguments are stored."""
        self.name = body.name
        """The name under which its tasks are stored."""

    def __call__(self, claim: Claim, *arguments: P.args, **named: P.kwargs) -> Any:
        """Call the function, as in a test; a coroutine function gives a coroutine.

        Raises:
            InvalidArgument: ``claim`` is an argument of the task instead.
        """
        require_claim(self.name, claim)
        return self.body.function(claim, *arguments, **named)

    def options(self, **options: Unpack[GivenOptions]) -> TaskFunction[P, R]:
        """Return the function with options for the tasks that it enqueues.

        These are the fields of ``EnqueueOptions``: ``delay_s``, ``after``,
        ``after_failure``, ``priority``, ``task_id``, ``waits_for_unknown``, ``unique_key``, ``unique_for_s``,
        ``key``. They replace those given before.

        Raises:
            InvalidTask: an option is unknown or out of range.
        """
        return TaskFunction(self._queue, self.body, chosen_options(self.name, options))

    def call(self, *arguments: P.args, **named: P.kwargs) -> Call[R]:
        """Return a call with these arguments that is not enqueued yet.

        Its ``result`` may be an argument of another call, which then waits for this one; see ``Call``.
        """
        return Call(self._queue, self.body, self._options, arguments, named)

    def enqueue(self, *arguments: P.args, **named: P.kwargs) -> Enqueued[R]:
        """Enqueue a call with these arguments; return the task's id once the engine has it for good (SK-3).

        With an outbox it may be on this host's disk only: ``answer`` of the result is then ``spooled``
        (SK-4). The answer is ``duplicate``, and the id that of an earlier task, if that one keeps this one
        out: see ``unique_key`` (SK-23). ``options`` sets its options, such as
        ``send.options(delay_s=5).enqueue("a@example.org")``. An argument may be the ``result`` of a task that
        is enqueued, or a list of results.

        Raises:
            InvalidTask: the arguments don't fit the function.
            TaskExists: the id is taken by other content.
            UnknownTask: it depends on a task that does not exist.
            DependencyCycle: it would wait for itself.
            RequestTooLarge: the arguments are over the engine's limit.
            RegistryUnavailable: the engine is away; nothing was enqueued.
            OutcomeUnknown: it may have been enqueued; enqueue the same ``task_id`` again.
            UnusableFolder: the outbox can't be written; nothing was enqueued.
        """
        return self._queue.enqueue_call(self.body, arguments, named, self._options)

    def enqueue_many(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Enqueued[R]]:
        """Enqueue many calls, each as positional arguments and a mapping of named ones, in few transactions.

        All have the same ``options``.

        Raises what ``enqueue`` does, for the first that failed; others may have been enqueued. The
        message begins with the position of the call, as ``calls[3]``, if the error is one of that call.
        """
        return self._queue.enqueue_calls(self.body, calls, self._options)


class Call(PlannedCall[R]):
    """A planned call of a function, for one task, made by ``TaskFunction.call``.

    Use its ``result``, or a list of results, as an argument of another call, or use ``then``; and enqueue the
    last one. All are enqueued together, and each begins once the tasks are complete whose results it gets.
    The results are read from the store as the body begins.
    """

    def then(
        self,
        function: TaskFunction[Concatenate[R, Q], S],
        /,
        *arguments: Q.args,
        **named: Q.kwargs,
    ) -> Call[S]:
        """Return a call of another function, whose first argument is the result of this one.

        Raises:
            InvalidArgument: ``function`` is not a task function.
        """
        require_function(function, TaskFunction)
        return function.call(self.result, *arguments, **named)

    def enqueue(self) -> Enqueued[R]:
        """Enqueue it and all calls whose results it gets, all or none (SK-3).

        Enqueueing it again makes no further task. With an outbox all are synced to its disk together, and are
        forwarded one after the other.

        Raises:
            InvalidTask: arguments don't fit a function, or there are more than
                ``MAX_TOGETHER`` calls.
            RegistryUnavailable: the engine is away; nothing was enqueued.
            OutcomeUnknown: all or none may have been enqueued; enqueue it again.

        Other errors of ``TaskFunction.enqueue`` are those of one of the calls; then none was enqueued.
        """
        queue = cast("Producer", self.queue)
        queue.enqueue_ordered(sort_by_dependency([self], queue))
        return cast("Enqueued[R]", self.enqueued)


class TaskDecorator(Protocol):
    """The decorator that registers a function as a task."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Claim, P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Claim, P], R], /) -> TaskFunction[P, R]: ...


class TaskRegistry(ABC, Generic[DecoratorT]):
    """The functions of a queue that are registered for tasks, and their schedules."""

    name: str
    functions: dict[str, TaskBody]
    _schedules: list[Schedule]

    @abstractmethod
    def _bound(self, function: Callable[..., Any], name: str, options: TaskOptions) -> Any:
        """Register a function under a name, and return it bound to the queue."""

    def _registering(self, name: str | Callable[..., Any] | None, options: GivenTaskOptions) -> Any:
        """Return the decorator that registers a function, or if ``name`` is one, what that returns."""
        chosen = task_options(options)
        if callable(name):
            return self._bound(name, task_name(name, None), chosen)
        return lambda function: self._bound(function, task_name(function, name), chosen)

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
    ) -> DecoratorT:
        """Register a function whose tasks come by a cron expression while a worker runs (SK-15).

        The expression is by the clocks of ``time_zone``, such as ``Europe/Rome``. Each task is due up to
        ``jitter_s`` seconds after its tick, so that the tasks of many schedules do not come together; see
        ``Schedule``. Without ``overlap`` a tick is left out while the task of
        an earlier one is open, waiting or running; it may still come within a minute once that is closed. It
        is short for ``unique_for_s=0`` (SK-23).

        All its arguments but the claim must have defaults. Each tick makes one task, for any number of
        workers; one that no worker saw within a minute is left out. The first tick of a new schedule is the
        next one that is due.

        Raises:
            InvalidTask: the expression or the time zone is invalid, or an option is unknown, of a wrong type
                or out of range.
            InvalidHandlers: as ``task``.
        """
        require_expression(expression)
        register = self._registering(name, periodic_options(options, overlap=overlap))

        def scheduled(function: Callable[..., Any]) -> Any:
            schedule = Schedule(self.name, task_name(function, name), expression, time_zone, jitter_s)
            require_defaults(function, schedule.name)
            registered = register(function)
            self._schedules.append(schedule)
            return registered

        return cast("DecoratorT", scheduled)


class Producer(TaskRegistry[TaskDecorator], OpenQueue):
    """Operations that enqueue tasks and wait for them: functions and their schedules."""

    @overload
    def task(
        self, function: Callable[Concatenate[Claim, P], Coroutine[Any, Any, R]], /
    ) -> TaskFunction[P, R]: ...

    @overload
    def task(self, function: Callable[Concatenate[Claim, P], R], /) -> TaskFunction[P, R]: ...

    @overload
    def task(self, name: str | None = None, **options: Unpack[GivenTaskOptions]) -> TaskDecorator: ...

    def task(self, name: str | Callable[..., Any] | None = None, **options: Unpack[GivenTaskOptions]) -> Any:
        """Register a function for tasks, under its own name or another; ``options`` as in TaskOptions.

        Without arguments ``@queue.task`` is enough.

        Raises:
            InvalidHandlers: the function can't be called with stored arguments, or the name is taken.
            InvalidTask: an option is unknown or out of range.
        """
        return self._registering(name, options)

    def _bound(self, function: Callable[..., Any], name: str, options: TaskOptions) -> TaskFunction[..., Any]:
        return TaskFunction(self, register_body(self.functions, TaskBody(function, name, options)))

    def adopt(self, functions: dict[str, TaskBody], schedules: list[Schedule]) -> None:
        """Work with functions and schedules that are registered elsewhere, also later, instead of its own."""
        self.functions = functions
        self._schedules = schedules

    def build_enqueue(
        self,
        body: TaskBody,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        options: EnqueueOptions = NO_OPTIONS,
    ) -> Enqueue:
        """Return the write that enqueues a call; raises InvalidTask if its arguments don't fit."""
        payload = body.payload(arguments, named)
        unique_key, unique_for_s = options.unique(body.options.unique_for_s, payload)
        task_id = options.task_id or self._ids.next()
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
            **body.options.limit(options.key),
        )
        return self._placed(head, payload, options)

    def build_raw_enqueue(
        self,
        name: str,
        payload: bytes,
        options: EnqueueOptions,
        **given: Unpack[GivenTaskOptions],
    ) -> Enqueue:
        """Return the write that enqueues a task of a function of another process, with its payload as JSON.

        Raises:
            InvalidName: the function's name can't be stored.
            InvalidTask: an option of the function is invalid, or limits are both of the function and per key.
        """
        check_name(name, "task")
        self._warn_of_unknown(name)
        unique_key, unique_for_s = options.unique(None, payload)
        function = task_options(given)
        task_id = options.task_id or self._ids.next()
        head = Head(
            id=task_id,
            queue=self.name,
            name=name,
            priority=options.priority or 0,
            after=dependencies(options.after, payload),
            after_failure=options.after_failure,
            retries=function.retries,
            timeout_s=function.timeout_s,
            unique_key=unique_key,
            unique_for_s=unique_for_s,
            **function.limit(options.key),
        )
        return self._placed(head, payload, options)

    def _warn_of_unknown(self, name: str) -> None:
        """Warn once of a name that no function has, if any function is registered."""
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
        state = TaskState(due=self._clock.wall() + options.delay_s) if options.delay_s else READY
        partition = UNPLACED if self._outbox_folder else partition_of_task(head, self.partition_count)
        return Enqueue(Task(head, payload), partition, state, options.waits_for_unknown)

    def _refuse_far_future(self, task: TaskId) -> None:
        """Check that the time in a given id is not far ahead of the clock and of the ids made here."""
        ahead_s = created_at(task) - self._clock.wall()
        if ahead_s > FAR_FUTURE_S and created_at(task) - created_at(self._ids.next()) > FAR_FUTURE_S:
            raise InvalidTask(
                f"the id {task} has a time {ahead_s / FAR_FUTURE_S:.0f} years ahead, so that its task "
                "would never be collected; ids come from new_id(), not from elsewhere such as a hash"
            )

    def new_id(self) -> TaskId:
        """Return an id for a new task, so that enqueueing it more than once is harmless (SK-1, SK-3)."""
        return self._ids.next()

    def enqueue_all(self, calls: Sequence[PlannedCall[R]]) -> list[Enqueued[R]]:
        """Enqueue calls, with all whose results they get, all or none; return the ids of the given ones.

        Raises what ``Call.enqueue`` does. The message begins with the position of the call, as
        ``calls[3]``, if the error is one of that call, or of one that it needs.
        """
        given = given_calls(calls)
        self.enqueue_ordered(sort_by_dependency(given, self), call_places(len(given)))
        return [call.enqueued for call in given if call.enqueued is not None]

    def enqueue_ordered(self, calls: Mapping[PlannedCall[Any], int], places: Sequence[str] = ()) -> None:
        """Enqueue calls, all or none, each of which comes after those whose results it gets.

        Each has the number of its place in ``places``, which errors name.
        """
        named = [places[number] if places else "" for number in calls.values()]
        made = [
            self._build_at(place, call.body, call.arguments, call.named, call.options(self._ids.next))
            for call, place in zip(calls, named, strict=True)
        ]
        for call, done in zip(calls, self.commit(made, together=len(made) > 1, places=named), strict=True):
            call.enqueued = done

    def enqueue_call(
        self, body: TaskBody, arguments: tuple[Any, ...], named: Mapping[str, Any], options: EnqueueOptions
    ) -> Enqueued[Any]:
        """Enqueue a call of a function, as ``TaskFunction.enqueue``."""
        return self.commit_one(self.build_enqueue(body, arguments, named, options))

    def enqueue_calls(
        self,
        body: TaskBody,
        calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
        options: EnqueueOptions,
    ) -> list[Enqueued[Any]]:
        """Enqueue calls of a function, as ``TaskFunction.enqueue_many``."""
        made = [
            self._build_at(call_place(number), body, tuple(arguments), named, options)
            for number, (arguments, named) in enumerate(pairs_of(body.name, calls))
        ]
        return self.commit(made, places=call_places(len(made)))

    def _build_at(
        self,
        place: str,
        body: TaskBody,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        options: EnqueueOptions,
    ) -> Enqueue:
        """Build a write as ``build_enqueue`` does; errors name the call's place."""
        with concerning(place):
            return self.build_enqueue(body, arguments, named, options)

    def commit(
        self, tasks: Sequence[Enqueue], *, together: bool = False, places: Sequence[str] = ()
    ) -> list[Enqueued[Any]]:
        """Enqueue tasks that were made, ``together`` all or none; return their ids.

        An error of one of them names its place, if there are ``places``.

        The id is that of an earlier task if the task is a duplicate of it (SK-23). A task that is enqueued
        together with others may depend on those before it, and none has a unique key; existing tasks stay.

        Raises what ``TaskFunction.enqueue`` does.
        """
        done: list[Enqueued[Any]] = []
        answers = self._answers(tasks, places or [""] * len(tasks), together=together)
        for each, answer in zip(tasks, answers, strict=True):
            done.append(answer)
            self._note_enqueued(each.task.head, answer)
        return done

    def commit_one(self, task: Enqueue) -> Enqueued[Any]:
        """Enqueue a task that was made, as ``commit`` does."""
        if self._outbox_folder is not None:
            return self.commit([task])[0]
        opened = self._opening.opened()
        opened.ancestry.refuse_cycle(task.task.head)
        done = enqueued(task, opened.context.batcher.enqueue(task))
        self._note_enqueued(task.task.head, done)
        return done

    def _note_enqueued(self, head: Head, done: Enqueued[Any]) -> None:
        """Count a task and call the hooks for it, unless it is a duplicate."""
        if done.answer is EnqueueAnswer.DUPLICATE:
            return
        self.metrics.enqueued(head.name)
        for hook in self._middleware:
            self._call_hook(hook, head)

    def _call_hook(self, hook: Middleware, head: Head) -> None:
        try:
            hook.enqueued(head)
        except Exception as error:  # whatever a hook does, the task is enqueued
            self.errors.ignored(f"middleware {type(hook).__qualname__}.enqueued", error)

    def _answers(
        self, tasks: Sequence[Enqueue], places: Sequence[str], *, together: bool
    ) -> Iterator[Enqueued[Any]]:
        """Enqueue tasks, then iterate over their ids and answers; raises at the first that failed."""
        if together:
            refuse_too_many(len(tasks))
            if any(each.task.head.unique_key for each in tasks):
                raise InvalidTask("tasks that are enqueued together can't have unique_key or unique_for_s")
        outbox = self._opened_outbox()
        if outbox is not None:
            for each, place, outcome in zip(tasks, places, outbox.enqueue(tasks), strict=True):
                if isinstance(outcome, RebalanserError):
                    with concerning(place):
                        raise outcome
                if isinstance(outcome, Duplicate):
                    yield Enqueued(outcome.id, EnqueueAnswer.DUPLICATE)
                else:
                    yield Enqueued(each.task.head.id, outcome)
            return
        ancestry = self._opening.opened().ancestry
        coming: dict[TaskId, Head] = {}
        for each, place in zip(tasks, places, strict=True):
            with concerning(place):
                ancestry.refuse_cycle(each.task.head, coming)
            coming[each.task.head.id] = each.task.head
        if together:
            run_script(enqueue_together(tasks, places), self._perform)
            yield from (Enqueued(each.task.head.id) for each in tasks)
            return
        pending_writes = [PendingEnqueue(each) for each in tasks]
        self.context.batcher.write_all(pending_writes)
        for each, place, pending in zip(tasks, places, pending_writes, strict=True):
            with concerning(place):
                answer = enqueued(each, result_of(pending))
            yield answer

    def _perform(self, request: Request) -> object:
        """Make a request of tasks that are enqueued together."""
        match request:
            case Submit(pending_writes=pending_writes):
                self.context.batcher.write_all(pending_writes)
                return None
            case Await(pending_writes=pending_writes):
                await_all(pending_writes)
                return None
            case ReadTasks(ids=ids):
                return self.context.read(ids)
            case ReadPayloads(ids=ids):
                return self.context.engine.payloads(self.name, ids, self._timeout_s)
            case _:
                raise InternalError(f"a producer makes no request {request!r}")

    @overload
    def wait(self, task: Enqueued[R], timeout_s: float = 60.0) -> R: ...

    @overload
    def wait(self, task: TaskId, timeout_s: float = 60.0) -> Any: ...

    def wait(self, task: TaskId, timeout_s: float = 60.0) -> Any:
        """Wait until a task is complete; return its result, by the function's return type.

        It was stored as JSON, and is plain JSON if the function has no return type or is not known here.
        ``get(task).state.result`` has the JSON itself.

        A body that waits for a task of its own queue takes part of the worker's concurrency meanwhile. Once
        all bodies of a worker do that, it logs a warning. So does a call that waits for a paused queue.

        A task that ``enqueue`` answered as ``spooled`` (SK-4) can be waited for before the engine has it.

        The call ends within ``timeout_s`` seconds, and one more to read the task, even while the engine is
        away.

        Raises:
            TaskFailed: it is dead or cancelled; the message has the error of its last try.
            InvalidTask: the result does not fit the function's return type.
            NotSettled: it is not closed within ``timeout_s`` seconds.
            RegistryUnavailable: the engine did not answer in that time, or in that of one call.
            UnknownTask: there is no task of this id.
            InvalidArgument: ``task`` is not text, or ``timeout_s`` no number of seconds from 0.
        """
        waiting.refuse_wait(task, timeout_s)
        changed = threading.Event()
        limit = self.wait_limit(timeout_s)
        deadline = self.context.clock.now() + timeout_s
        self.notifier.listen(task, changed.set, limit.request_s)
        try:
            with waiting.waiting_for(self.name) as hint:
                stored = self.find_within(limit.request_s, task)
                if stored is not None:
                    self.pause_hint(stored, limit, logs=True)
                while stored is None or stored.state.status not in waiting.CLOSED:
                    why = "" if stored is None else hint(stored)
                    left_s = max(0.0, deadline - self.context.clock.now())
                    if not changed.wait(min(left_s, threading.TIMEOUT_MAX)):
                        if stored is None:
                            raise waiting.still_spooled(task, timeout_s)
                        raise waiting.not_settled(stored, timeout_s, why + self.pause_hint(stored, limit))
                    changed.clear()
                    stored = self.find_within(limit.request_s, task)
        finally:
            self.notifier.leave(task, changed.set)
        return waiting.value_of(stored, self.functions)

    def pause_hint(self, stored: Stored, limit: waiting.WaitLimit, *, logs: bool = False) -> str:
        """Return a hint why an awaited task waits: a pause, or no worker; empty for neither."""
        if stored.state.status is not Status.WAITING:
            return ""
        try:
            present = Pauses.of(pauses.read_pauses(self.context, limit.request_s)).queue
            has_worker = logs or bool(self.context.engine.workers(self.name, limit.request_s))
        except RebalanserError as error:  # the caller waits whatever comes of this
            self.errors.ignored("a look at pauses", error)
            return ""
        if present is None:
            return "" if has_worker else NO_WORKER
        paused = f"the queue is {present.describe(self._clock.wall())}"
        if logs:
            _log.warning(paused, action="task_waits_paused", queue=self.name, task=stored.head.id)
        return f"; {paused}"
