"""Group commit: concurrent writes of several threads share one transaction and one fsync.

The first thread leads: it waits for the write lock, takes all waiting actions, commits them, and hands the
lead to the first thread that came meanwhile. So a single thread waits for no other, and a hundred threads
need few commits. A thread that reaches its deadline before its action is taken withdraws it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rebalanser.core.tasks.store import Answer, Collect, Enqueue, EnqueueAll, Move, Write
from rebalanser.errors import OutcomeUnknown, RegistryUnavailable, RequestTooLarge
from rebalanser.tasks.engine import EngineCapabilities
from rebalanser_sqlite import history
from rebalanser_sqlite.store import Deadline, Store
from rebalanser_sqlite.tasks.writer import Writing

if TYPE_CHECKING:
    from typing import Any

    from rebalanser_sqlite.tasks.writer import Known

CHUNK_WEIGHT = 500
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Writes that are executed together: about ``weight`` rows of ``size`` bytes in all."""

    writes: Sequence[Write]
    weight: int
    size: int

    def carry_out(self, writing: Writing) -> list[Answer]:
        """Execute all writes, in order."""
        return [writing.carry_out(write) for write in self.writes]

    @property
    def large_collection(self) -> Collect | None:
        """The collection of this chunk, if it is one that takes more than one transaction."""
        write = self.writes[0]
        return write if isinstance(write, Collect) and self.weight > CHUNK_WEIGHT else None


def chunks(writes: Sequence[Write], capabilities: EngineCapabilities) -> list[Chunk]:
    """Split writes, in order, into chunks; a write larger than a chunk has its own.

    Raises:
        RequestTooLarge: a payload, the payloads of one all-or-none enqueue, an update or a result is over its
            limit.
    """
    sizes = [_size(write, capabilities) for write in writes]
    if len(writes) == 1:
        return [Chunk(writes, _weight(writes[0]), sizes[0])]
    return list(_chunks(writes, sizes))


def _chunks(writes: Sequence[Write], sizes: Sequence[int]) -> Iterator[Chunk]:
    start = weight = size = 0
    for index, write in enumerate(writes):
        next_weight, next_size = _weight(write), sizes[index]
        if index > start and (weight + next_weight > CHUNK_WEIGHT or size + next_size > CHUNK_BYTES):
            yield Chunk(writes[start:index], weight, size)
            start, weight, size = index, 0, 0
        weight += next_weight
        size += next_size
    if start < len(writes):
        yield Chunk(writes[start:], weight, size)


def _weight(write: Write) -> int:
    match write:
        case Enqueue():
            return 1 + len(write.task.head.after)
        case EnqueueAll():
            return sum(map(_weight, write.enqueues))
        case Collect():
            return len(write.tasks)
        case _:
            return 1


def _size(write: Write, capabilities: EngineCapabilities) -> int:
    if isinstance(write, Enqueue):
        payload = len(write.task.payload)
        _check("payload", payload, capabilities.max_payload_bytes)
        return payload + _result_size(write, capabilities)
    if isinstance(write, EnqueueAll):
        together = sum(_size(each, capabilities) for each in write.enqueues)
        _check("list of tasks that are enqueued together", together, capabilities.max_payload_bytes)
        return together
    if isinstance(write, Move):
        update = 0 if write.update is None else len(write.update.content)
        _check("update", update, capabilities.max_update_bytes)
        return update + _result_size(write, capabilities)
    return 0


def _result_size(write: Enqueue | Move, capabilities: EngineCapabilities) -> int:
    size = 0 if write.state.result is None else len(write.state.result)
    _check("result", size, capabilities.max_update_bytes)
    return size


