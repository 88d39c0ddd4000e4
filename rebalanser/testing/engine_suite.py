"""The conformance suite for engines: a store that passes it may keep tasks.

A store's tests implement an ``EngineHarness`` and subclass ``EngineSuite``::

    class TestMyEngine(EngineSuite):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

Every test quotes the sentence of ``rebalanser.tasks.engine`` that it checks, and is marked with its rules
(``pytest.mark.rule``). The suite never sleeps: it waits for the events of a watch. Call
``pytest.register_assert_rewrite("rebalanser.testing.engine_suite")`` in a ``conftest.py`` for full assertion
messages.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, TypeAlias

import pytest

from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import (
    HIGHEST_PRIORITY,
    ID_DIGITS,
    LOWEST_PRIORITY,
    OPEN,
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    Task,
    TaskId,
    TaskState,
    Update,
    rate_of,
)
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Change,
    ChangesLost,
    ClaimAnswer,
    ClaimQuery,
    Collect,
    Duplicate,
    Enqueue,
    EnqueueAll,
    Exists,
    Forwarded,
    Move,
    OwnerEpoch,
    Page,
    Paused,
    QueueNote,
    Skip,
    StatusFilter,
    Taken,
    TakeOver,
    Unknown,
    Write,
    WriteConflict,
)
from rebalanser.errors import InvalidName, RegistryUnavailable, RequestTooLarge, UnusableStore
from rebalanser.tasks.engine import ClaimsFromIndex, Engine
from rebalanser.testing.waiting import PATIENCE_S, Recorder

TIMEOUT_S = PATIENCE_S
"""Timeout of every request; a healthy store answers long before."""
PARTITIONS = 4
QUEUE = "mail"
OTHER_QUEUE = "mail/other"
OUTBOX = "0123456789abcdef"
MANY = 2500
"""More tasks than a page holds, and more writes than a transaction."""
THREADS = 8
AWKWARD_NAMES = (
    "with space",
    "a/b",
    "a",
    "a%2Fb",
    "%",
    "..",
    "größe",
    "日本語",
    "🐙",
    "quote'\"",
    "back\\slash",
    "x" * 512,
)
UNSTORABLE_NAMES = ("", "line\nfeed", "null\0", "x" * 513, "\ud800")

BIT_FOR_BIT = bytes(range(256))
TERM = ClaimTerm(30.5, "a boot of a host", 12345.0625)
TTL_S = 30.0
BUFFER_S = 3.0
OWN_TERM = ClaimTerm(TTL_S, "this boot", 100.0)
"""Term of holders that claim tasks, counted on one clock."""
EVERY_STATE = (
    TaskState(),
    TaskState(due=1.7e9 + 0.125),
    TaskState(Status.CLAIMED, ClaimState(0, "holder", "worker", TERM)),
    TaskState(
        Status.CLAIMED, ClaimState(2**31, "hölder 🐙", "", ClaimTerm(0.5, "", -1.0), 2**31), failures=3
    ),
    TaskState(Status.WAITING, ClaimState(3, "h", "w", TERM, 7), 1.5, 2, "it failed:\n\0 so"),
    TaskState(Status.COMPLETED, ClaimState(1, "h", "w", TERM), result=BIT_FOR_BIT),
    TaskState(Status.COMPLETED, ClaimState(1, "h", "w", TERM), result=b""),
    TaskState(Status.COMPLETED, ClaimState(1, "h", "w", TERM), result=None),
    TaskState(Status.DEAD, ClaimState(9, "h", "w", TERM), failures=10, error="x" * 5000),
    TaskState(Status.CANCELLED),
)


class EngineHarness(ABC):
    """A store for the suite: a new and empty one for every test, and connections to it.

    Set ``can_reopen`` or ``can_lose_history`` to False if the store has no such thing; the tests that need it
    are then reported as skipped, with the reason.
    """

    can_reopen: bool = True
    """True if an engine that is opened after all others were closed finds what they wrote."""
    can_lose_history: bool = True

    patience_s: float = PATIENCE_S
    """Real seconds to wait for an event of a watch before the test fails."""

    @abstractmethod
    def open(self) -> Engine:
        """A new connection to the store, as another process would open it. The suite closes it."""

    def lose_history(self, revision: int) -> None:
        """Make the store forget the changes before ``revision``, as a compaction does."""
        raise NotImplementedError(f"can_lose_history is True: forget what is older than {revision}")


class StateRecorder(Recorder["Stored | ChangesLost"]):
    """A sink of an engine's watch."""

    def __call__(self, told: Sequence[Stored] | ChangesLost) -> None:
        self.record([told] if isinstance(told, ChangesLost) else told)

    @property
    def states(self) -> list[Stored]:
        """The changed states so far, each once: a watch may repeat itself."""
        return list(dict.fromkeys(item for item in self.told if isinstance(item, Stored)))

    def wait_for(self, *expected: Stored) -> None:
        """Block until all the expected states have arrived."""
        missing = set(expected)

        def complete(told: Sequence[Stored | ChangesLost]) -> bool:
            missing.difference_update(item for item in told if isinstance(item, Stored))
            return not missing

        self.wait_until(complete, str(expected[:20]))

    def wait_for_loss(self) -> ChangesLost:
        """Block until a loss of history has arrived; return the last one."""
        self.wait_until(lambda told: any(isinstance(item, ChangesLost) for item in told), "ChangesLost")
        return [item for item in self.told if isinstance(item, ChangesLost)][-1]


Connect: TypeAlias = Callable[[], Engine]


def task_id(number: int) -> TaskId:
    """An id; a greater number gives a later one."""
    return f"{number:0{ID_DIGITS}x}"


def make(
    number: int,
    *,
    queue: str = QUEUE,
    payload: bytes = b"payload",
    state: TaskState | None = None,
    after: Sequence[int] = (),
    waits_for_unknown: bool = False,
    **fields: object,
) -> Enqueue:
    """A write that enqueues a task; ``fields`` are those of its head."""
    dependencies = tuple(task_id(dependency) for dependency in after)
    head = replace(Head(task_id(number), queue, "send", after=dependencies), **fields)  # type: ignore[arg-type]
    return Enqueue(
        Task(head, payload), partition_of_id(head.id, PARTITIONS), state or TaskState(), waits_for_unknown
    )


def timed(seconds: float, number: int = 0) -> int:
    """The number of an id of this time, for ``task_id``."""
    return (int(seconds * 1000) << 96) + number


def forwarded(enqueue: Enqueue, number: int, outbox: str = OUTBOX) -> Enqueue:
    """The same write, as an entry of an outbox."""
    return replace(enqueue, forwarded=Forwarded(outbox, number))


def skip(number: int, outbox: str = OUTBOX) -> Skip:
    """A write that skips an entry."""
    return Skip(QUEUE, Forwarded(outbox, number))


def apply(engine: Engine, *writes: Write) -> list[Answer]:
    """Apply writes; an answer for each."""
    answers = list(engine.apply(writes, TIMEOUT_S))
    assert len(answers) == len(writes)
    return answers


def applied(engine: Engine, *writes: Write) -> list[int]:
    """Apply writes that must all take effect; their revisions."""
    answers = apply(engine, *writes)
    assert all(isinstance(answer, Applied) for answer in answers), answers
    return [answer.revision for answer in answers if isinstance(answer, Applied)]


def find(engine: Engine, task: TaskId, queue: str = QUEUE) -> Stored | None:
    """One task, None if no task has this id."""
    found = engine.read(queue, [task], TIMEOUT_S)
    assert found.keys() <= {task}
    return found.get(task)


def read(engine: Engine, task: TaskId, queue: str = QUEUE) -> Stored:
    """One task that must exist."""
    found = find(engine, task, queue)
    assert found is not None, f"{task} is absent"
    return found


def stored(enqueue: Enqueue, revision: int) -> Stored:
    """A task as it is stored after it was enqueued at ``revision``."""
    return Stored(enqueue.task.head, enqueue.state, revision, enqueue.partition)


def move(of: Stored, state: TaskState, update: Update | None = None, epoch: OwnerEpoch | None = None) -> Move:
    """A write that moves a task from the state that was read to another."""
    return Move(of.head.id, of.head.queue, of.partition, of.revision, state, epoch, update)


def claimed(number: int = 0, updates: int = 0) -> TaskState:
    """A state of a task that is claimed."""
    return TaskState(Status.CLAIMED, ClaimState(number, f"holder-{number}", "worker", TERM, updates))


def collect(*tasks: Stored) -> Collect:
    """A write that collects these tasks as they were read."""
    return Collect(tasks[0].head.queue, {task.head.id: (task.partition, task.revision) for task in tasks})


def pages(
    engine: Engine,
    queue: str = QUEUE,
    *,
    partition: int | None = None,
    statuses: frozenset[Status] | None = None,
    limit: int = 1000,
) -> list[Page]:
    """All pages of a queue, each of at most ``limit`` tasks."""
    found: list[Page] = []
    after: TaskId | None = None
    while not found or after is not None:
        page = engine.page(queue, TIMEOUT_S, partition=partition, statuses=statuses, after=after, limit=limit)
        assert len(page.items) <= limit
        assert page.next is None or after is None or page.next > after, "the pages do not end"
        found.append(page)
        after = page.next
    return found


def items(found: Sequence[Page]) -> list[Stored]:
    """The tasks of some pages."""
    return [item for page in found for item in page.items]


def everything(engine: Engine, queue: str = QUEUE) -> list[Stored]:
    """All tasks of a queue, by their ids."""
    return items(pages(engine, queue))


def counts(engine: Engine, queue: str = QUEUE) -> dict[Status, int]:
    """Number of tasks in each status that occurs."""
    return {status: number for status, number in engine.count(queue, TIMEOUT_S).items() if number}


def index_of(engine: Engine) -> ClaimsFromIndex:
    """The engine as one that hands out claims itself."""
    if not isinstance(engine, ClaimsFromIndex):
        pytest.skip("this engine hands out no claims itself: its tasks have owners of partitions")
    return engine


def request(
    *holders: str,
    names: Sequence[str] | None = ("send",),
    term: ClaimTerm = OWN_TERM,
    now: float = 0.0,
    wall: float = 0.0,
) -> ClaimQuery:
    """A request for a claim for each of the holders; ``now`` is the time of their clock."""
    return ClaimQuery(QUEUE, holders, "worker", term, names, lambda: now, wall, BUFFER_S)


def log(engine: Engine, task: TaskId, claim: int | None = None) -> list[Update]:
    """The updates of a task."""
    return list(engine.updates(QUEUE, task, TIMEOUT_S, claim=claim))


class LimitedTasks:
    """Tasks with limits, and the one that an index must hand out next, found by a search of all of them."""

    def __init__(self, engine: Engine, index: ClaimsFromIndex, rng: random.Random) -> None:
        self._engine = engine
        self._index = index
        self._random = rng
        self._wall = 0.0
        self._now = 0.0
        self._full_at: dict[str, float] = {}
        """Time at which the rate of a key allows its whole burst again."""
        self._tasks: dict[TaskId, Stored] = {}

    def step(self, number: int) -> None:
        """Apply a random change."""
        self._wall += self._random.choice((0.0, 1.0))
        self._now += self._random.choice((0.0, 0.25))
        step = self._random.choice(
            [self._enqueue] * 3
            + [self._claim] * 2
            + [self._complete, self._fail, self._cancel, self._requeue]
        )
        step(number)

    def _of(self, *statuses: Status) -> list[Stored]:
        return [
            self._tasks[task] for task in sorted(self._tasks) if self._tasks[task].state.status in statuses
        ]

    def _put(self, statuses: Sequence[Status], **fields: object) -> None:
        """Change the state of a task that has one of these statuses, if there is any."""
        if found := self._of(*statuses):
            task = self._random.choice(found)
            state = replace(task.state, **fields)  # type: ignore[arg-type]
            (revision,) = applied(self._engine, move(task, state))
            self._tasks[task.head.id] = replace(task, state=state, revision=revision)

    def _enqueue(self, number: int) -> None:
        key, limit, rate = self._random.choice(
            (("", 0, ""), ("a", 1, ""), ("b", 3, ""), ("c", 0, "1/s burst 2"), ("d", 1, "2/s"))
        )
        due = self._random.choice((0.0, 0.0, self._wall + 3.0))
        found = self._of(*OPEN)
        needed = (
            [int(self._random.choice(found).head.id, 16)] if found and self._random.random() < 0.2 else []
        )
        priority = self._random.choice((0, 0, 5))
        limits: dict[str, Any] = {"limit_key": key, "max_running": limit, "rate_limit": rate}
        write = make(number, priority=priority, state=TaskState(due=due), after=needed, **limits)
        (revision,) = applied(self._engine, write)
        self._tasks[write.task.head.id] = stored(write, revision)

    def _complete(self, _number: int) -> None:
        self._put([Status.CLAIMED], status=Status.COMPLETED)

    def _fail(self, _number: int) -> None:
        due = self._random.choice((0.0, self._wall + 2.0))
        self._put([Status.CLAIMED], status=Status.WAITING, due=due)

    def _cancel(self, _number: int) -> None:
        self._put([Status.WAITING, Status.CLAIMED], status=Status.CANCELLED)

    def _requeue(self, _number: int) -> None:
        self._put([Status.CANCELLED], status=Status.WAITING, due=0.0)

    def _claim(self, number: int) -> None:
        found = [each for each in self._of(Status.WAITING) if self._is_ready(each)]
        best = min(found, key=lambda each: (-each.head.priority, each.head.id), default=None)
        answer = self._index.claim(request(f"h{number}", now=self._now, wall=self._wall), TIMEOUT_S)
        assert [task.head.id for task, _ in answer.claimed] == ([] if best is None else [best.head.id])
        if best is not None and best.head.rate_limit:
            every_s = rate_of(best.head.rate_limit).every_s
            self._full_at[best.head.limit_key] = self._rests_until(best.head) + every_s
        self._tasks |= {task.head.id: task for task, _ in answer.claimed}

    def _rests_until(self, head: Head) -> float:
        return max(self._full_at.get(head.limit_key, 0.0), self._now)

    def _is_ready(self, task: Stored) -> bool:
        head = task.head
        running = sum(each.head.limit_key == head.limit_key for each in self._of(Status.CLAIMED))
        waits = task.state.claim is None and any(
            self._tasks[needed].state.status is not Status.COMPLETED for needed in head.after
        )
        has_room = not head.max_running or running < head.max_running
        if head.rate_limit:
            rate = rate_of(head.rate_limit)
            has_room &= self._rests_until(head) - (rate.burst - 1) * rate.every_s <= self._now
        return task.state.due <= self._wall and has_room and not waits


