"""The queue of a host application: it enqueues, runs and reads tasks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

from rebalanser.admin import Admin
from rebalanser.core.clock import Clock
from rebalanser.core.group import Fact, FactKind
from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import TaskId, is_seconds
from rebalanser.core.tasks.ticking import KEPT_S
from rebalanser.errors import InvalidArgument, InvalidState, RebalanserError
from rebalanser.group import Group
from rebalanser.registry.contract import Settles
from rebalanser.runtime.loop_bridge import with_parameters_of
from rebalanser.runtime.participant import run_until_stopped
from rebalanser.tasks import pauses
from rebalanser.tasks.context import load_engine
from rebalanser.tasks.engine import ClaimsFromIndex, Engine
from rebalanser.tasks.execution.bodies import Bodies, Caller, ThreadCaller
from rebalanser.tasks.execution.claim_source import ClaimSource, IndexClaims
from rebalanser.tasks.execution.partitions import Partitions
from rebalanser.tasks.execution.worker import InlineWorker, SharedConcurrency, TaskWorker
from rebalanser.tasks.functions import EnqueueOptions, TaskBody, is_count
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.metrics import Measurement
from rebalanser.tasks.open_queue import IN_MEMORY, OpenQueue, named_in_memory
from rebalanser.tasks.operator import Operator
from rebalanser.tasks.pauses import Pause
from rebalanser.tasks.periodic import Ticker
from rebalanser.tasks.producer import Producer
from rebalanser.tasks.retention import MIN_AGE_S, TASKS_PER_STEP, Sweeper
from rebalanser.tasks.status import WorkerNote

GRACE_S: Final = 30.0
"""Default seconds in which running bodies may end at a stop."""
EXIT_CODE: Final = 70
"""Exit code (EX_SOFTWARE) of a process whose loop failed for an unforeseen reason."""
EXIT_LIMIT_S: Final = 2 * GRACE_S
"""Maximum seconds of the graceful stop of such a process."""
BodyPlace: TypeAlias = Literal["threads", "processes"]
"""Place in which bodies run: threads of the worker, or child processes, which can be killed."""


class Queue(Producer, Operator):
    """A queue of tasks at an engine's URL: ``sqlite:///PATH``, ``etcd://HOST:PORT``, ``memory://NAME``.

    The default URL is that of ``REBALANSER_REGISTRY``. ``memory://`` without a name is an empty store of this
    queue alone, which ends with it; ``Queue("memory://")`` is such a queue, named ``tasks``. ``clock`` is one
    that a test moves, such as ``rebalanser.testing.FakeClock``: see ``run_until_idle``.

    ``claim_ttl_s`` is the time for which a claim lasts unless it is renewed; a worker renews it as long as
    the body runs. A dead worker's task waits for that time and ``buffer_s``, which must cover the drift of
    two clocks in it; None is a tenth of it. ``partitions`` counts only for a new queue. If the engine does
    not hand out claims itself, as SQLite's does, the workers of the queue form a group (``settings``) and own
    its partitions; ``node`` is a label of this one. ``state_folder`` has the ids' marks (SK-1). Without
    ``create`` the queue must exist. ``outbox`` is a folder on this host's disk through which all tasks are
    enqueued, so that this works while the engine is away, even for a new queue (SK-4); see
    ``rebalanser.tasks.outbox``. ``retention`` is the time for which a worker of the queue keeps closed tasks,
    None for ever; it must be the same for all workers (SK-22).

    A forked child opens the engine and the outbox anew at their first use. A worker that was started before
    the fork runs in the parent only.

    Raises:
        InvalidName: the queue's name can't be stored.
        InvalidArgument: the time of a claim is not positive, or the buffer is negative.
        UnknownQueue: there is no queue of this name, and ``create`` is not set; the message names the
            existing ones.
        FixConfiguration: a person has to change the URL or the engine.
        RegistryUnavailable: the engine did not answer within ``timeout_s``, and there is no outbox.
        UnusableFolder: the outbox can't be written.
    """

    @with_parameters_of(OpenQueue.__init__)
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)

    def _begin(self) -> None:
        self._group: Group | None = None
        self._worker: TaskWorker | None = None
        self._bodies: Bodies | None = None
        self._note: WorkerNote | None = None
        self._ticker: Ticker | None = None
        self._inline_ticker: Ticker | None = None
        self._caller: Caller | None = None
        self._source: ClaimSource | None = None
        self._sweeper: Sweeper | None = None
        self._stopped = threading.Event()
        super()._begin()

    def _forked(self) -> None:
        """Forget the parent's state in a forked child; a closed queue stays closed."""
        if self._is_closed:
            return
        self._has_left_worker |= self._source is not None
        self._begin()

    @contextmanager
    def in_memory(self, clock: Clock | None = None) -> Iterator[Self]:
        """Make it an empty queue in memory within a context, as a test does; its functions stay.

        ``clock`` is as in ``Queue(clock=)``. No other thread may use the queue as the context begins or ends.

        Raises:
            InvalidState: the queue is started.
        """
        self._refuse_started()
        before = vars(self).copy()
        self._url = named_in_memory(IN_MEMORY)
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
            self._ids.close()
            vars(self).update(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def measure(self) -> Measurement:
        """Measure this process: its counts, its failures, and the age of the oldest ready task.

        On SQLite it reads the store for that age. Raises nothing.
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
        wall, source, engine = self._clock.wall(), self._source, self.context.engine
        if source is not None:
            since = source.ready_since(wall)
        elif isinstance(engine, ClaimsFromIndex):
            since = engine.ready_since(self.name, wall, self._timeout_s)
        else:
            return None
        return 0.0 if since is None else wall - since

    @property
    def known_pause(self) -> Pause | None:
        """The pause of the queue as last seen by this process, which must be a worker; reads no store."""
        source = self._source
        return None if source is None else source.pause

    def run(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Work on tasks until SIGINT, SIGTERM or SIGHUP, then stop gracefully; see ``start``.

        Raises:
            InvalidState: not called in the main thread.
        """
        run_until_stopped(_RunningQueues(self, concurrency, bodies))

    def start(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Join the queue's workers and begin to run tasks, ``concurrency`` at a time, in threads.

        With ``bodies="processes"`` each body runs in a child process, which is killed once the body is out of
        time, or its claim is lost; its functions must be importable (SK-15).

        An error of one task ends its try and nothing else. While the engine is away or takes nothing, the
        loops of the queue retry without limit (``troubles``). An unforeseen error is retried for 60 s;
        then the queue is stopped and the process exits with code 70, so that a supervisor can act.

        Raises:
            InvalidState: it runs already, is closed, or was given a clock.
            InvalidArgument: ``concurrency`` is less than 1, or ``bodies`` is neither of the two.
            InvalidHandlers: a function can't be imported by a child process; the message names it.
            RegistryUnavailable: the engine did not answer in time.
        """
        self.start_with(_caller(bodies, self.functions, self.errors), concurrency)

    def run_until_idle(self, *, advance_s: float = 0.0) -> int:
        """Run all tasks that are ready in the calling thread, one after another, as a test does.

        Returns the number of tries, once no task is ready, including those that bodies have enqueued. With
        ``advance_s`` it then moves the queue's clock forward by that many seconds, from one due time to the
        next, and runs the tasks that become ready: delayed ones, retries and ticks. Nothing sleeps.

        Bodies run as in production, except that no claim is renewed and ``timeout_s`` ends no plain function.
        On ``memory://``, no other queue may work on the same store meanwhile.

        Raises:
            InvalidArgument: ``advance_s`` is no number of seconds from 0.
            InvalidState: the queue is started, or paused while tasks are ready; its engine is neither
                ``memory://`` nor ``sqlite://``; or ``advance_s`` is given and the queue has no clock that can
                be moved.
        """
        return self.run_inline(ThreadCaller(), advance_s)

    def run_inline(self, caller: Caller, advance_s: float) -> int:
        """Run ready tasks as ``run_until_idle`` does, with another caller of bodies."""
        engine = self.context.engine
        if not is_seconds(advance_s):
            raise InvalidArgument(f"advance_s is {advance_s!r}: give seconds from 0")
        self._refuse_started()
        source, settle = self._inline_source(engine)
        ticker = self._inline_ticker = self._inline_ticker or self._made_ticker(lambda _: True)
        bodies = Bodies(self.functions, self._middleware, self._clock, caller, self.errors, self.metrics)
        caller.open()
        try:
            return InlineWorker(self.context, source, bodies, ticker, settle).run(advance_s)
        finally:
            bodies.close()
            caller.close()
            source.close()

    def _inline_source(self, engine: Engine) -> tuple[ClaimSource, Callable[[], None]]:
        """Return a source of claims without a group, and a call after which it knows of all tasks."""
        if isinstance(engine, ClaimsFromIndex):
            return IndexClaims(self.context, engine, self._label, self._buffer_s, _ignore), _ignore
        if not isinstance(engine, Settles):
            raise InvalidState("tasks run in the calling thread on memory:// and sqlite:// only")
        engine.settle()
        source = Partitions(self.context, self._label, self._buffer_s, _ignore, self.partition_count)
        source.take_all()
        return source, engine.settle

    def _made_ticker(self, is_mine: Callable[[TaskId], bool]) -> Ticker:
        return Ticker(
            self._schedules,
            self._clock,
            is_mine,
            self.context.read,
            self._enqueue_tick,
            self.errors,
            self._ticks_kept_s(),
            lambda: pauses.read_pauses(self.context),
        )

    def start_with(self, caller: Caller, concurrency: int, shared: SharedConcurrency | None = None) -> None:
        """Start as ``start`` does, with another caller of bodies and with places that queues share."""
        require_concurrency(concurrency)
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
            self.functions, self._middleware, self.context.clock, caller, self.errors, self.metrics
        )
        source, group = self._joined(woken.set)
        worker = TaskWorker(self.context, source, bodies, concurrency, woken, shared)
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
        self._ticker = self._made_ticker(
            lambda task: source.owns(partition_of_id(task, self.partition_count))
        )
        self._ticker.start()
        self._note = WorkerNote(self.context, self._label, concurrency, lambda: worker.running)
        self._note.start()

    def _ticks_kept_s(self) -> float:
        """Return the minimum seconds for which the task of a tick exists, closed or not."""
        shortest_s = None if self.retention is None else self.retention.shortest_s
        return KEPT_S if shortest_s is None else max(MIN_AGE_S, min(KEPT_S, shortest_s))

    def start_claim_source(self, wake: Callable[[], None]) -> ClaimSource:
        """Join the queue's workers without running bodies; return the source of claims for clients.

        ``wake`` is called whenever there may be something to claim. ``stop`` ends it.

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
        self._note = WorkerNote(self.context, self._label)
        self._note.start()
        return source

    def _start_sweeper(self) -> None:
        if self.retention is not None and self.retention.shortest_s is not None:
            tasks = partial(self.tasks, page=TASKS_PER_STEP)
            self._sweeper = Sweeper(self.context, tasks, self.retention, self._label)
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
        """Return this process's source of claims, and the group that assigns it partitions, if any."""
        engine = self.context.engine
        if isinstance(engine, ClaimsFromIndex):
            return IndexClaims(self.context, engine, self._label, self._buffer_s, wake), None
        self._add_partitions()
        partitions = Partitions(self.context, self._label, self._buffer_s, wake, self.partition_count)
        group = Group(group_name(self.name), self._url, node=self._label, settings=self._settings)
        group.on_start(partitions.take)
        group.on_stop(partitions.give_up)
        group.on_fact(self._on_fact)
        group.on_fact(partitions.on_fact)
        return partitions, group

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        self._stopped.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop is requested; True if so."""
        return self._stopped.wait(timeout_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Claim no more, leave, and let the bodies that run end within ``grace_s`` seconds (30 where None).

        Other workers hand out the tasks of its partitions while its bodies end. Tasks whose bodies have not
        ended by then are given back, and later writes of these bodies are refused. When this returns, the end
        of each try is written, unless the engine is away. Stopping twice does nothing. An interrupt, such as
        a second Ctrl-C, ends the grace at once.
        """
        require_grace(grace_s)
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
                ends.callback(self.context.batcher.flush)
            grace_s = GRACE_S if grace_s is None else grace_s
            try:
                self._end_work(source, group, grace_s)
            except BaseException:
                self._end_work(source, group, 0.0)
                raise

    def leave(self, grace_s: float) -> None:
        """Claim no more, and let others hand out the tasks of its partitions; ``stop`` follows.

        Tasks that are being claimed now are given back, which may take ``grace_s`` seconds.
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
        """Claim no more and let bodies end; called again if it was interrupted."""
        deadline = self._clock.now() + grace_s
        self._leave(source, group, grace_s)
        if self._worker is not None:
            self._worker.stop(max(0.0, deadline - self._clock.now()))

    def close(self) -> None:
        """Stop, finish pending writes, and close the engine. Closing twice does nothing."""
        self.stop()
        self._is_closed = True
        if self._outbox is not None:
            self._outbox.close()
        self._opening.close()
        self._ids.close()

    def _on_fact(self, fact: Fact) -> None:
        if fact.kind is FactKind.ENGINE_FAILED:
            self.errors.give_up(f"the group of the queue has failed: {fact.detail}")

    def _end_process(self) -> None:
        """End a process whose loops have failed: its claims are given back first, if possible."""

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
        if self.context.read([task]):  # by another process: where no partition is owned, all of them do it
            return
        self.commit(
            [self.build_enqueue(self.functions[name], (), {}, EnqueueOptions(task_id=task, delay_s=delay_s))]
        )

    def _add_partitions(self) -> None:
        with Admin(group_name(self.name), self._url, settings=self._settings) as admin:
            present = {each.resource for each in admin.resources()}
            admin.add(
                [name for number in range(self.partition_count) if (name := str(number)) not in present]
            )


class Queues:
    """Several queues of one registry that one process works on, the tasks of earlier ones first.

    All bodies share one concurrency. A task of a later queue begins only while no earlier one has a ready
    task, of any priority: a queue that always has ready tasks starves those after it. To reserve some hosts
    for a later queue, run another worker for that queue alone.

    Raises:
        InvalidArgument: there is no queue, one comes twice, or they are at different URLs.
    """

    def __init__(self, *queues: Queue) -> None:
        refuse_mixed(queues, Queue)
        self._queues = queues
        self._stopped = threading.Event()

    def run(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Work on tasks until a signal, or a stop of one of the queues; as ``Queue.run``."""
        run_until_stopped(_RunningQueues(self, concurrency, bodies))

    def start(self, concurrency: int = 1, *, bodies: BodyPlace = "threads") -> None:
        """Begin to run tasks, ``concurrency`` in all at a time; raises what ``Queue.start`` does."""
        require_concurrency(concurrency)
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
        """Wait until a stop of any of the queues is requested; True if so."""
        return self._stopped.wait(timeout_s)

    def stop(self, grace_s: float | None = None) -> None:
        """Leave all queues, then let the bodies that run end within ``grace_s`` seconds (30 where None).

        As ``Queue.stop``, also if it is interrupted. The queues stay open.
        """
        require_grace(grace_s)
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


def require_concurrency(concurrency: object) -> None:
    """Check that a worker can run this number of tasks at a time.

    Raises:
        InvalidArgument: it is no whole number from 1.
    """
    if not is_count(concurrency, 1):
        raise InvalidArgument(f"concurrency is how many tasks run at a time, 1 or more, not {concurrency!r}")


def require_grace(grace_s: object) -> None:
    """Check the seconds in which running bodies may end.

    Raises:
        InvalidArgument: it is neither None nor a number of seconds from 0.
    """
    if grace_s is not None and not is_seconds(grace_s):
        raise InvalidArgument(f"grace_s is {grace_s!r}: give seconds from 0, or None for {GRACE_S:g}")


def refuse_mixed(queues: Sequence[Any], kind: type[object]) -> None:
    """Check that one process can work on queues together.

    Raises:
        InvalidArgument: there are none, one is not of this ``kind`` or is given twice, or their URLs differ.
    """
    if not queues:
        raise InvalidArgument("give at least one queue")
    for each in queues:
        if not isinstance(each, kind):
            raise InvalidArgument(
                f"{kind.__name__}s(…) takes queues one by one, each made by {kind.__name__}(…), not {each!r}"
            )
    names, urls = [each.name for each in queues], {each.url for each in queues}
    if len(urls) > 1:
        raise InvalidArgument(f"queues of one worker are at one URL, and {', '.join(names)} are not")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"a queue comes twice in {', '.join(names)}")


class _RunningQueues:
    """Queues that are worked on, for ``run_until_stopped``."""

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
    """Begin to follow the tasks to claim."""
    if isinstance(source, IndexClaims):
        source.open()
    if group is not None:
        group.start()


def _caller(place: BodyPlace, functions: Mapping[str, TaskBody], errors: ErrorPolicy) -> Caller:
    if place == "threads":
        return ThreadCaller()
    if place != "processes":
        raise InvalidArgument(f'bodies is {place!r}: give "threads" or "processes"')
    from rebalanser.tasks.processes import ProcessCaller  # noqa: PLC0415 - most workers have no children

    return ProcessCaller(functions, errors)


def _ignore() -> None:
    """No-op wake-up."""


def group_name(queue: str) -> str:
    """Return the name of the group of a queue's workers; its resources are the partitions, by number."""
    return f"tasks-{queue}"