def _check(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise RequestTooLarge(f"a {what} has {size} bytes; the limit is {limit}")


GROUP_WEIGHT = 1000
"""Maximum weight of one transaction, which blocks other writers for about 30 ms."""
GROUP_BYTES = 8 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Action(Generic[T]):
    """Writes of one caller, about ``weight`` rows of ``size`` bytes; repeated if the transaction failed."""

    do: Callable[[Writing], T]
    weight: int = 1
    size: int = 0


class _Job(Generic[T]):
    """An action that waits for its outcome."""

    def __init__(self, action: Action[T], deadline: Deadline) -> None:
        self.action = action
        self.deadline = deadline
        self.leads = False
        self.outcomes: list[T] = []
        self.error: BaseException | None = None
        self.has_ended = False
        """True once it has its outcome or an error."""
        self._wake = threading.Lock()
        self._wake.acquire()

    def do(self, writing: Writing) -> None:
        """Do the action; its outcome counts once the transaction is committed."""
        self.outcomes = [self.action.do(writing)]

    def hand_lead_to(self, heir: _Job[Any]) -> None:
        """Let another job lead instead, and wake its thread; an interrupt comes before or after both."""
        heir.leads, self.leads = True, False
        heir._wake.release()

    def end(self, error: BaseException | None = None) -> None:
        """End the job with its outcome or this error, and wake its thread. Only the first call counts."""
        if not self.has_ended:
            self.has_ended, self.error = True, error
            if not self.leads:
                self._wake.release()

    def woken(self, timeout_s: float) -> bool:
        """Wait until it leads or has ended; for ever if the time is negative."""
        return self._wake.acquire(timeout=timeout_s)

    def result(self) -> T:
        """Return the outcome, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.outcomes[0]


class Committer:
    """Commits actions on its own connection, which it closes at the end."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Job[Any]] = deque()
        self._led = False
        self._closed = False
        self._known: Known | None = None

    def submit(self, action: Action[T], deadline: Deadline) -> T:
        """Execute an action in one transaction, perhaps with other threads' actions; return its outcome.

        Raises:
            OutcomeUnknown: the disk failed during the commit.
            RegistryUnavailable: other processes kept the file locked until the deadline, or it is closed; no
                effect.
            Exception: the action raised it; no effect.
        """
        job = _Job(action, deadline)
        group: list[_Job[Any]] = []
        try:
            with self._lock:
                if self._closed:
                    raise RegistryUnavailable("this engine is closed")
                self._waiting.append(job)
                job.leads, self._led = not self._led, True
            if not job.leads and not job.woken(deadline.left_s):
                self._withdraw(job)
            if job.leads:
                self._carry_out(group, deadline)
        finally:  # also if the thread was interrupted: no other thread hands on the lead
            if job.leads or not job.has_ended:
                try:
                    self._leave(job, group)
                except BaseException:  # a lead that is not handed on keeps all others from committing
                    self._leave(job, group)
                    raise
        return job.result()

    def ring(self) -> None:
        """Wake all watches of the file, in every process."""
        self._store.ring()

    def close(self) -> None:
        """Refuse waiting actions, wait for the current commit, and close the connection."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            for job in [job for job in self._waiting if not job.leads]:
                self._waiting.remove(job)
                job.end(RegistryUnavailable("this engine was closed before the writes were begun"))
            self._changed.wait_for(lambda: not self._led)
        if not was_closed:
            self._store.close()

    def _withdraw(self, job: _Job[Any]) -> None:
        """Withdraw a job at its deadline, unless it is being committed or leads."""
        with self._lock:
            if job.leads:
                return
            if job in self._waiting:
                self._waiting.remove(job)
                raise RegistryUnavailable(
                    f"other threads kept {self._store.path} busy until the timeout; no effect, try again"
                )
        job.woken(-1)

    def _leave(self, own: _Job[Any], group: list[_Job[Any]]) -> None:
        """Withdraw a job that still waits, end the jobs of its group, and pass on the lead.

        May be called again if it was interrupted.
        """
        if own.leads:
            self._store.abandon_write()
        for job in group:
            if not job.has_ended:
                job.end(OutcomeUnknown("the thread that committed was interrupted; read back"))
        with self._lock:
            if own in self._waiting:
                self._waiting.remove(own)
            if not own.leads:
                return
            if self._waiting:
                own.hand_lead_to(self._waiting[0])
            else:
                self._changed.notify_all()
                self._led = own.leads = False

    def _carry_out(self, group: list[_Job[Any]], deadline: Deadline) -> None:
        """Commit the waiting jobs once the write lock is held; fills ``group`` with them."""
        try:
            changed = history.with_room(self._store, lambda: self._commit(group, deadline), deadline)
        except OutcomeUnknown as error:
            for job in group:
                job.end(error)
        except Exception as error:
            if not group:
                raise
            if len(group) > 1:
                self._commit_one_by_one(group)
            group[0].end(error)
        else:
            for job in group:
                job.end()
            self._after_commit(changed)

    def _commit(self, group: list[_Job[Any]], deadline: Deadline) -> bool:
        """Commit a group; True if anything was changed."""
        with self._store.writing(deadline):
            cursor = self._store.connection.cursor()
            try:
                if not group:
                    self._take(group)
                pages = self._store.pages_before()
                writing = Writing(cursor, self._known)
                for job in group:
                    job.do(writing)
                writing.finish()
            finally:
                cursor.close()
            self._store.check_room(pages)
        self._known = writing.known
        return writing.changed

    def _take(self, group: list[_Job[Any]]) -> None:
        weight = size = 0
        with self._lock:
            while self._waiting:
                action = self._waiting[0].action
                weight, size = weight + action.weight, size + action.size
                if group and (weight > GROUP_WEIGHT or size > GROUP_BYTES):
                    break
                group.append(self._waiting.popleft())

    def _commit_one_by_one(self, group: list[_Job[Any]]) -> None:
        """Commit the jobs of a failed group alone, so that none fails for another's fault or lateness."""
        for job in group:
            try:
                changed = self._commit([job], job.deadline)
            except Exception as error:
                job.end(error)
            else:
                job.end()
                self._after_commit(changed)

    def _after_commit(self, changed: bool) -> None:
        if changed:
            self._store.ring()
            self._store.checkpoint_if_due()