class EngineSuite:
    """The contract of engines: subclass it, provide the fixture ``harness``, and run pytest."""

    @pytest.fixture
    def harness(self) -> EngineHarness:
        """The store's harness, new for every test."""
        raise NotImplementedError("a store overrides the fixture `harness`")

    @pytest.fixture
    def connect(self, harness: EngineHarness) -> Iterator[Connect]:
        """Opens connections that are closed when the test ends; the queues of the suite are defined."""
        with ExitStack() as stack:

            def opened() -> Engine:
                engine = stack.enter_context(closing(harness.open()))
                for queue in (QUEUE, OTHER_QUEUE):
                    assert engine.define(queue, PARTITIONS, TIMEOUT_S) == PARTITIONS
                return engine

            yield opened

    @pytest.fixture
    def engine(self, connect: Connect) -> Engine:
        """One connection."""
        return connect()

    @pytest.fixture
    def recorder(self, harness: EngineHarness) -> StateRecorder:
        """A sink."""
        return StateRecorder(harness.patience_s)

    # -- enqueue

    @pytest.mark.rule("SK-2", "SK-3")
    def test_a_task_is_stored_as_it_was_enqueued(self, engine: Engine) -> None:
        """Holds: "Add a task with its first state"."""
        writes = [
            make(1, payload=BIT_FOR_BIT, priority=LOWEST_PRIORITY, retries=7, timeout_s=0.25),
            make(2, payload=b"", priority=HIGHEST_PRIORITY, name="größe 🐙"),
            make(3, after=[2, 1], priority=-1, timeout_s=86400.0),
            *(make(4 + number, after=[1], after_failure=each) for number, each in enumerate(AfterFailure)),
            make(7, after_failure=AfterFailure.FAIL),
            *(make(10 + number, state=state) for number, state in enumerate(EVERY_STATE)),
        ]
        revisions = applied(engine, *writes)
        ids = [write.task.head.id for write in writes]
        expected = dict(zip(ids, map(stored, writes, revisions), strict=True))
        assert engine.read(QUEUE, ids, TIMEOUT_S) == expected
        assert engine.payloads(QUEUE, ids, TIMEOUT_S) == {
            write.task.head.id: write.task.payload for write in writes
        }

    @pytest.mark.rule("SK-3")
    def test_an_id_that_is_taken_is_answered_with_what_it_is_taken_by(self, engine: Engine) -> None:
        """Holds: "where the id is taken, whatever it is taken by"."""
        first = make(1, payload=b"first", after=[1], waits_for_unknown=True)
        (revision,) = applied(engine, first)
        present = stored(first, revision)
        others = [
            first,
            make(1, payload=b"other"),
            make(1, priority=5),
            make(1, after=[2]),
            make(1, state=claimed(4)),
        ]
        assert apply(engine, *others) == [Exists(present, b"first")] * len(others)
        (later,) = applied(engine, move(present, claimed()))
        present = replace(present, state=claimed(), revision=later)
        assert apply(engine, *others) == [Exists(present, b"first")] * len(others)
        assert everything(engine) == [present]
        assert counts(engine) == {Status.CLAIMED: 1}

    @pytest.mark.rule("SK-3")
    def test_an_id_is_taken_within_a_batch_too(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order"."""
        first = make(1, payload=b"first")
        answers = apply(engine, first, make(1, payload=b"second"), make(2))
        assert isinstance(answers[0], Applied)
        assert answers[1] == Exists(stored(first, answers[0].revision), b"first")
        assert isinstance(answers[2], Applied)

    @pytest.mark.rule("SK-2", "SK-5")
    def test_an_unknown_dependency_is_refused(self, engine: Engine) -> None:
        """Holds: "if a task of the queue that it depends on does not exist at that moment"."""
        applied(engine, make(1), make(2, queue=OTHER_QUEUE))
        refused = make(9, after=[3, 1, 2, 9])
        assert apply(engine, refused) == [Unknown((task_id(3), task_id(2), task_id(9)))]
        assert find(engine, task_id(9)) is None
        assert engine.payloads(QUEUE, [task_id(9)], TIMEOUT_S) == {}
        assert counts(engine) == {Status.WAITING: 1}
        applied(engine, make(9, after=[3, 1, 2, 9], waits_for_unknown=True))
        assert read(engine, task_id(9)).head.after == refused.task.head.after

    @pytest.mark.rule("SK-2", "SK-5")
    def test_a_dependency_may_be_enqueued_before_in_the_batch(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order"."""
        answers = apply(engine, make(2, after=[1]), make(1), make(3, after=[1]), make(4, after=[1, 3, 2]))
        assert isinstance(answers[1], Applied)
        assert isinstance(answers[2], Applied)
        assert answers[0] == Unknown((task_id(1),))
        assert answers[3] == Unknown((task_id(2),))

    @pytest.mark.rule("SK-2", "SK-5")
    def test_a_task_may_depend_on_many(self, engine: Engine) -> None:
        """Holds: "if a task of the queue that it depends on does not exist at that moment", of 300."""
        applied(engine, *(make(number) for number in range(1, 301)))
        fan = list(range(1, 301))
        assert apply(engine, make(1000, after=[*fan, 301]), make(1001, after=fan))[0] == Unknown(
            (task_id(301),)
        )
        assert read(engine, task_id(1001)).head.after == tuple(task_id(number) for number in fan)

    @pytest.mark.rule("SK-2", "SK-5")
    @pytest.mark.parametrize("others", [1, 30], ids=["few others", "many others"])
    def test_tasks_that_depend_on_each_other_are_enqueued_together(
        self, engine: Engine, recorder: StateRecorder, others: int
    ) -> None:
        """Holds: "Add tasks of one queue, all or none, as if each was enqueued after those before it"."""
        before = [make(number) for number in range(1, others + 1)]
        applied(engine, *before)
        parts = [make(number, after=[others]) for number in range(100, 198)]
        last = make(300, after=[*range(1, others + 1), *range(100, 198)], payload=b"x" * 20_000)
        tasks = (*parts, last, make(301, after=[300], state=TaskState(due=1.5)))
        with closing(engine.watch(QUEUE, engine.page(QUEUE, TIMEOUT_S, limit=1).revision, recorder)):
            (revision,) = applied(engine, EnqueueAll(tasks))
            found = engine.read(QUEUE, [each.task.head.id for each in tasks], TIMEOUT_S)
            assert [found[each.task.head.id].head for each in tasks] == [each.task.head for each in tasks]
            assert [found[each.task.head.id].state for each in tasks] == [each.state for each in tasks]
            assert max(each.revision for each in found.values()) == revision
            recorder.wait_for(*found.values())
        assert engine.payloads(QUEUE, [task_id(300)], TIMEOUT_S) == {task_id(300): b"x" * 20_000}
        assert counts(engine) == {Status.WAITING: others + 100}
        for needed in (others, 100, 300):
            assert apply(engine, collect(read(engine, task_id(needed)))) == [WriteConflict()]
        applied(engine, collect(*everything(engine)))

    @pytest.mark.rule("SK-2", "SK-3", "SK-5")
    def test_of_tasks_that_are_enqueued_together_none_is_if_one_is_refused(self, engine: Engine) -> None:
        """Holds: "what refuses the first that can't be added"."""
        (revision,) = applied(engine, make(2, payload=b"first"))
        exists = Exists(stored(make(2), revision), b"first")
        tasks = (make(3), make(4, after=[3]))
        answers = apply(
            engine,
            EnqueueAll((*tasks, make(2, after=[4]))),
            EnqueueAll((*tasks, make(5, after=[3, 8, 9]), make(2))),
            EnqueueAll((make(4, after=[3]), make(3))),
            make(6, after=[3]),
        )
        assert answers == [
            exists, Unknown((task_id(8), task_id(9))), Unknown((task_id(3),)), Unknown((task_id(3),)),
        ]  # fmt: skip
        assert everything(engine) == [exists.stored]
        assert engine.payloads(QUEUE, [task_id(3), task_id(4)], TIMEOUT_S) == {}
        assert counts(engine) == {Status.WAITING: 1}
        unknown = make(5, after=[9], waits_for_unknown=True)
        applied(engine, EnqueueAll((*tasks, unknown)), make(6, after=[3, 5]))
        assert len(everything(engine)) == 5

    @pytest.mark.rule("SK-2")
    def test_tasks_that_are_too_large_together_are_refused(self, engine: Engine) -> None:
        """Holds: "nothing was written", of tasks that are small enough each by itself."""
        half = b"x" * (engine.capabilities.max_payload_bytes * 2 // 3)
        with pytest.raises(RequestTooLarge):
            engine.apply([EnqueueAll((make(1, payload=half), make(2, payload=half)))], TIMEOUT_S)
        assert everything(engine) == []

    @pytest.mark.rule("SK-5", "SK-14")
    @pytest.mark.parametrize("others", [0, 20], ids=["few others", "many others"])
    def test_a_task_is_collected_or_those_enqueued_together_depend_on_it(
        self, connect: Connect, others: int
    ) -> None:
        """Holds: "a task enqueued since they were read would else wait for one that is gone"."""
        producer, collector = connect(), connect()
        kept = range(1000, 1000 + others)
        applied(producer, *map(make, kept))
        together = threading.Barrier(2)

        def act(engine: Engine, write: Write) -> Answer:
            together.wait(TIMEOUT_S)
            return apply(engine, write)[0]

        with ThreadPoolExecutor(2) as pool:
            for number in range(1, 46, 3):
                (revision,) = applied(producer, make(number))
                enqueue_all = EnqueueAll(
                    (make(number + 1, after=[*kept, number]), make(number + 2, after=[number + 1]))
                )
                enqueueing = pool.submit(act, producer, enqueue_all)
                collecting = pool.submit(act, collector, collect(stored(make(number), revision)))
                enqueued, collected = enqueueing.result(), collecting.result()
                if isinstance(collected, Applied):
                    assert enqueued == Unknown((task_id(number),))
                    assert find(producer, task_id(number + 2)) is None
                else:
                    assert collected == WriteConflict()
                    assert isinstance(enqueued, Applied)
                    assert find(producer, task_id(number)) is not None

    @pytest.mark.rule("SK-2")
    def test_queues_are_apart(self, engine: Engine) -> None:
        """The same id in two queues is two tasks: "Count the tasks of a queue", its own."""
        one, other = make(1, payload=b"one"), make(1, queue=OTHER_QUEUE, payload=b"other")
        first, second = applied(engine, one, other)
        (third,) = applied(engine, move(stored(one, first), claimed()))
        assert read(engine, task_id(1)) == replace(stored(one, third), state=claimed())
        assert read(engine, task_id(1), OTHER_QUEUE) == stored(other, second)
        assert counts(engine) == {Status.CLAIMED: 1}
        assert counts(engine, OTHER_QUEUE) == {Status.WAITING: 1}
        assert engine.payloads(OTHER_QUEUE, [task_id(1)], TIMEOUT_S) == {task_id(1): b"other"}
        applied(engine, collect(read(engine, task_id(1))))
        assert everything(engine) == []
        assert everything(engine, OTHER_QUEUE) == [stored(other, second)]

    # -- for people

    @pytest.mark.rule("SK-15")
    def test_the_last_note_of_each_process_is_kept(self, connect: Connect) -> None:
        """Holds: "Put a worker process's note in place of the one before; None deletes it"."""
        engine, other = connect(), connect()
        assert engine.workers(QUEUE, TIMEOUT_S) == {}
        for process, note in (("a", b"one"), ("b", b"two"), ("a", b"three")):
            engine.note_worker(QUEUE, process, note, TIMEOUT_S)
        engine.note_worker(OTHER_QUEUE, "a", b"other", TIMEOUT_S)
        assert other.workers(QUEUE, TIMEOUT_S) == {"a": b"three", "b": b"two"}
        for _ in range(2):
            engine.note_worker(QUEUE, "a", None, TIMEOUT_S)
        assert other.workers(QUEUE, TIMEOUT_S) == {"b": b"two"}
        assert other.workers(OTHER_QUEUE, TIMEOUT_S) == {"a": b"other"}

    @pytest.mark.rule("SK-12")
    def test_the_oldest_ready_task_is_found(self, engine: Engine) -> None:
        """Holds: "if it is due and waits for nothing but a worker", of any name and priority."""
        wall = 1_900_000_000.0

        def made(
            age_s: float,
            *,
            due: float = 0.0,
            after: Sequence[int] = (),
            priority: int = 0,
            name: str = "send",
        ) -> Enqueue:
            born_id = f"{int((wall - age_s) * 1000):016x}{0:024x}"
            state = TaskState(due=due)
            return make(1, id=born_id, state=state, after=after, priority=priority, name=name)

        def oldest_s() -> float | None:
            since = engine.ready_since(QUEUE, wall, TIMEOUT_S)
            return None if since is None else round(wall - since, 3)

        assert oldest_s() is None
        first = make(1)
        (revision,) = applied(engine, first)
        assert oldest_s() == 0.0, "its id tells no time"
        applied(engine, made(50.0, priority=7), made(10.0, priority=9))
        assert oldest_s() == 50.0
        applied(engine, made(90.0, after=[1]), made(200.0, due=wall + 1.0))
        assert oldest_s() == 50.0, "others wait for a task or for a time"
        applied(engine, made(60.0, priority=-1, name="other"))
        assert oldest_s() == 60.0
        applied(engine, made(300.0, due=wall - 70.0))
        assert oldest_s() == 70.0
        (revision,) = applied(engine, move(stored(first, revision), claimed()))
        done = replace(claimed(), status=Status.COMPLETED)
        applied(engine, move(replace(stored(first, revision), state=claimed()), done))
        assert oldest_s() == 90.0, "it waits for nothing more"

    # -- outboxes

    @pytest.mark.rule("SK-4")
    def test_an_entry_of_an_outbox_is_taken_once(self, engine: Engine) -> None:
        """Holds: "If it was counted before, it is answered ``Taken``"."""
        entry = forwarded(make(1), 1)
        (revision,) = applied(engine, entry)
        assert read(engine, task_id(1)) == stored(make(1), revision)
        assert apply(engine, entry) == [Taken()]
        assert apply(engine, forwarded(make(2), 1)) == [Taken()], "whatever it is said to be"
        applied(engine, forwarded(make(3), 2))
        assert apply(engine, entry, forwarded(make(3), 2)) == [Taken(), Taken()]
        assert [item.head.id for item in everything(engine)] == [task_id(1), task_id(3)]
        assert counts(engine) == {Status.WAITING: 2}

    @pytest.mark.rule("SK-4")
    def test_an_entry_is_not_taken_again_once_its_task_was_collected(
        self, connect: Connect, harness: EngineHarness
    ) -> None:
        """Holds: "whatever happened to its task since: collections keep the tallies"."""
        engine = connect()
        entries = [forwarded(make(number), number) for number in range(1, 61)]
        applied(engine, *entries)
        done = TaskState(Status.COMPLETED, ClaimState(0, "holder", "worker", TERM))
        applied(engine, *(move(item, done) for item in everything(engine)))
        first, *others = everything(engine)
        applied(engine, collect(first), collect(*others))
        if harness.can_reopen:
            engine.close()
            engine = connect()
        assert apply(engine, *entries) == [Taken()] * len(entries)
        assert everything(engine) == []

    @pytest.mark.rule("SK-4")
    def test_no_entry_is_taken_before_another(self, engine: Engine) -> None:
        """Holds: "if one before it was not, ``WriteConflict``"."""
        assert apply(engine, forwarded(make(2), 2)) == [WriteConflict()]
        assert find(engine, task_id(2)) is None
        first, third, second = apply(
            engine, forwarded(make(1), 1), forwarded(make(3), 3), forwarded(make(2), 2)
        )
        assert isinstance(first, Applied)
        assert third == WriteConflict()
        assert isinstance(second, Applied)
        applied(engine, forwarded(make(3), 3))

    @pytest.mark.rule("SK-4")
    def test_entries_of_one_batch_are_taken_in_their_order(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order", of one outbox and beside others."""
        chain = [forwarded(make(number, after=[number - 1][: number - 1]), number) for number in range(1, 21)]
        others = [forwarded(make(100 + number, after=[number]), number, "other") for number in range(1, 21)]
        applied(engine, *(each for pair in zip(chain, others, strict=True) for each in pair), make(200))
        assert len(everything(engine)) == 41
        assert set(apply(engine, *chain, *others)) == {Taken()}

    @pytest.mark.rule("SK-4")
    def test_an_id_may_stand_in_two_entries(self, engine: Engine) -> None:
        """Holds: "where the id is taken, whatever it is taken by", by the entry before."""
        entries = [forwarded(make(1), 1), forwarded(make(1), 2), forwarded(make(2), 3)]
        first, *others = apply(engine, *entries)
        assert isinstance(first, Applied)
        assert others == [Exists(stored(make(1), first.revision), b"payload"), WriteConflict()]
        applied(engine, skip(2), forwarded(make(2), 3))

    @pytest.mark.rule("SK-4")
    def test_entries_of_one_batch_are_taken_up_to_one_that_is_refused(self, engine: Engine) -> None:
        """Holds: "if one before it was not, ``WriteConflict``", of a batch of 200."""
        payload = bytes(10_000)
        (revision,) = applied(engine, make(100, payload=b"other"))
        entries = [forwarded(make(number, payload=payload), number) for number in range(1, 201)]
        answers = apply(engine, *entries)
        assert all(isinstance(answer, Applied) for answer in answers[:99])
        assert answers[99] == Exists(stored(make(100), revision), b"other")
        assert answers[100:] == [WriteConflict()] * 100
        answers = apply(engine, make(300), *entries[:99], skip(100), *entries[99:], make(301), skip(201))
        assert [type(answer) for answer in answers] == [
            Applied, *[Taken] * 99, Applied, Taken, *[Applied] * 100, Applied, Applied,
        ]  # fmt: skip
        assert counts(engine) == {Status.WAITING: 202}
        assert engine.payloads(QUEUE, [task_id(150)], TIMEOUT_S) == {task_id(150): payload}

    @pytest.mark.rule("SK-4")
    def test_an_entry_that_is_refused_is_not_counted(self, engine: Engine) -> None:
        """Holds: "An entry that is answered ``Exists``", or ``Unknown``, "is not counted"."""
        (revision,) = applied(engine, make(1, payload=b"first"))
        exists = Exists(stored(make(1), revision), b"first")
        assert apply(engine, forwarded(make(1), 1), forwarded(make(2), 2)) == [exists, WriteConflict()]
        unknown = forwarded(make(2, after=[9]), 1)
        assert apply(engine, unknown, forwarded(make(3), 2)) == [Unknown((task_id(9),)), WriteConflict()]
        many = list(range(100, 201))
        assert apply(engine, forwarded(make(2, after=many), 1)) == [Unknown(tuple(map(task_id, many)))]
        applied(engine, make(9))
        applied(engine, unknown)

    @pytest.mark.rule("SK-4")
    def test_an_entry_that_depends_on_many_is_taken_once(self, engine: Engine) -> None:
        """Holds: "an entry is taken once, however often it is sent", of a task after 100."""
        applied(engine, *(make(number) for number in range(1, 101)))
        fan = forwarded(make(1000, after=list(range(1, 101))), 1)
        assert apply(engine, forwarded(make(1000, after=list(range(1, 101))), 2)) == [WriteConflict()]
        applied(engine, fan)
        applied(engine, collect(*everything(engine)))
        assert apply(engine, fan) == [Taken()]
        assert everything(engine) == []

    @pytest.mark.rule("SK-4")
    def test_an_entry_may_be_skipped(self, engine: Engine) -> None:
        """Holds: "Count an entry of an outbox and make no task of it"."""
        assert apply(engine, skip(2)) == [WriteConflict()]
        applied(engine, skip(1), skip(1), forwarded(make(2), 2))
        assert apply(engine, forwarded(make(1), 1), skip(1), skip(2)) == [Taken(), Taken(), Taken()]
        applied(engine, skip(3))
        assert apply(engine, forwarded(make(3), 3)) == [Taken()]
        assert [item.head.id for item in everything(engine)] == [task_id(2)]

    @pytest.mark.rule("SK-4")
    def test_every_outbox_has_a_tally_of_its_own_in_every_queue(self, engine: Engine) -> None:
        """Holds: "Of each outbox an engine keeps a *tally* for each queue"."""
        applied(engine, forwarded(make(1), 1), forwarded(make(2), 2))
        applied(engine, forwarded(make(3), 1, "other/outbox"), forwarded(make(1, queue=OTHER_QUEUE), 1))
        assert apply(engine, forwarded(make(4), 1, "other/outbox")) == [Taken()]
        assert apply(engine, forwarded(make(4, queue=OTHER_QUEUE), 3)) == [WriteConflict()]

    @pytest.mark.rule("SK-4")
    def test_of_many_that_send_an_entry_one_has_it_taken(self, connect: Connect) -> None:
        """Holds: "an entry is taken once, however often it is sent", by whoever sends it."""
        engines = [connect() for _ in range(3)]
        entries = [forwarded(make(number), number) for number in range(1, 11)]

        def send(number: int) -> list[Answer]:
            return [apply(engines[number % 3], entry)[0] for entry in entries]

        with ThreadPoolExecutor(THREADS) as threads:
            answers = list(threads.map(send, range(THREADS)))
        for told in zip(*answers, strict=True):
            assert sum(isinstance(answer, Applied) for answer in told) == 1
            assert set(told) <= {Taken(), *(each for each in told if isinstance(each, Applied))}
        assert len(everything(engines[0])) == len(entries)

    # -- unique keys

    @pytest.mark.rule("SK-23")
    def test_a_duplicate_is_answered_the_task_that_keeps_it_out(self, engine: Engine) -> None:
        """Holds: "a duplicate of the last task of its queue and its name that was enqueued with that key"."""
        applied(engine, make(1, unique_key="k"), make(2), make(3, unique_key="K"))
        applied(engine, make(4, unique_key="k", name="other"), make(5, unique_key="k", queue=OTHER_QUEUE))
        assert apply(engine, make(6, unique_key="k")) == [Duplicate(task_id(1))]
        assert apply(engine, make(7, unique_key="k", name="other")) == [Duplicate(task_id(4))]
        assert apply(engine, make(8, unique_key="k", queue=OTHER_QUEUE)) == [Duplicate(task_id(5))]
        assert [item.head.id for item in everything(engine)] == [task_id(number) for number in (1, 2, 3, 4)]
        assert read(engine, task_id(1)).head.unique_key == "k"

    @pytest.mark.rule("SK-23")
    @pytest.mark.parametrize("key", ["x" * 512, "a/b", "größe 🐙", "null\0", "quote'"], ids=repr)
    def test_a_unique_key_is_any_text(self, engine: Engine, key: str) -> None:
        """Holds: "if it has a unique key", whatever that is."""
        (revision,) = applied(engine, make(1, unique_key=key, unique_for_s=0.125))
        assert apply(engine, make(2, unique_key=key)) == [Duplicate(task_id(1))]
        assert read(engine, task_id(1)) == stored(make(1, unique_key=key, unique_for_s=0.125), revision)
        assert everything(engine) == [read(engine, task_id(1))]

    @pytest.mark.rule("SK-23")
    @pytest.mark.parametrize("state", EVERY_STATE, ids=lambda state: state.status.value)
    def test_a_task_keeps_others_out_while_it_is_open(self, engine: Engine, state: TaskState) -> None:
        """Holds: "keeps new tasks out while it is open", and no closed one does."""
        enqueue = make(1, unique_key="k")
        (revision,) = applied(engine, enqueue)
        applied(engine, move(stored(enqueue, revision), state))
        answers = apply(engine, make(2, unique_key="k"), make(3, unique_key="k"))
        if state.status in OPEN:
            assert answers == [Duplicate(task_id(1))] * 2
        else:
            assert isinstance(answers[0], Applied)
            assert answers[1] == Duplicate(task_id(2))

    @pytest.mark.rule("SK-23")
    def test_a_task_keeps_others_out_for_its_time(self, engine: Engine) -> None:
        """Holds: "``unique_for_s`` seconds by the times of the ids", whatever its status."""
        completed = TaskState(Status.COMPLETED)
        applied(engine, make(timed(100.0), unique_key="k", unique_for_s=5.0, state=completed))
        early = [make(timed(at_s, 1), unique_key="k") for at_s in (99.0, 100.0, 104.999)]
        assert apply(engine, *early) == [Duplicate(task_id(timed(100.0)))] * 3
        applied(engine, make(timed(105.0, 1), unique_key="k", state=completed))
        applied(engine, make(timed(105.0, 2), unique_key="k"))

    @pytest.mark.rule("SK-23")
    def test_of_duplicates_in_one_batch_the_first_is_made(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order"."""
        done = make(1000, unique_key="9", state=TaskState(Status.DEAD))
        applied(engine, done)
        writes = [make(number, unique_key=str(number % 10)) for number in range(1, 101)]
        answers = apply(engine, make(200), *writes, make(201))
        assert all(isinstance(answer, Applied) for answer in (answers[0], *answers[1:11], answers[-1]))
        assert answers[11:-1] == [Duplicate(task_id((number - 1) % 10 + 1)) for number in range(11, 101)]
        assert len(everything(engine)) == 13

    @pytest.mark.rule("SK-3", "SK-23")
    def test_a_unique_task_is_enqueued_twice(self, engine: Engine) -> None:
        """Holds: "``Exists`` where the id is taken", whatever was enqueued with its key since."""
        one = make(1, unique_key="k", state=TaskState(Status.COMPLETED))
        (first,) = applied(engine, one)
        assert apply(engine, one) == [Exists(stored(one, first), b"payload")]
        applied(engine, make(2, unique_key="k"))
        assert apply(engine, one, make(3, unique_key="k")) == [
            Exists(stored(one, first), b"payload"), Duplicate(task_id(2)),
        ]  # fmt: skip

    @pytest.mark.rule("SK-23")
    @pytest.mark.parametrize("needs", [1, 100])
    def test_a_unique_task_may_depend_on_others(self, engine: Engine, needs: int) -> None:
        """Holds: "``Duplicate``", or else "``Unknown``"; also of what the batch itself makes."""
        after = list(range(1, needs + 1))
        assert apply(engine, make(500, after=after, unique_key="k")) == [
            Unknown(tuple(task_id(each) for each in after))
        ]
        applied(engine, *map(make, after), make(501, after=after, unique_key="k"))
        assert apply(engine, make(502, after=after, unique_key="k")) == [Duplicate(task_id(501))]
        assert apply(engine, make(503, after=[999], unique_key="k")) == [Duplicate(task_id(501))]
        applied(engine, make(504, unique_key="l"), make(505, after=[504]), make(506, after=[501, 505]))
        answers = apply(engine, make(507, unique_key="l"), make(508, after=[507]))
        assert answers == [Duplicate(task_id(504)), Unknown((task_id(507),))]

    @pytest.mark.rule("SK-4", "SK-23")
    def test_an_entry_that_is_a_duplicate_is_not_counted(self, engine: Engine) -> None:
        """Holds: "``Duplicate`` or ``Unknown`` is not counted"."""
        entries = [forwarded(make(number, unique_key="k" * (number < 3)), number) for number in (1, 2, 3)]
        answers = apply(engine, *entries)
        assert isinstance(answers[0], Applied)
        assert answers[1:] == [Duplicate(task_id(1)), WriteConflict()]
        applied(engine, skip(2), entries[2])
        assert apply(engine, *entries) == [Taken()] * 3
        assert [item.head.id for item in everything(engine)] == [task_id(1), task_id(3)]

    @pytest.mark.rule("SK-23")
    @pytest.mark.parametrize("beside", [0, 200])
    def test_a_deleted_task_keeps_nothing_out(self, engine: Engine, beside: int) -> None:
        """Holds: "and is not deleted", of few tasks and of as many as no transaction takes."""
        closed = TaskState(Status.COMPLETED)
        old = make(1, unique_key="k", state=closed)
        last = make(2, unique_key="k", unique_for_s=60.0, state=closed)
        others = [make(number, unique_key="l", state=closed) for number in range(1000, 1000 + beside)]
        revisions = applied(engine, old, last, *others)
        tasks = [
            stored(each, revision) for each, revision in zip([old, last, *others], revisions, strict=True)
        ]
        half = beside // 2
        applied(engine, collect(tasks[0], *tasks[2 : 2 + half]))
        assert apply(engine, make(3, unique_key="k")) == [Duplicate(task_id(2))]
        applied(engine, collect(tasks[1], *tasks[2 + half :]))
        assert everything(engine) == []
        applied(engine, make(3, unique_key="k"), make(4, unique_key="l"))

    @pytest.mark.rule("SK-23")
    def test_of_many_that_enqueue_with_a_key_one_makes_a_task(self, connect: Connect) -> None:
        """Holds: "Each ``Write`` is all or nothing and linearizable", of duplicates."""
        engines = [connect() for _ in range(3)]
        closed = TaskState(Status.DEAD)
        applied(engines[0], *(make(10**6 + key, unique_key=str(key), state=closed) for key in range(5)))

        def enqueue(number: int) -> list[Answer]:
            writes = [make(100 * number + key, unique_key=str(key)) for key in range(10)]
            return [apply(engines[number % 3], write)[0] for write in writes]

        with ThreadPoolExecutor(THREADS) as threads:
            answers = list(threads.map(enqueue, range(1, 1 + THREADS)))
        for key, told in enumerate(zip(*answers, strict=True)):
            made = [number for number, answer in enumerate(told, 1) if isinstance(answer, Applied)]
            assert len(made) == 1
            others = {answer for answer in told if not isinstance(answer, Applied)}
            assert others == {Duplicate(task_id(100 * made[0] + key))}

    # -- move

    @pytest.mark.rule("SK-6", "SK-10")
    @pytest.mark.parametrize("state", EVERY_STATE, ids=lambda state: state.status.value)
    def test_a_move_puts_the_next_state(self, engine: Engine, state: TaskState) -> None:
        """Holds: "Put a task's next state in place of the one of ``revision``"."""
        for number, before in enumerate(EVERY_STATE):
            enqueue = make(number, state=before)
            (revision,) = applied(engine, enqueue)
            head = enqueue.task.head if number % 2 else None
            (later,) = applied(engine, replace(move(stored(enqueue, revision), state), head=head))
            assert later > revision
            assert read(engine, task_id(number)) == replace(stored(enqueue, later), state=state)
        assert counts(engine) == {state.status: len(EVERY_STATE)}
        assert set(engine.payloads(QUEUE, [task_id(0)], TIMEOUT_S).values()) == {b"payload"}

    @pytest.mark.rule("SK-6", "SK-9", "SK-10")
    def test_a_move_of_another_revision_changes_nothing(self, engine: Engine) -> None:
        """Holds: "The condition did not hold; nothing was changed"."""
        enqueue = make(1)
        (revision,) = applied(engine, enqueue)
        (present,) = applied(engine, move(stored(enqueue, revision), claimed()))
        expected = replace(stored(enqueue, present), state=claimed())
        for wrong in (revision, present + 1, present + 1000, 0):
            stale = replace(expected, revision=wrong)
            assert apply(engine, move(stale, claimed(7), Update(7, 0, b"stale"))) == [WriteConflict()]
        assert read(engine, task_id(1)) == expected
        assert log(engine, task_id(1)) == []
        assert counts(engine) == {Status.CLAIMED: 1}

    @pytest.mark.rule("SK-6")
    def test_a_task_that_does_not_exist_is_not_moved(self, engine: Engine) -> None:
        """Holds: "The condition did not hold; nothing was changed"."""
        (revision,) = applied(engine, make(1))
        absent = stored(make(2), revision)
        elsewhere = stored(make(1, queue=OTHER_QUEUE), revision)
        moves = [move(of, claimed(), Update(0, 0, b"")) for of in (absent, elsewhere)]
        assert apply(engine, *moves) == [WriteConflict(), WriteConflict()]
        assert find(engine, task_id(2)) is None
        assert everything(engine, OTHER_QUEUE) == []

    @pytest.mark.rule("SK-6")
    def test_of_two_moves_of_a_batch_the_first_one_counts(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order"."""
        enqueue = make(1)
        (revision,) = applied(engine, enqueue)
        present = stored(enqueue, revision)
        answers = apply(engine, move(present, claimed(1)), move(present, claimed(2)))
        assert isinstance(answers[0], Applied)
        assert answers[1] == WriteConflict()
        assert read(engine, task_id(1)).state == claimed(1)

    @pytest.mark.rule("SK-3", "SK-6", "SK-13", "SK-14")
    def test_a_refused_write_leaves_the_others_alone(self, engine: Engine) -> None:
        """Holds: "a write of it that is refused leaves the others alone", each answered in its place."""
        first, second = make(1), make(2)
        revisions = applied(engine, first, second, TakeOver(QUEUE, OwnerEpoch(3, 10)))
        one, two = stored(first, revisions[0]), stored(second, revisions[1])
        answers = apply(
            engine,
            make(1, payload=b"again"),
            make(3, after=[99]),
            replace(move(one, claimed()), revision=one.revision + 5000),
            TakeOver(QUEUE, OwnerEpoch(3, 9)),
            collect(one, replace(two, revision=two.revision + 5000)),
            move(one, claimed(), Update(0, 0, b"u")),
            collect(two),
            make(4),
        )
        assert answers[:5] == [Exists(one, b"payload"), Unknown((task_id(99),)), *[WriteConflict()] * 3]
        assert all(isinstance(answer, Applied) for answer in answers[5:])
        assert [(item.head.id, item.state) for item in everything(engine)] == [
            (task_id(1), claimed()),
            (task_id(4), TaskState()),
        ]

    @pytest.mark.rule("SK-12")
    def test_an_empty_batch_is_answered(self, engine: Engine) -> None:
        """Holds: "return the answers in order"."""
        assert apply(engine) == []

    @pytest.mark.rule("SK-11")
    def test_revisions_only_grow(self, engine: Engine, connect: Connect) -> None:
        """Holds: "greater than that of every earlier write of the engine"."""
        engines = [engine, connect()]
        latest = 0
        for number in range(20):
            enqueue = make(number, queue=(QUEUE, OTHER_QUEUE)[number % 3 == 0])
            revisions = applied(engines[number % 2], enqueue, TakeOver(QUEUE, OwnerEpoch(0, number)))
            revisions += applied(engines[number % 5 == 0], move(stored(enqueue, revisions[0]), claimed()))
            assert min(revisions) > latest
            assert revisions == sorted(revisions)
            latest = revisions[-1]

    # -- updates

    @pytest.mark.rule("SK-9")
    def test_an_update_is_written_with_its_state(self, engine: Engine) -> None:
        """Holds: "with an update where there is one"."""
        applied(engine, make(1), make(2))
        contents = [BIT_FOR_BIT, b"", *(b"%d" % number for number in range(2, 13))]
        for number, content in enumerate(contents):
            present = read(engine, task_id(1))
            applied(engine, move(present, claimed(0, number + 1), Update(0, number, content)))
            assert log(engine, task_id(1))[-1:] == [Update(0, number, content)]
        assert log(engine, task_id(1)) == [
            Update(0, number, content) for number, content in enumerate(contents)
        ]
        assert log(engine, task_id(2)) == []

    @pytest.mark.rule("SK-9", "SK-12")
    def test_a_log_is_read_in_parts(self, engine: Engine) -> None:
        """Holds: "Read a task's log by claim and number, of one claim from number ``first`` on or of all"."""
        applied(engine, make(1))
        written = [Update(claim, sequence, b"x") for claim in (2, 10, 300) for sequence in (0, 9, 10, 256)]
        for update in reversed(written):
            applied(engine, move(read(engine, task_id(1)), claimed(), update))

        def part(claim: int | None, first: int, limit: int) -> list[Update]:
            return list(engine.updates(QUEUE, task_id(1), TIMEOUT_S, claim=claim, first=first, limit=limit))

        assert part(None, 0, 1000) == written
        assert part(None, 0, 5) == written[:5]
        assert part(10, 0, 1000) == written[4:8]
        assert part(10, 9, 2) == written[5:7]
        assert part(10, 11, 1000) == written[7:8]
        assert part(10, 257, 1000) == []
        assert part(11, 0, 1000) == []
        assert list(engine.updates(QUEUE, task_id(2), TIMEOUT_S)) == []

    @pytest.mark.rule("SK-9", "SK-10")
    def test_the_logs_of_earlier_claims_stay(self, engine: Engine) -> None:
        """Earlier claims' logs stay readable: "of one claim from number ``first`` on or of all"."""
        applied(engine, make(1))
        for claim in range(3):
            applied(engine, move(read(engine, task_id(1)), claimed(claim)))
            applied(
                engine, move(read(engine, task_id(1)), claimed(claim, 1), Update(claim, 0, b"%d" % claim))
            )
        applied(engine, move(read(engine, task_id(1)), TaskState(Status.COMPLETED, claimed(2, 1).claim)))
        assert log(engine, task_id(1)) == [Update(claim, 0, b"%d" % claim) for claim in range(3)]
        assert log(engine, task_id(1), claim=1) == [Update(1, 0, b"1")]

    # -- epochs

    @pytest.mark.rule("SK-13")
    def test_only_the_present_owner_claims(self, engine: Engine) -> None:
        """Holds: "With an ``epoch`` only if that is still the partition's"."""
        applied(engine, make(1))

        def with_epoch(token: int, partition: int = 0) -> Answer:
            present = read(engine, task_id(1))
            (answer,) = apply(engine, move(present, claimed(), epoch=OwnerEpoch(partition, token)))
            return answer

        partition = read(engine, task_id(1)).partition
        other = (partition + 1) % PARTITIONS
        assert with_epoch(10, partition) == WriteConflict(), "nobody has taken the partition over"
        applied(engine, TakeOver(QUEUE, OwnerEpoch(partition, 10)), TakeOver(QUEUE, OwnerEpoch(other, 99)))
        applied(engine, TakeOver(OTHER_QUEUE, OwnerEpoch(partition, 77)))
        assert isinstance(with_epoch(10, partition), Applied)
        assert [with_epoch(token, partition) for token in (9, 11, 0, 77, 99)] == [WriteConflict()] * 5
        applied(engine, TakeOver(QUEUE, OwnerEpoch(partition, 2**62)))
        assert with_epoch(10, partition) == WriteConflict()
        assert isinstance(with_epoch(2**62, partition), Applied)
        applied(engine, move(read(engine, task_id(1)), TaskState()))

    @pytest.mark.rule("SK-13")
    def test_an_older_owner_does_not_take_over(self, engine: Engine) -> None:
        """Holds: "Taking over again with the same token is ``Applied``; an older token is a
        ``WriteConflict``"."""
        applied(engine, TakeOver(QUEUE, OwnerEpoch(1, 10)))
        applied(engine, TakeOver(QUEUE, OwnerEpoch(1, 10)), TakeOver(QUEUE, OwnerEpoch(1, 10)))
        assert apply(engine, TakeOver(QUEUE, OwnerEpoch(1, 9))) == [WriteConflict()]
        applied(engine, TakeOver(QUEUE, OwnerEpoch(2, 9)), TakeOver(QUEUE, OwnerEpoch(1, 11)))
        assert apply(engine, TakeOver(QUEUE, OwnerEpoch(1, 10))) == [WriteConflict()]

    @pytest.mark.rule("SK-13")
    def test_taking_over_stands_in_the_order_of_its_batch(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order"."""
        enqueue = make(1)
        at = enqueue.partition
        (revision, _) = applied(engine, enqueue, TakeOver(QUEUE, OwnerEpoch(at, 1)))
        present = stored(enqueue, revision)
        answers = apply(
            engine, TakeOver(QUEUE, OwnerEpoch(at, 2)), move(present, claimed(), epoch=OwnerEpoch(at, 1))
        )
        assert isinstance(answers[0], Applied)
        assert answers[1] == WriteConflict()
        applied(engine, move(present, claimed(), epoch=OwnerEpoch(at, 2)), TakeOver(QUEUE, OwnerEpoch(at, 3)))

    @pytest.mark.rule("SK-6", "SK-13")
    def test_no_claim_of_an_older_owner_follows_a_takeover(self, connect: Connect) -> None:
        """Holds: "Fencing token of a partition's owner, which alone may claim there"."""
        older, newer = connect(), connect()
        enqueue = make(1)
        epoch = OwnerEpoch(enqueue.partition, 1)
        (revision, _) = applied(older, enqueue, TakeOver(QUEUE, epoch))
        begun = threading.Event()

        def claim_until_refused() -> int:
            present = stored(enqueue, revision)
            for number in range(MANY):
                state = claimed(number)
                (answer,) = apply(older, move(present, state, epoch=epoch))
                if not isinstance(answer, Applied):
                    return present.revision
                present = replace(present, state=state, revision=answer.revision)
                if number == 5:
                    begun.set()
            raise AssertionError("the older owner is never refused")

        with ThreadPoolExecutor(1) as pool:
            claiming = pool.submit(claim_until_refused)
            assert begun.wait(TIMEOUT_S)
            (taken_over,) = applied(newer, TakeOver(QUEUE, OwnerEpoch(enqueue.partition, 2)))
            seen = read(newer, task_id(1))
            assert claiming.result(TIMEOUT_S) <= taken_over
        assert read(newer, task_id(1)) == seen

    # -- note

    @pytest.mark.rule("SK-22")
    def test_a_note_is_put_in_place_of_the_one_that_was_read(self, connect: Connect) -> None:
        """Holds: "Replace the note of ``version``; False if that is not the present one"."""
        engine, other = connect(), connect()
        assert engine.note(QUEUE, TIMEOUT_S) == QueueNote()
        assert not engine.put_note(QUEUE, b"too early", 7, TIMEOUT_S)
        assert engine.put_note(QUEUE, b"first", 0, TIMEOUT_S)
        first = other.note(QUEUE, TIMEOUT_S)
        assert first.content == b"first"
        assert not other.put_note(QUEUE, b"late", 0, TIMEOUT_S)
        assert other.put_note(QUEUE, b"second", first.version, TIMEOUT_S)
        second = engine.note(QUEUE, TIMEOUT_S)
        assert (second.content, second.version > first.version) == (b"second", True)
        assert not engine.put_note(QUEUE, b"late", first.version, TIMEOUT_S)
        assert engine.note(QUEUE, TIMEOUT_S) == second
        assert engine.note(OTHER_QUEUE, TIMEOUT_S) == QueueNote()
        assert everything(engine) == []

    # -- pauses

    def test_pauses_are_stored_until_they_are_deleted(self, connect: Connect) -> None:
        """Holds: "its own under an empty name, its schedules' by name"."""
        engine, other = connect(), connect()
        assert engine.pauses(QUEUE, TIMEOUT_S) == {}
        engine.put_pause(QUEUE, "", b"first", TIMEOUT_S)
        engine.put_pause(QUEUE, "", BIT_FOR_BIT, TIMEOUT_S)
        for name in ("send", *AWKWARD_NAMES):
            engine.put_pause(QUEUE, name, name.encode(), TIMEOUT_S)
        named = {name: name.encode() for name in ("send", *AWKWARD_NAMES)}
        assert other.pauses(QUEUE, TIMEOUT_S) == {"": BIT_FOR_BIT, **named}
        assert engine.pauses(OTHER_QUEUE, TIMEOUT_S) == {}
        for _ in range(2):
            other.put_pause(QUEUE, "", None, TIMEOUT_S)
        assert engine.pauses(QUEUE, TIMEOUT_S) == named
        assert everything(engine) == []

    @pytest.mark.rule("SK-6")
    def test_nothing_is_claimed_in_a_paused_queue(self, connect: Connect) -> None:
        """Holds: "A queue with a pause of its own hands out no claim that is written after this"."""
        engine, other = connect(), connect()
        applied(engine, *(make(number) for number in range(1, 5)), make(9, queue=OTHER_QUEUE))
        tasks = [read(engine, task_id(number)) for number in range(1, 5)]
        epochs = {task.partition: OwnerEpoch(task.partition, 1) for task in tasks}
        applied(engine, *(TakeOver(QUEUE, epoch) for epoch in epochs.values()))
        claims = [move(task, claimed(), epoch=epochs[task.partition]) for task in tasks]
        applied(engine, claims[0])
        engine.put_pause(QUEUE, "send", b"a schedule", TIMEOUT_S)
        applied(engine, claims[1])
        other.put_pause(QUEUE, "", b"the queue", TIMEOUT_S)
        assert apply(engine, claims[2]) == [Paused()]
        assert apply(engine, *claims[2:]) == [Paused(), Paused()]
        assert [read(engine, task.head.id) for task in tasks[2:]] == tasks[2:]
        begun = read(engine, task_id(1))
        epoch = OwnerEpoch(begun.partition, 2)
        applied(engine, move(begun, TaskState(Status.COMPLETED)), make(5), TakeOver(QUEUE, epoch))
        applied(engine, TakeOver(OTHER_QUEUE, OwnerEpoch(make(9).partition, 1)))
        elsewhere = read(engine, task_id(9), OTHER_QUEUE)
        applied(engine, move(elsewhere, claimed(), epoch=OwnerEpoch(elsewhere.partition, 1)))
        engine.put_pause(QUEUE, "", None, TIMEOUT_S)
        epochs[epoch.partition] = epoch
        applied(engine, *(move(task, claimed(), epoch=epochs[task.partition]) for task in tasks[2:]))

    @pytest.mark.rule("SK-5")
    def test_an_index_hands_out_nothing_while_the_queue_is_paused(self, connect: Connect) -> None:
        """Holds: "there is nothing to claim until a commit ends it"."""
        engine, other = connect(), connect()
        index = index_of(engine)
        applied(engine, make(1), make(2), make(3, queue=OTHER_QUEUE))
        other.put_pause(QUEUE, "", b"the queue", TIMEOUT_S)
        answer = index.claim(request("a", "b"), TIMEOUT_S)
        assert answer == ClaimAnswer((), pause=b"the queue")
        assert len(index.claim(replace(request("c"), queue=OTHER_QUEUE), TIMEOUT_S).claimed) == 1
        other.put_pause(QUEUE, "", None, TIMEOUT_S)
        answer = index.claim(request("a", "b"), TIMEOUT_S)
        assert (len(answer.claimed), answer.pause) == (2, None)

    def test_a_watch_of_pauses_hears_of_other_connections(
        self, connect: Connect, harness: EngineHarness
    ) -> None:
        """Holds: "Call wake, from a thread of the engine's, soon after a pause changed"."""
        woken, engine, other = threading.Event(), connect(), connect()
        revision = other.page(QUEUE, TIMEOUT_S, limit=1).revision
        closed = engine.watch_pauses(QUEUE, revision, lambda: pytest.fail("it was closed"))
        closed.close()
        watch = engine.watch_pauses(QUEUE, revision, woken.set)
        for schedule, pause in (("", b"x"), ("", None), ("send", b"x"), ("send", b"y")):
            woken.clear()
            other.put_pause(QUEUE, schedule, pause, TIMEOUT_S)
            assert woken.wait(harness.patience_s)
        watch.close()
        watch.close()

    # -- collect

    @pytest.mark.rule("SK-14")
    def test_what_is_collected_is_gone(self, engine: Engine) -> None:
        """Holds: "Delete these tasks, with their states and logs"."""
        applied(engine, *(make(number) for number in range(1, 13)))
        for number in (1, 2):
            applied(engine, move(read(engine, task_id(number)), claimed(0, 1), Update(0, 0, b"log")))
        gone = [read(engine, task_id(number)) for number in range(1, 13) if number != 2]
        applied(engine, collect(*gone))
        ids = [item.head.id for item in gone]
        assert engine.read(QUEUE, ids, TIMEOUT_S) == {}
        assert engine.payloads(QUEUE, ids, TIMEOUT_S) == {}
        assert log(engine, task_id(1)) == []
        assert log(engine, task_id(2)) == [Update(0, 0, b"log")]
        assert [item.head.id for item in everything(engine)] == [task_id(2)]
        assert counts(engine) == {Status.CLAIMED: 1}
        (revision,) = applied(engine, make(1, payload=b"new"))
        assert read(engine, task_id(1)) == stored(make(1), revision)
        assert log(engine, task_id(1)) == []

    @pytest.mark.rule("SK-14")
    def test_all_or_none_are_collected(self, engine: Engine) -> None:
        """Holds: "All or none of them"."""
        applied(engine, *(make(number) for number in range(1, 6)))
        applied(engine, move(read(engine, task_id(1)), claimed(0, 1), Update(0, 0, b"log")))
        present = everything(engine)
        changed = replace(present[2], revision=present[2].revision + 5000)
        absent = replace(present[2], head=replace(present[2].head, id=task_id(9)))
        assert apply(engine, collect(*present[:2], changed, *present[3:])) == [WriteConflict()]
        assert apply(engine, collect(*present, absent)) == [WriteConflict()]
        assert everything(engine) == present
        assert log(engine, task_id(1)) == [Update(0, 0, b"log")]
        assert engine.payloads(QUEUE, [task_id(5)], TIMEOUT_S) == {task_id(5): b"payload"}
        assert counts(engine) == {Status.CLAIMED: 1, Status.WAITING: 4}

    @pytest.mark.rule("SK-5", "SK-14")
    def test_what_others_depend_on_is_not_collected(self, engine: Engine) -> None:
        """Holds: "And only if no task beside them depends on one of them"."""
        applied(engine, make(1), make(2, after=[1]), make(3, after=[2, 1]), make(4))
        applied(engine, make(5, after=[6], waits_for_unknown=True), make(6))
        one, two, three, four, five, six = everything(engine)
        for part in ([one], [two], [one, two], [one, three], [two, three, six], [four, one], [six]):
            assert apply(engine, collect(*part)) == [WriteConflict()], part
        assert everything(engine) == [one, two, three, four, five, six]
        applied(engine, collect(three, four))
        assert apply(engine, collect(one)) == [WriteConflict()]
        applied(engine, collect(two, one), collect(five, six))
        assert everything(engine) == []

    @pytest.mark.rule("SK-5", "SK-14")
    def test_a_task_is_collected_or_depended_on(self, connect: Connect) -> None:
        """Holds: "a task enqueued since they were read would else wait for one that is gone"."""
        producer, collector = connect(), connect()
        together = threading.Barrier(2)

        def act(engine: Engine, write: Write) -> Answer:
            together.wait(TIMEOUT_S)
            return apply(engine, write)[0]

        with ThreadPoolExecutor(2) as pool:
            for number in range(1, 41, 2):
                (revision,) = applied(producer, make(number))
                collection = collect(stored(make(number), revision))
                enqueueing = pool.submit(act, producer, make(number + 1, after=[number]))
                collecting = pool.submit(act, collector, collection)
                enqueued, collected = enqueueing.result(), collecting.result()
                if isinstance(collected, Applied):
                    assert enqueued == Unknown((task_id(number),))
                else:
                    assert collected == WriteConflict()
                    assert isinstance(enqueued, Applied)
                    assert find(producer, task_id(number)) is not None

    @pytest.mark.rule("SK-14")
    def test_a_collection_stands_in_the_order_of_its_batch(self, engine: Engine) -> None:
        """Holds: "Writes of one batch take effect in their order"."""
        one, two = make(1), make(2)
        first, second = applied(engine, one, two)
        answers = apply(
            engine,
            move(stored(one, first), claimed()),
            collect(stored(one, first)),
            collect(stored(two, second)),
            move(stored(two, second), claimed()),
            make(3, after=[2]),
        )
        assert isinstance(answers[0], Applied)
        assert isinstance(answers[2], Applied)
        assert (answers[1], answers[3], answers[4]) == (
            WriteConflict(),
            WriteConflict(),
            Unknown((task_id(2),)),
        )

    # -- reads

    @pytest.mark.rule("SK-12")
    def test_those_that_exist_are_read(self, engine: Engine) -> None:
        """Holds: "the result has those of tasks that exist"."""
        writes = [make(number, payload=b"%d" % number) for number in range(0, 600, 2)]
        revisions = applied(engine, *writes)
        ids = [task_id(number) for number in range(600)]
        assert engine.read(QUEUE, ids, TIMEOUT_S) == {
            write.task.head.id: stored(write, revision)
            for write, revision in zip(writes, revisions, strict=True)
        }
        assert engine.payloads(QUEUE, ids, TIMEOUT_S) == {
            write.task.head.id: write.task.payload for write in writes
        }
        assert engine.read(QUEUE, [], TIMEOUT_S) == {}
        assert engine.payloads(QUEUE, [], TIMEOUT_S) == {}

    @pytest.mark.rule("SK-12")
    @pytest.mark.parametrize("text", ["", "abc", "none", "é/x", task_id(1).upper() + "F", f" {task_id(1)}"])
    def test_no_task_has_a_text_that_is_no_id(self, engine: Engine, text: str) -> None:
        """Holds: "the result has those of tasks that exist", as a user may ask for any text."""
        applied(engine, enqueue := make(1))
        found = engine.read(QUEUE, [text, task_id(1)], TIMEOUT_S)
        assert list(found) == [enqueue.task.head.id]
        assert list(engine.payloads(QUEUE, [text, task_id(1)], TIMEOUT_S)) == [task_id(1)]
        assert list(engine.updates(QUEUE, text, TIMEOUT_S)) == []

    @pytest.mark.rule("SK-11")
    def test_a_read_asks_for_a_revision(self, engine: Engine) -> None:
        """Holds: "A read that is given ``at_least`` refuses to answer from a store that has not seen that
        revision"."""
        enqueue = make(1)
        (revision,) = applied(engine, enqueue)
        expected = stored(enqueue, revision)
        assert engine.read(QUEUE, [task_id(1)], TIMEOUT_S, at_least=revision) == {task_id(1): expected}
        page = engine.page(QUEUE, TIMEOUT_S, at_least=revision)
        assert page.items == (expected,)
        assert page.revision >= revision
        with pytest.raises(UnusableStore):
            engine.read(QUEUE, [task_id(1)], TIMEOUT_S, at_least=page.revision + 1_000_000)
        with pytest.raises(UnusableStore):
            engine.page(QUEUE, TIMEOUT_S, at_least=page.revision + 1_000_000)

    @pytest.mark.rule("SK-11")
    def test_reads_see_what_was_answered_before(self, connect: Connect) -> None:
        """Holds: "**Reads** see every write answered before they were sent", whichever way it came."""
        engines = [connect(), connect()]
        applied(engines[0], make(1))
        for number in range(30):
            writer, reader = engines[number % 2], engines[1 - number % 2]
            present = read(writer, task_id(1))
            update = Update(0, number, b"%d" % number)
            (revision,) = applied(writer, move(present, claimed(number), update))
            expected = replace(present, state=claimed(number), revision=revision)
            assert read(reader, task_id(1)) == expected
            assert reader.page(QUEUE, TIMEOUT_S, at_least=revision).items == (expected,)
            assert log(reader, task_id(1))[-1:] == [update]
            assert counts(reader) == {Status.CLAIMED: 1}

    @pytest.mark.rule("SK-11")
    def test_reads_never_go_back(self, connect: Connect) -> None:
        """Holds: "**Reads** see every write answered before they were sent", while others write."""
        writer, readers = connect(), [connect() for _ in range(3)]
        (first,) = applied(writer, make(1))
        answered, finished = [first], threading.Event()

        def write() -> None:
            try:
                for number in range(60):
                    answered[0] = applied(writer, move(read(writer, task_id(1)), claimed(number)))[0]
            finally:
                finished.set()

        def check(reader: Engine) -> None:
            seen = 0
            while not finished.is_set():
                floor = max(answered[0], seen)
                seen = read(reader, task_id(1)).revision
                assert seen >= floor
                (item,) = reader.page(QUEUE, TIMEOUT_S, at_least=seen).items
                assert item.revision >= seen

        with ThreadPoolExecutor(len(readers) + 1) as pool:
            writing = pool.submit(write)
            for checking in [pool.submit(check, reader) for reader in readers]:
                checking.result()
            writing.result()

    # -- pages

    @pytest.mark.rule("SK-12")
    def test_pages_go_through_all(self, engine: Engine) -> None:
        """Holds: "at most ``limit`` tasks with ids greater than ``after``, in the order of their ids"."""
        writes = [make(number * 17 % MANY, payload=b"") for number in range(MANY)]
        answers = apply(engine, *writes)
        assert all(isinstance(answer, Applied) for answer in answers)
        ids = [task_id(number) for number in range(MANY)]
        moved = engine.read(QUEUE, ids[::10], TIMEOUT_S)
        states = [TaskState(status, claimed().claim) for status in Status]
        applied(
            engine, *(move(item, states[index % len(states)]) for index, item in enumerate(moved.values()))
        )
        expected = list(engine.read(QUEUE, ids, TIMEOUT_S).values())
        expected.sort(key=lambda item: item.head.id)
        assert [item.head.id for item in expected] == ids
        assert everything(engine) == expected
        for partition in range(PARTITIONS):
            assert items(pages(engine, partition=partition, limit=70)) == [
                item for item in expected if item.partition == partition
            ]
        closed = frozenset({Status.COMPLETED, Status.DEAD})
        for statuses in (OPEN, closed, *(frozenset({status}) for status in Status)):
            assert items(pages(engine, statuses=statuses)) == [
                item for item in expected if item.state.status in statuses
            ]
            assert items(pages(engine, partition=1, statuses=statuses, limit=13)) == [
                item for item in expected if item.state.status in statuses and item.partition == 1
            ]
        assert items(pages(engine, statuses=frozenset())) == []

    @pytest.mark.rule("SK-12")
    def test_a_page_begins_after_an_id(self, engine: Engine) -> None:
        """Holds: "the following page begins ``after`` the id ``next``, if any"."""
        applied(engine, *(make(number) for number in range(0, 20, 2)))
        for after, first in ((4, 6), (5, 6), (18, None), (19, None)):
            found: list[Stored] = []
            position: TaskId | None = task_id(after)
            while position is not None:
                page = engine.page(QUEUE, TIMEOUT_S, after=position, limit=3)
                found += page.items
                position = page.next
            expected = [] if first is None else [task_id(number) for number in range(first, 20, 2)]
            assert [item.head.id for item in found] == expected
        assert [item.head.id for item in items(pages(engine, limit=1))] == [
            task_id(number) for number in range(0, 20, 2)
        ]
        assert everything(engine, OTHER_QUEUE) == []

    @pytest.mark.rule("SK-11", "SK-12", "SK-13")
    def test_a_watch_from_a_page_misses_nothing(self, connect: Connect, recorder: StateRecorder) -> None:
        """Holds: "a watch from there reports the changes after it", which is how an owner starts."""
        writer, reader = connect(), connect()
        applied(writer, *(make(number) for number in range(100)))
        half, paged = threading.Event(), threading.Event()

        def write() -> None:
            try:
                for number in range(100, 160):
                    applied(writer, make(number), move(read(writer, task_id(number % 100)), claimed(number)))
                    if number == 120:
                        half.set()
                    if number == 140:
                        assert paged.wait(TIMEOUT_S)
            finally:
                half.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            assert half.wait(TIMEOUT_S)
            try:
                found = pages(reader, limit=10)
            finally:
                paged.set()
            with closing(reader.watch(QUEUE, found[0].revision, recorder)):
                writing.result()
                expected = {item.head.id: item for item in everything(reader)}
                known = {item.head.id: item for item in items(found)}
                unseen = [item for item in expected.values() if known.get(item.head.id) != item]
                assert all(item.revision > found[0].revision for item in unseen), "a page of the future"
                recorder.wait_for(*unseen)
        for item in recorder.states:
            if item.head.id not in known or known[item.head.id].revision < item.revision:
                known[item.head.id] = item
        assert known == expected

    # -- counts and queues

    @pytest.mark.rule("SK-12")
    def test_tasks_are_counted(self, engine: Engine) -> None:
        """Holds: "Count the tasks of a queue in each status"."""
        assert counts(engine) == {}
        applied(engine, *(make(number) for number in range(50)))
        assert counts(engine) == {Status.WAITING: 50}
        states = [TaskState(status, claimed().claim) for status in Status]
        present = everything(engine)
        applied(engine, *(move(item, states[number % 5]) for number, item in enumerate(present)))
        assert counts(engine) == dict.fromkeys(Status, 10)
        apply(engine, make(1), *(move(item, claimed()) for item in present))
        assert counts(engine) == dict.fromkeys(Status, 10), "a refused write was counted"
        applied(engine, *(collect(item) for item in everything(engine) if item.state.status in OPEN))
        assert counts(engine) == dict.fromkeys(set(Status) - OPEN, 10)
        assert counts(engine, OTHER_QUEUE) == {}

    @pytest.mark.rule("SK-2")
    def test_a_queue_keeps_its_partitions(self, connect: Connect) -> None:
        """Holds: "the given one if it is new, else the one it has"."""
        one, two = connect(), connect()
        before = {QUEUE: PARTITIONS, OTHER_QUEUE: PARTITIONS}
        assert one.queues(TIMEOUT_S) == before
        assert one.define("new", 3, TIMEOUT_S) == 3
        assert two.define("new", 5, TIMEOUT_S) == 3
        assert one.define("new", 7, TIMEOUT_S) == 3
        assert two.queues(TIMEOUT_S) == one.queues(TIMEOUT_S) == {**before, "new": 3}

    @pytest.mark.rule("SK-2")
    def test_of_many_only_one_defines_a_queue(self, connect: Connect) -> None:
        """Holds: "the given one if it is new, else the one it has", at once too."""
        engines = [connect() for _ in range(THREADS)]
        together = threading.Barrier(THREADS)

        def define(number: int) -> int:
            together.wait(TIMEOUT_S)
            return engines[number].define("new", number + 1, TIMEOUT_S)

        with ThreadPoolExecutor(THREADS) as pool:
            answers = set(pool.map(define, range(THREADS)))
        assert answers == {engines[0].queues(TIMEOUT_S)["new"]}

    @pytest.mark.rule("SK-2", "RB-33")
    def test_awkward_names_are_kept_apart(self, engine: Engine) -> None:
        """Names are stored as given, and none is another's: "Read the names of all queues"."""
        for number, name in enumerate(AWKWARD_NAMES):
            assert engine.define(name, number + 1, TIMEOUT_S) == number + 1
        assert engine.queues(TIMEOUT_S) == {
            QUEUE: PARTITIONS,
            OTHER_QUEUE: PARTITIONS,
            **{name: number + 1 for number, name in enumerate(AWKWARD_NAMES)},
        }
        writes = [
            replace(
                make(number, queue=name, name=name), partition=partition_of_id(task_id(number), number + 1)
            )
            for number, name in enumerate(AWKWARD_NAMES)
        ]
        revisions = applied(engine, *writes)
        for write, revision in zip(writes, revisions, strict=True):
            assert everything(engine, write.task.head.queue) == [stored(write, revision)]

    @pytest.mark.rule("SK-2", "RB-33")
    @pytest.mark.parametrize("name", UNSTORABLE_NAMES, ids=ascii)
    def test_a_name_that_cannot_be_stored_is_refused(self, engine: Engine, name: str) -> None:
        """Holds: "the queue's name can't be stored"."""
        with pytest.raises(InvalidName):
            engine.define(name, 1, TIMEOUT_S)
        assert engine.queues(TIMEOUT_S) == {QUEUE: PARTITIONS, OTHER_QUEUE: PARTITIONS}

    # -- watches

    @pytest.mark.rule("SK-11", "SK-13")
    def test_a_watch_tells_what_changes(self, engine: Engine, recorder: StateRecorder) -> None:
        """Holds: "all states written after ``from_revision``, also the first of new tasks"."""
        (before,) = applied(engine, make(1))
        present = read(engine, task_id(1))
        with closing(engine.watch(QUEUE, before, recorder)):
            (revision,) = applied(engine, make(2, after=[1]))
            told = [stored(make(2, after=[1]), revision)]
            recorder.wait_for(*told)
            for number in range(5):
                (revision,) = applied(engine, move(present, claimed(number)))
                present = replace(present, state=claimed(number), revision=revision)
                told.append(present)
                recorder.wait_for(present)
        assert recorder.states == told

    @pytest.mark.rule("SK-11", "SK-13")
    def test_a_watch_tells_what_has_changed_since(self, engine: Engine, recorder: StateRecorder) -> None:
        """Holds: "in the order of revisions, each at least once", from an earlier revision on."""
        revisions = [
            applied(engine, make(number), make(number, queue=OTHER_QUEUE))[0] for number in range(20)
        ]
        for number in (12, 3, 17):
            applied(engine, move(read(engine, task_id(number)), claimed(number)))
        expected = [item for item in everything(engine) if item.revision > revisions[9]]
        expected.sort(key=lambda item: item.revision)
        with closing(engine.watch(QUEUE, revisions[9], recorder)):
            recorder.wait_for(*expected)
        told = recorder.states
        assert [item.revision for item in told] == sorted(item.revision for item in told)
        assert min(item.revision for item in told) > revisions[9]
        assert {item.head.id: item for item in told} == {item.head.id: item for item in expected}

    @pytest.mark.rule("SK-11", "SK-13")
    def test_a_watch_tells_only_what_is_wanted(self, engine: Engine, recorder: StateRecorder) -> None:
        """Holds: "With ``wants`` only those that it wants", which is asked of each that would be told."""
        (before,) = applied(engine, make(1))
        asked: list[Change] = []

        def wants(change: Change) -> bool:
            asked.append(change)
            return change.status is not Status.CLAIMED

        with closing(engine.watch(QUEUE, before, recorder, wants)):
            revisions = applied(engine, *(make(number) for number in (2, 3)))
            fresh = [stored(make(number), at) for number, at in zip((2, 3), revisions, strict=True)]
            recorder.wait_for(*fresh)
            (taken,) = applied(engine, move(fresh[0], claimed(0)))
            (last,) = applied(engine, make(4))
            recorder.wait_for(stored(make(4), last))
        assert recorder.states == [*fresh, stored(make(4), last)]
        place = fresh[0].partition
        assert Change(task_id(2), place, Status.WAITING, revisions[0]) in asked
        assert Change(task_id(2), place, Status.CLAIMED, taken) in asked

    @pytest.mark.rule("SK-11", "SK-13")
    def test_a_watch_of_statuses_tells_changes_to_them(
        self, engine: Engine, recorder: StateRecorder, harness: EngineHarness
    ) -> None:
        """Holds: "tasks that were there before and have one of these statuses now", beside another watch."""
        (before,) = applied(engine, make(1))
        asked: list[Change] = []

        def wants(change: Change) -> bool:
            asked.append(change)
            return change.task != task_id(3)

        every = StateRecorder(harness.patience_s)
        claims = StatusFilter(frozenset({Status.CLAIMED}), wants)
        with (
            closing(engine.watch(QUEUE, before, recorder, claims)),
            closing(engine.watch(QUEUE, before, every)),
        ):
            for number in (2, 3, 4):
                (new,) = applied(engine, make(number))
                (taken,) = applied(engine, move(stored(make(number), new), claimed(0)))
            last = replace(stored(make(4), taken), state=claimed(0))
            recorder.wait_for(last)
            every.wait_for(last)
        assert {each.head.id for each in recorder.states} == {task_id(2), task_id(4)}
        assert {each.state.status for each in recorder.states} == {Status.CLAIMED}
        assert {each.status for each in asked} == {Status.CLAIMED}
        assert {each.head.id for each in every.states} == {task_id(2), task_id(3), task_id(4)}

    @pytest.mark.rule("SK-11", "SK-12")
    def test_a_watch_tells_a_large_batch(self, engine: Engine, recorder: StateRecorder) -> None:
        """Holds: "in the order of revisions, each at least once", for 2,500 changes at once."""
        (before,) = applied(engine, make(MANY))
        with closing(engine.watch(QUEUE, before, recorder)):
            writes = [make(number) for number in range(MANY)]
            revisions = applied(engine, *writes)
            expected = list(map(stored, writes, revisions))
            recorder.wait_for(*expected)
        told = recorder.states
        assert {item.head.id: item for item in told} == {item.head.id: item for item in expected}
        assert [item.revision for item in told] == sorted(revisions)

    @pytest.mark.rule("SK-11")
    def test_a_watch_hears_of_other_connections(self, connect: Connect, harness: EngineHarness) -> None:
        """Holds: "Report to ``sink`` all states written", whoever changed it, while four write."""
        watching, writers = connect(), [connect() for _ in range(4)]
        (before,) = applied(watching, make(9999))
        recorders = [StateRecorder(harness.patience_s) for _ in range(3)]
        watches = [watching.watch(QUEUE, before, recorder) for recorder in recorders]

        def write(number: int) -> None:
            for index in range(15):
                enqueue = make(number * 100 + index)
                (revision,) = applied(writers[number], enqueue)
                applied(writers[number], move(stored(enqueue, revision), claimed(index)))

        with ThreadPoolExecutor(len(writers)) as pool:
            for done in [pool.submit(write, number) for number in range(len(writers))]:
                done.result()
        expected = [item for item in everything(watching) if item.revision > before]
        for recorder in recorders:
            recorder.wait_for(*expected)
            told = [item.revision for item in recorder.states]
            assert told == sorted(told)
        for watch in watches:
            watch.close()

    @pytest.mark.rule("SK-11")
    def test_a_watch_has_its_own_thread(self, engine: Engine, recorder: StateRecorder) -> None:
        """Holds: "Called from a thread of the engine's"."""
        (before,) = applied(engine, make(1))
        with closing(engine.watch(QUEUE, before, recorder)), ThreadPoolExecutor(1) as pool:
            caller = pool.submit(threading.get_ident).result()
            (revision,) = pool.submit(applied, engine, make(2)).result()
            recorder.wait_for(stored(make(2), revision))
        assert recorder.threads.isdisjoint({caller, threading.get_ident()})

    @pytest.mark.rule("SK-11")
    def test_a_closed_watch_is_silent(
        self, engine: Engine, harness: EngineHarness, recorder: StateRecorder
    ) -> None:
        """Holds: "Stop the watch. Closing twice does nothing"."""
        (before,) = applied(engine, make(1))
        other = StateRecorder(harness.patience_s)
        closed, staying = engine.watch(QUEUE, before, recorder), engine.watch(QUEUE, before, other)
        (revision,) = applied(engine, make(2))
        recorder.wait_for(stored(make(2), revision))
        closed.close()
        closed.close()
        (later,) = applied(engine, make(3))
        other.wait_for(stored(make(3), later))
        staying.close()
        assert recorder.states == [stored(make(2), revision)]

    @pytest.mark.rule("SK-11")
    def test_closing_an_engine_closes_its_watches(
        self, connect: Connect, harness: EngineHarness, recorder: StateRecorder
    ) -> None:
        """Holds: "Close the store", with the watches of this connection and of no other."""
        staying, leaving = connect(), connect()
        (before,) = applied(staying, make(1))
        other = StateRecorder(harness.patience_s)
        orphan, watch = leaving.watch(QUEUE, before, recorder), staying.watch(QUEUE, before, other)
        leaving.close()
        (revision,) = applied(staying, make(2))
        other.wait_for(stored(make(2), revision))
        orphan.close()
        watch.close()
        assert recorder.told == ()

    @pytest.mark.rule("SK-11", "SK-13")
    def test_lost_changes_are_told(
        self, engine: Engine, harness: EngineHarness, recorder: StateRecorder
    ) -> None:
        """Holds: "Changes up to this revision may be missing: read again"."""
        if not harness.can_lose_history:
            pytest.skip("this store cannot be made to lose history")
        revisions = [applied(engine, make(number))[0] for number in range(10)]
        harness.lose_history(revisions[7])
        with closing(engine.watch(QUEUE, revisions[1], recorder)):
            lost = recorder.wait_for_loss()
            assert revisions[1] < lost.revision
            (later,) = applied(engine, make(100))
            recorder.wait_until(
                lambda told: any(item.revision >= later for item in told), f"the change at {later}"
            )

    # -- claims from an index

    @pytest.mark.rule("SK-2", "SK-5", "SK-6")
    def test_an_index_hands_out_the_best_first(self, engine: Engine) -> None:
        """Holds: "Claim the best tasks that are ready: the highest priority first, then the lowest id"."""
        index = index_of(engine)
        priorities = (0, HIGHEST_PRIORITY, 1, LOWEST_PRIORITY, 1, -1)
        applied(engine, *(make(number, priority=each) for number, each in enumerate(priorities, 1)))
        applied(engine, make(9, queue=OTHER_QUEUE, priority=HIGHEST_PRIORITY))
        first = index.claim(request("a", "b", "c"), TIMEOUT_S).claimed
        assert [task.head.id for task, _ in first] == [task_id(number) for number in (2, 3, 5)]
        assert [payload for _, payload in first if payload is not None] == [b"payload"] * 3
        for holder, (task, _) in zip("abc", first, strict=True):
            assert task.state == TaskState(Status.CLAIMED, ClaimState(0, holder, "worker", OWN_TERM))
            assert task == read(engine, task.head.id)
        rest = index.claim(request(*"defghi"), TIMEOUT_S).claimed
        assert [task.head.id for task, _ in rest] == [task_id(number) for number in (1, 6, 4)]
        assert not index.claim(request("j"), TIMEOUT_S).claimed
        assert counts(engine) == {Status.CLAIMED: 6}

    @pytest.mark.rule("SK-5", "SK-23")
    @pytest.mark.parametrize("seed", range(10))
    def test_an_index_hands_out_as_many_as_a_limit_allows(self, engine: Engine, seed: int) -> None:
        """Holds: "at most ``max_running`` are claimed at once", rates, "The best ones come first"."""
        model = LimitedTasks(engine, index_of(engine), random.Random(seed))  # noqa: S311 - no secret
        for number in range(120):
            model.step(number)

    @pytest.mark.rule("SK-5", "SK-15", "SK-23")
    def test_an_index_keeps_a_limit_of_what_depends_and_what_becomes_dead(self, engine: Engine) -> None:
        """Holds: "at most ``max_running`` are claimed at once", however a task becomes ready, or ends."""
        index = index_of(engine)
        limit: dict[str, Any] = {"limit_key": "a", "max_running": 1}
        needed, failing = make(1), make(2, state=TaskState(due=1e9))
        revisions = applied(engine, needed, failing, make(7, state=TaskState(due=1e9)))[:2]
        applied(engine, *(make(each, after=[1], **limit) for each in (3, 4, 5)))
        fails: dict[str, Any] = {"after_failure": AfterFailure.FAIL, "priority": 9, **limit}
        applied(engine, make(6, after=[2], **fails), make(8, after=[7], **fails))
        applied(engine, move(stored(needed, revisions[0]), TaskState(Status.COMPLETED)))
        (third,) = index.claim(request(*"abcd"), TIMEOUT_S).claimed
        assert third[0].head.id == task_id(3)
        applied(engine, move(stored(failing, revisions[1]), TaskState(Status.CANCELLED)))
        applied(engine, move(read(engine, task_id(7)), TaskState(Status.CANCELLED)))
        for state in (TaskState(), TaskState(Status.COMPLETED)):
            applied(engine, move(read(engine, task_id(7)), state))
        over = OWN_TERM.ends_at_s + BUFFER_S
        assert not index.claim(request(*"efgh", now=over - 1.0), TIMEOUT_S).claimed
        (eighth,) = index.claim(request(*"ijkl", now=over), TIMEOUT_S).claimed
        assert eighth[0].head.id == task_id(8)
        assert read(engine, task_id(3)).state.status is Status.DEAD
        applied(engine, move(eighth[0], TaskState(Status.COMPLETED)))
        (fourth,) = index.claim(request(*"mnop", now=over), TIMEOUT_S).claimed
        assert (read(engine, task_id(6)).state.status, fourth[0].head.id) == (Status.DEAD, task_id(4))

    @pytest.mark.rule("SK-8", "SK-23")
    def test_an_index_counts_a_claim_that_is_over_until_its_task_is_claimed_anew(
        self, engine: Engine
    ) -> None:
        """Holds: "a claim that is over counts until its task is claimed anew", and is no second one then."""
        index = index_of(engine)
        limit: dict[str, Any] = {"limit_key": "a", "max_running": 1}
        applied(engine, make(1, **limit), make(2, **limit), make(3, priority=9, retries=1, **limit))
        (first,) = index.claim(request(*"ab"), TIMEOUT_S).claimed
        assert first[0].head.id == task_id(3)
        over = OWN_TERM.ends_at_s + BUFFER_S
        (again,) = index.claim(request(*"cd", now=over), TIMEOUT_S).claimed
        assert (again[0].head.id, again[0].state.claim and again[0].state.claim.number) == (task_id(3), 1)
        assert counts(engine) == {Status.CLAIMED: 1, Status.WAITING: 2}
        applied(engine, make(4, priority=1, **limit))
        applied(engine, move(again[0], TaskState(Status.DEAD, again[0].state.claim)))
        (following,) = index.claim(request(*"ef", now=over), TIMEOUT_S).claimed
        assert following[0].head.id == task_id(4)

    @pytest.mark.rule("SK-23")
    def test_an_index_claims_no_task_of_a_rate_ahead(self, engine: Engine) -> None:
        """Holds: "The last ``ahead`` of the holders have no thread yet", so a rate loses no start by them."""
        index = index_of(engine)
        limited: dict[str, Any] = {"rate_limit": "1/h", "max_running": 0}
        applied(
            engine,
            *(make(number, priority=9) for number in (1, 2)),
            *(make(number, priority=5, limit_key=f"{number}", **limited) for number in (3, 4)),
            make(5),
        )

        def claimed(ahead: int, *holders: str) -> list[int]:
            answer = index.claim(replace(request(*holders), ahead=ahead), TIMEOUT_S)
            return [int(task.head.id, 16) for task, _ in answer.claimed]

        assert claimed(3, "a", "b", "c") == [1, 2], "for a thread, and ahead of one"
        assert claimed(2, "d", "e") == []
        assert claimed(1, "f", "g") == [3]
        assert claimed(0, "h", "i") == [4, 5]

    @pytest.mark.rule("SK-5", "SK-23")
    def test_an_index_makes_claims_no_more_often_than_a_rate_allows(self, engine: Engine) -> None:
        """Holds: "Claims of a ``rate_limit`` are made as ``Rate`` says"."""
        index = index_of(engine)
        rate: dict[str, Any] = {"limit_key": "a", "rate_limit": "1/s burst 3"}
        applied(
            engine, *(make(number, **rate) for number in range(1, 8)), make(8), make(9, priority=9, **rate)
        )

        def claimed(now: float, wall: float = 0.0, *holders: str) -> list[int]:
            names = holders or [f"{now} {wall} {each}" for each in "abcdef"]
            answer = index.claim(request(*names, now=now, wall=wall), TIMEOUT_S)
            return [int(task.head.id, 16) for task, _ in answer.claimed]

        assert claimed(100.0) == [9, 1, 2, 8]
        for holder in "xy":
            answer = index.claim(request(holder, now=100.9), TIMEOUT_S)
            assert (answer.claimed, answer.next_due, answer.next_over) == ((), None, 101.0)
        assert claimed(101.0) == [3]
        applied(engine, make(10, priority=5, **rate))
        assert claimed(101.9, 1e9) == [], "the wall clock lets nothing through"
        assert claimed(102.0, -1e9) == [10], "the best one first"
        assert claimed(110.0) == [4, 5, 6], "after a rest the burst, and no more"
        (mark,) = engine.rates(QUEUE, [("send", "a"), ("send", "b")], TIMEOUT_S).values()
        assert (mark.debt_s, mark.at_s) == (3.0, 110.0)

    @pytest.mark.rule("SK-15", "SK-23")
    def test_an_index_counts_each_try_for_a_rate_and_what_becomes_dead_not(self, engine: Engine) -> None:
        """Holds: "those made again too"."""
        index = index_of(engine)
        rate: dict[str, Any] = {"rate_limit": "1/h"}
        applied(engine, make(1, retries=1, **rate), make(2, name="other", **rate))
        names = ("send", "other")
        first = index.claim(request("a", "b", names=names), TIMEOUT_S).claimed
        assert [int(task.head.id, 16) for task, _ in first] == [1, 2], "each function has its own"
        over = OWN_TERM.ends_at_s + BUFFER_S
        assert not index.claim(request("c", now=over), TIMEOUT_S).claimed, "it is over, and must wait"
        assert read(engine, task_id(1)).state.status is Status.CLAIMED
        (again,) = index.claim(request("d", now=3600.0), TIMEOUT_S).claimed
        assert again[0].state.failures == 1
        applied(engine, make(3, **rate))
        assert not index.claim(request("e", now=3600.0 + over), TIMEOUT_S).claimed
        assert read(engine, task_id(1)).state.status is Status.DEAD, "that needs no room"
        assert index.claim(request("f", now=7200.0), TIMEOUT_S).claimed

    @pytest.mark.rule("SK-18", "SK-23")
    def test_an_index_counts_the_marks_of_other_clocks_from_when_it_saw_them(self, connect: Connect) -> None:
        """Holds: "from when this engine object, or another of its clock, first saw it"."""
        rate: dict[str, Any] = {"rate_limit": "1/m"}
        engine = connect()
        applied(engine, *(make(number, **rate) for number in range(1, 4)))
        assert index_of(engine).claim(request("a", now=5_000.0), TIMEOUT_S).claimed
        other = ClaimTerm(OWN_TERM.ttl_s, "another boot", OWN_TERM.ends_at_s)
        for now in (100.0, 130.0, 159.0):  # each time another process
            index = index_of(connect())
            assert not index.claim(request("b", now=now, term=other, wall=1e9), TIMEOUT_S).claimed
        assert index.claim(request("c", now=160.0, term=other), TIMEOUT_S).claimed
        nameless = ClaimTerm(OWN_TERM.ttl_s, "", OWN_TERM.ends_at_s)
        index = index_of(connect())
        for now in (9_000.0, 9_059.0):
            assert not index.claim(request("d", now=now, term=nameless), TIMEOUT_S).claimed
        assert index.claim(request("e", now=9_060.0, term=nameless), TIMEOUT_S).claimed

    @pytest.mark.rule("SK-5")
    def test_an_index_hands_out_tasks_of_functions_that_are_asked_for(self, engine: Engine) -> None:
        """Holds: "names are the functions whose tasks are wanted, None for any"."""
        index = index_of(engine)
        applied(engine, *(make(number, name=name) for number, name in enumerate("abcab")))
        assert set(index.ready_names(QUEUE, TIMEOUT_S)) == {"a", "b", "c"}
        assert not index.claim(request("x", names=()), TIMEOUT_S).claimed
        nothing = index.claim(request("x", names=("d", "")), TIMEOUT_S)
        assert not nothing.claimed
        assert nothing.others_ready
        some = index.claim(request(*"uvwxyz", names=("c", "a", "c")), TIMEOUT_S).claimed
        assert [task.head.id for task, _ in some] == [task_id(number) for number in (0, 2, 3)]
        assert set(index.ready_names(QUEUE, TIMEOUT_S)) == {"b"}
        applied(engine, *(make(number, name=name, priority=number) for number, name in enumerate("abc", 7)))
        rest = index.claim(request(*"vwxyz", names=None), TIMEOUT_S).claimed
        assert [task.head.id for task, _ in rest] == [task_id(number) for number in (9, 8, 7, 1, 4)]

    @pytest.mark.rule("SK-5", "SK-15")
    def test_an_index_hands_out_what_is_due(self, engine: Engine) -> None:
        """Holds: "next_due is the first time (seconds since 1970) at which another task is due"."""
        index = index_of(engine)
        applied(engine, make(1, state=TaskState(due=20.0)), make(2, state=TaskState(due=10.0)))
        early = index.claim(request("a", wall=9.5), TIMEOUT_S)
        assert (early.claimed, early.next_due) == ((), 10.0)
        assert index.claim(request("a", wall=10.0, names=("other",)), TIMEOUT_S).others_ready
        (claimed,) = index.claim(request("a", "b", wall=10.0), TIMEOUT_S).claimed
        assert claimed[0].head.id == task_id(2)
        released = replace(claimed[0].state, status=Status.WAITING, due=15.0)
        applied(engine, move(claimed[0], released), make(3), make(4, state=TaskState(due=12.0), after=[3]))
        late = index.claim(request(*"abcd", wall=30.0), TIMEOUT_S).claimed
        assert [task.head.id for task, _ in late] == [task_id(number) for number in (1, 2, 3)]
        assert [each.state.claim.number for each, _ in late if each.state.claim] == [0, 1, 0]
        assert index.claim(request("e", wall=1e9), TIMEOUT_S).next_due is None

    @pytest.mark.rule("SK-5")
    def test_an_index_hands_out_what_depends_on_nothing_more(self, engine: Engine) -> None:
        """Holds: "A task can be claimed from the commit on that makes it ready: by which it is enqueued, or
        the last task that it depends on becomes complete".
        """
        index = index_of(engine)
        done = TaskState(Status.COMPLETED)
        applied(engine, make(1), make(2), make(3, state=done), make(4, after=[3]))
        applied(engine, make(5, after=[1, 2, 1, 3]), make(6, after=[9], waits_for_unknown=True))
        first = [task for task, _ in index.claim(request(*"abcdef"), TIMEOUT_S).claimed]
        assert [task.head.id for task in first] == [task_id(number) for number in (1, 2, 4)]
        one, two, _ = first
        applied(engine, move(one, replace(one.state, status=Status.COMPLETED)))
        applied(engine, move(two, replace(two.state, status=Status.DEAD)))
        assert not index.claim(request("g"), TIMEOUT_S).claimed
        applied(engine, move(read(engine, task_id(2)), replace(two.state, status=Status.COMPLETED)))
        (five,) = index.claim(request("g"), TIMEOUT_S).claimed
        assert five[0].head.id == task_id(5)
        applied(engine, make(9, state=done))
        (six,) = index.claim(request("h"), TIMEOUT_S).claimed
        assert six[0].head.id == task_id(6)

    @pytest.mark.rule("SK-5")
    def test_an_index_settles_what_depends_on_what_is_dead_or_cancelled(self, engine: Engine) -> None:
        """Holds: "A task that fails with a dependency (AfterFailure) becomes dead on the way, too"."""
        worlds = product((Status.DEAD, Status.CANCELLED), (False, True))
        for world, (status, is_late) in enumerate(worlds, 1):
            self._settles(engine, 100 * world, status, is_late=is_late)

    def _settles(self, engine: Engine, base: int, status: Status, *, is_late: bool) -> None:
        """Try all choices, with dependents that are enqueued before or after one of two becomes dead."""
        index = index_of(engine)
        one, two, run, fail, wait, chain, timed, later, absent = range(base, base + 9)

        def state(number: int) -> TaskState:
            return read(engine, task_id(number)).state

        def put(number: int, state: TaskState) -> None:
            applied(engine, move(read(engine, task_id(number)), state))

        def claim(*holders: str, wall: float = 0.0) -> list[int]:
            names = [str(number) for number in range(run, absent)]
            answer = index.claim(request(*holders, names=names, wall=wall), TIMEOUT_S)
            return [int(task.head.id, 16) - base for task, _ in answer.claimed]

        choices = ((run, AfterFailure.RUN), (fail, AfterFailure.FAIL), (wait, AfterFailure.WAIT))
        dependents = [
            *(make(each, name=f"{each}", after=[one, two], after_failure=choice) for each, choice in choices),
            make(chain, name=f"{chain}", after=[fail], after_failure=AfterFailure.RUN),
            make(
                timed,
                name=f"{timed}",
                after=[one, absent],
                after_failure=AfterFailure.FAIL,
                waits_for_unknown=True,
                state=TaskState(due=9.0),
            ),
            make(
                later,
                name=f"{later}",
                after=[one],
                after_failure=AfterFailure.FAIL,
                state=TaskState(due=20.0),
            ),
        ]
        applied(engine, make(one), make(two), *(() if is_late else dependents))
        assert claim("a") == []
        put(one, TaskState(status))
        applied(engine, *(dependents if is_late else ()))
        assert claim("b", "c") == [chain - base]
        failed = state(fail)
        assert (failed.status, failed.failures, failed.claim) == (Status.DEAD, 0, None)
        assert failed.error == f"it depends on {task_id(one)}, which is {status}"
        put(fail, TaskState())
        assert claim("x") == []
        assert state(fail) == failed, "it is the same when it is tried again"
        put(one, TaskState())
        assert state(fail) == failed, "a requeue does not undo it"
        put(two, TaskState(Status.CANCELLED))
        assert claim("d", wall=9.0) == [], "nothing has failed when one is due, and the other waits again"
        put(one, TaskState(Status.DEAD))
        assert claim("e", "f") == [run - base]
        assert (state(timed).status, state(later).status) == (Status.DEAD, Status.WAITING)
        put(one, TaskState())
        put(run, replace(state(run), status=Status.WAITING))
        assert claim("y") == [run - base], "nor does one undo that it ran"
        put(one, TaskState(Status.CANCELLED))
        assert claim("z", wall=20.0) == []
        assert state(later).status is Status.DEAD
        put(one, TaskState(Status.COMPLETED))
        assert claim("g") == []
        put(two, TaskState(Status.COMPLETED))
        assert claim("h", "i") == [wait - base]
        put(fail, TaskState())
        assert claim("j", "k") == [fail - base]

    @pytest.mark.rule("SK-6", "SK-8", "SK-10")
    def test_an_index_hands_out_a_claim_that_is_over_once(self, engine: Engine) -> None:
        """Holds: "where the claim's time was counted on the clock of the request, at its end"."""
        index = index_of(engine)
        applied(engine, make(1, retries=5), make(2, retries=5))
        (one, _), (two, _) = index.claim(request("a", "b"), TIMEOUT_S).claimed
        assert one.state.claim is not None
        longer = replace(one.state.claim, term=replace(OWN_TERM, ends_at_s=OWN_TERM.ends_at_s + 50.0))
        applied(engine, move(one, replace(one.state, claim=longer)))
        over_at = OWN_TERM.ends_at_s + BUFFER_S
        early = index.claim(request("c", "d", now=over_at - 0.5), TIMEOUT_S)
        assert (early.claimed, early.next_over) == ((), over_at)
        applied(engine, make(3, retries=5))
        ((three, _),) = index.claim(request("c", "d", now=over_at - 0.5), TIMEOUT_S).claimed
        assert three.head.id == task_id(3)
        applied(engine, move(three, replace(three.state, status=Status.COMPLETED)))
        (again,) = index.claim(request("c", "d", now=over_at), TIMEOUT_S).claimed
        assert again[0].head.id == two.head.id
        assert again[0].state.claim == ClaimState(1, "c", "worker", OWN_TERM)
        assert again[0].state.failures == 1
        completed = replace(two.state, status=Status.COMPLETED)
        assert apply(engine, move(two, completed)) == [WriteConflict()]
        assert read(engine, two.head.id) == again[0]

    @pytest.mark.rule("SK-6", "SK-7", "SK-8")
    def test_an_index_hands_out_no_claim_that_was_renewed_late(self, engine: Engine) -> None:
        """Holds: "claimed and over"."""
        index = index_of(engine)
        applied(engine, make(1, retries=5))
        ((task, _),) = index.claim(request("a"), TIMEOUT_S).claimed
        over_at = OWN_TERM.ends_at_s + BUFFER_S
        # Another process finds it over, and has no function for it.
        assert not index.claim(request("b", now=over_at, names=("other",)), TIMEOUT_S).claimed
        assert task.state.claim is not None
        renewed = replace(task.state.claim, term=replace(OWN_TERM, ends_at_s=over_at + 100.0))
        applied(engine, move(task, replace(task.state, claim=renewed)))
        assert not index.claim(request("b", now=over_at + 1.0), TIMEOUT_S).claimed
        assert read(engine, task.head.id).state.claim == renewed

    @pytest.mark.rule("SK-6", "SK-8", "SK-18")
    @pytest.mark.parametrize("clock", ["another boot", ""])
    def test_an_index_counts_the_time_of_other_clocks_itself(self, connect: Connect, clock: str) -> None:
        """Holds: "else ttl_s after this engine object first saw the term"."""
        engine = connect()
        index = index_of(engine)
        applied(engine, make(1, retries=5))
        theirs = request("a", term=ClaimTerm(TTL_S, clock, -5.0))
        ((task, _),) = index.claim(theirs, TIMEOUT_S).claimed
        lasts_s = TTL_S + BUFFER_S
        assert not index.claim(request("b", now=1000.0), TIMEOUT_S).claimed
        assert not index.claim(request("b", now=1000.0 + lasts_s - 0.5), TIMEOUT_S).claimed
        late = index_of(connect())
        assert not late.claim(request("c", now=1000.0 + lasts_s), TIMEOUT_S).claimed, "it sees it only now"
        assert task.state.claim is not None
        renewed = replace(task.state.claim, term=ClaimTerm(TTL_S, clock, 20.0))
        applied(engine, move(task, replace(task.state, claim=renewed)))
        waits = index.claim(request("b", now=2000.0), TIMEOUT_S)
        assert waits.claimed == ()
        assert waits.next_over is not None
        assert waits.next_over <= 2000.0 + lasts_s
        ((again, _),) = index.claim(request("b", now=2000.0 + lasts_s), TIMEOUT_S).claimed
        assert again.state.claim == ClaimState(1, "b", "worker", OWN_TERM)

    @pytest.mark.rule("SK-5", "SK-15")
    def test_an_index_buries_what_was_cut_off_too_often(self, engine: Engine) -> None:
        """Holds: "A task whose last try was cut off becomes dead on the way, and serves no holder"."""
        index = index_of(engine)
        applied(engine, *(make(number, retries=number % 2) for number in range(1, 5)))
        assert len(index.claim(request(*"abcd"), TIMEOUT_S).claimed) == 4
        over_at = OWN_TERM.ends_at_s + BUFFER_S
        later = ClaimTerm(TTL_S, OWN_TERM.clock, over_at + TTL_S)
        ((task, _),) = index.claim(request("e", now=over_at, term=later), TIMEOUT_S).claimed
        assert task.head.id == task_id(1)
        assert [
            each for each, _ in index.claim(request(*"fgh", now=over_at, term=later), TIMEOUT_S).claimed
        ] == [read(engine, task_id(3))]
        for number in (2, 4):
            state = read(engine, task_id(number)).state
            assert (state.status, state.failures) == (Status.DEAD, 1)
            assert "ended without a word" in state.error
        assert counts(engine) == {Status.CLAIMED: 2, Status.DEAD: 2}

    @pytest.mark.rule("SK-5", "SK-15")
    def test_an_index_hands_out_what_waits_again(self, engine: Engine) -> None:
        """Holds: "the best tasks that are ready"."""
        index = index_of(engine)
        applied(engine, make(1))
        for number, status in enumerate((Status.DEAD, Status.CANCELLED, Status.WAITING)):
            ((task, _),) = index.claim(request(f"h{number}"), TIMEOUT_S).claimed
            assert task.state.claim is not None
            assert task.state.claim.number == number
            applied(engine, move(task, replace(task.state, status=status)))
            if status is not Status.WAITING:
                assert not index.claim(request("x"), TIMEOUT_S).claimed
                closed = read(engine, task.head.id)
                applied(engine, move(closed, replace(closed.state, status=Status.WAITING)))
        ((task, _),) = index.claim(request("last"), TIMEOUT_S).claimed
        applied(engine, move(task, replace(task.state, status=Status.COMPLETED)))
        assert not index.claim(request("x", now=1e9, wall=1e9), TIMEOUT_S).claimed

    @pytest.mark.rule("SK-6", "SK-20")
    def test_of_many_only_one_is_handed_a_task(self, connect: Connect) -> None:
        """Holds: "One claim is one write, as a Move is"."""
        engines = [connect() for _ in range(THREADS)]
        applied(engines[0], *(make(number) for number in range(200)))
        start = threading.Barrier(THREADS)

        def take(place: int) -> list[Stored]:
            index, taken = index_of(engines[place]), list[Stored]()
            start.wait()
            while True:
                holders = [f"{place}-{len(taken)}-{number}" for number in range(3)]
                claimed = index.claim(request(*holders), TIMEOUT_S).claimed
                if not claimed:
                    return taken
                taken += [task for task, _ in claimed]

        with ThreadPoolExecutor(THREADS) as pool:
            taken = [task for each in pool.map(take, range(THREADS)) for task in each]
        assert sorted(task.head.id for task in taken) == [task_id(number) for number in range(200)]
        assert sorted(taken, key=lambda task: task.head.id) == everything(engines[0])

    @pytest.mark.rule("SK-20")
    def test_a_watch_of_commits_hears_of_other_connections(
        self, connect: Connect, harness: EngineHarness
    ) -> None:
        """Holds: "Call wake, from a thread of the engine's, soon after each commit of any process"."""
        woken = threading.Event()
        closed = index_of(connect()).watch_commits(lambda: pytest.fail("it was closed"))
        closed.close()
        watch = index_of(connect()).watch_commits(woken.set)
        other = connect()
        for number in range(3):
            woken.clear()
            applied(other, make(number))
            assert woken.wait(harness.patience_s)
        watch.close()
        watch.close()

    # -- limits

    @pytest.mark.rule("SK-2", "SK-12")
    def test_a_payload_over_the_limit_is_refused(self, engine: Engine) -> None:
        """Holds: "a payload or update is over the limit; nothing was written"."""
        limit = engine.capabilities.max_payload_bytes
        with pytest.raises(RequestTooLarge):
            apply(engine, make(1), make(2, payload=bytes(limit + 1)), make(3))
        assert everything(engine) == []
        largest = (BIT_FOR_BIT * (limit // 256 + 1))[:limit]
        applied(engine, make(2, payload=largest))
        assert engine.payloads(QUEUE, [task_id(2)], TIMEOUT_S) == {task_id(2): largest}
        (answer,) = apply(engine, make(2))
        assert isinstance(answer, Exists)
        assert answer.payload == largest

    @pytest.mark.rule("SK-9", "SK-12")
    def test_an_update_or_a_result_over_the_limit_is_refused(self, engine: Engine) -> None:
        """Holds: "a payload or update is over the limit; nothing was written", and "Of an update, and of a
        result"."""
        limit = engine.capabilities.max_update_bytes
        enqueue = make(1)
        (revision,) = applied(engine, enqueue)
        present = stored(enqueue, revision)
        update = move(present, claimed(0, 1), Update(0, 0, bytes(limit + 1)))
        result = move(present, TaskState(Status.COMPLETED, claimed().claim, result=bytes(limit + 1)))
        for too_large in (update, result):
            with pytest.raises(RequestTooLarge):
                apply(engine, make(2), too_large)
        assert everything(engine) == [present]
        applied(engine, move(present, claimed(0, 1), Update(0, 0, bytes(limit))))
        assert log(engine, task_id(1)) == [Update(0, 0, bytes(limit))]
        final = TaskState(Status.COMPLETED, claimed(0, 1).claim, result=bytes(limit))
        applied(engine, move(read(engine, task_id(1)), final))
        assert read(engine, task_id(1)).state == final

    # -- concurrency

    @pytest.mark.rule("SK-6", "SK-18")
    def test_of_many_only_one_moves_a_task(self, connect: Connect) -> None:
        """Holds: "linearizable, by itself": of eight that move a task from one revision, one does."""
        engines = [connect() for _ in range(THREADS)]
        applied(engines[0], make(1))
        together = threading.Barrier(THREADS)

        def attempt(number: int, present: Stored, claim: int) -> tuple[str, Answer]:
            holder = f"holder-{number}"
            state = TaskState(Status.CLAIMED, ClaimState(claim, holder, "worker", TERM))
            together.wait(TIMEOUT_S)
            (answer,) = apply(engines[number], move(present, state, Update(claim, 0, holder.encode())))
            return holder, answer

        with ThreadPoolExecutor(THREADS) as pool:
            for claim in range(20):
                present = read(engines[0], task_id(1))
                tried = [pool.submit(attempt, number, present, claim) for number in range(THREADS)]
                outcomes = [future.result() for future in tried]
                (winner,) = (outcome for outcome in outcomes if isinstance(outcome[1], Applied))
                assert all(answer in (winner[1], WriteConflict()) for _, answer in outcomes)
                seen = read(engines[claim % THREADS], task_id(1))
                assert seen.state.claim is not None
                assert (seen.state.claim.holder, Applied(seen.revision)) == winner
                assert log(engines[0], task_id(1), claim=claim) == [Update(claim, 0, winner[0].encode())]

    @pytest.mark.rule("SK-3")
    def test_of_many_only_one_enqueues_an_id(self, connect: Connect) -> None:
        """Holds: "where the id is taken, whatever it is taken by", when eight enqueue it at once."""
        engines = [connect() for _ in range(THREADS)]
        together = threading.Barrier(THREADS)

        def enqueue(number: int, task: int) -> Answer:
            write = make(task, payload=b"%d" % number)
            together.wait(TIMEOUT_S)
            (answer,) = apply(engines[number], write)
            return answer

        with ThreadPoolExecutor(THREADS) as pool:
            for task in range(10):
                tried = [pool.submit(enqueue, number, task) for number in range(THREADS)]
                answers = [future.result() for future in tried]
                (winner,) = (number for number, answer in enumerate(answers) if isinstance(answer, Applied))
                present = Exists(read(engines[0], task_id(task)), b"%d" % winner)
                assert [answer for answer in answers if not isinstance(answer, Applied)] == [present] * (
                    THREADS - 1
                )
        assert counts(engines[0]) == {Status.WAITING: 10}

    @pytest.mark.rule("SK-6", "SK-14")
    def test_a_task_is_moved_or_collected(self, connect: Connect) -> None:
        """Holds: "if every state is still that of its revision", while others move one of them."""
        mover, collector = connect(), connect()
        together = threading.Barrier(2)

        def act(engine: Engine, write: Write) -> Answer:
            together.wait(TIMEOUT_S)
            return apply(engine, write)[0]

        with ThreadPoolExecutor(2) as pool:
            for number in range(0, 60, 3):
                applied(mover, *(make(number + part) for part in range(3)))
                present = [read(mover, task_id(number + part)) for part in range(3)]
                moving = pool.submit(act, mover, move(present[1], claimed()))
                collecting = pool.submit(act, collector, collect(*present))
                answers = [moving.result(), collecting.result()]
                assert sum(isinstance(answer, Applied) for answer in answers) == 1
                left = mover.read(QUEUE, [item.head.id for item in present], TIMEOUT_S)
                assert len(left) == (3 if isinstance(answers[0], Applied) else 0)

    @pytest.mark.rule("SK-6", "SK-9")
    def test_one_connection_serves_many_threads(self, engine: Engine) -> None:
        """Holds: "All methods may be called from any thread": each gets the answers to its own writes."""

        def work(number: int) -> list[int]:
            revisions: list[int] = []
            for index in range(10):
                writes = [make(number * 1000 + index * 10 + part, after=[99999]) for part in range(3)]
                assert apply(engine, *writes) == [Unknown((task_id(99999),))] * 3
                writes = [make(number * 1000 + index * 10 + part) for part in range(3)]
                new = applied(engine, *writes)
                revisions += new
                presents = map(stored, writes, new)
                revisions += applied(engine, *(move(present, claimed(number)) for present in presents))
            return revisions

        with ThreadPoolExecutor(THREADS) as pool:
            done = list(pool.map(work, range(THREADS)))
        assert all(earlier <= later for revisions in done for earlier, later in pairwise(revisions))
        found = everything(engine)
        assert len(found) == THREADS * 30
        assert all(item.state == claimed(int(item.head.id, 16) // 1000) for item in found)
        assert counts(engine) == {Status.CLAIMED: THREADS * 30}

    # -- what stays

    @pytest.mark.rule("SK-6", "SK-9", "SK-10", "SK-11", "SK-13")
    def test_what_was_answered_is_there_after_reopening(self, harness: EngineHarness) -> None:
        """Holds: "Revisions never go back, not even after a restart", nor does anything else."""
        if not harness.can_reopen:
            pytest.skip("this store ends with its last connection")
        with closing(harness.open()) as engine:
            engine.define(QUEUE, PARTITIONS, TIMEOUT_S)
            applied(engine, make(1, payload=b"one"), make(2, after=[1]), make(3))
            present = read(engine, task_id(1))
            at = present.partition
            applied(engine, TakeOver(QUEUE, OwnerEpoch(at, 5)))
            applied(engine, move(present, claimed(0, 1), Update(0, 0, b"log"), OwnerEpoch(at, 5)))
            present = read(engine, task_id(2))
            applied(engine, move(present, TaskState(Status.COMPLETED, claimed().claim, result=b"result")))
            (latest,) = applied(engine, collect(read(engine, task_id(3))))
            before = everything(engine)
        with closing(harness.open()) as engine:
            assert engine.queues(TIMEOUT_S) == {QUEUE: PARTITIONS}
            assert everything(engine) == before
            assert engine.page(QUEUE, TIMEOUT_S, at_least=latest).items == tuple(before)
            assert engine.payloads(QUEUE, [task_id(1)], TIMEOUT_S) == {task_id(1): b"one"}
            assert log(engine, task_id(1)) == [Update(0, 0, b"log")]
            assert counts(engine) == {Status.CLAIMED: 1, Status.COMPLETED: 1}
            stale = move(before[0], claimed(1), epoch=OwnerEpoch(at, 4))
            assert apply(engine, TakeOver(QUEUE, OwnerEpoch(at, 4)), stale) == [
                WriteConflict(),
                WriteConflict(),
            ]
            (later,) = applied(engine, make(4))
            assert later > latest

    @pytest.mark.rule("SK-11")
    def test_a_closed_engine_is_not_asked(self, engine: Engine) -> None:
        """Holds: "Close the store. Closing twice does nothing"."""
        engine.close()
        engine.close()
        with pytest.raises(RegistryUnavailable):
            apply(engine, make(1))
        with pytest.raises(RegistryUnavailable):
            engine.read(QUEUE, [task_id(1)], TIMEOUT_S)
        with pytest.raises(RegistryUnavailable):
            engine.queues(TIMEOUT_S)
