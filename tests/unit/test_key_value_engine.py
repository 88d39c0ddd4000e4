"""The engine on keys and values, at every step at which it is cut off or somebody else comes between."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import pytest

from rebalanser.core.tasks.model import (
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    Task,
    TaskId,
    TaskState,
    Update,
)
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    Collect,
    Duplicate,
    Enqueue,
    EnqueueAll,
    Exists,
    FreeSlot,
    Move,
    OwnerEpoch,
    TakeOver,
    Unknown,
    UsedSlot,
    Write,
    WriteConflict,
)
from rebalanser.errors import (
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    UnusableStore,
)
from rebalanser.registry.contract import (
    Capabilities,
    Put,
    Registry,
    Reply,
    Request,
    Sink,
    Target,
    Transaction,
    Watch,
)
from rebalanser.tasks.key_value.engine import KeyValueEngine, open_engine
from rebalanser.tasks.key_value.values import dump_head, dump_state, dump_task, load_task
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.waiting import PATIENCE_S

TIMEOUT_S = PATIENCE_S
QUEUE = "mail"
ROOT = "root/+tasks"
LARGE = 150
"""More tasks than one transaction collects, and more than it adds."""
MANY = 40
"""More dependencies than are guarded one by one."""


class Meddler(Registry):
    """A registry in which something happens before chosen transactions, counted from 0."""

    def __init__(self, store: MemoryStore) -> None:
        self._inner = MemoryRegistry(store)
        self.before: Callable[[int, Transaction], None] = lambda _number, _transaction: None
        self.transactions: list[Transaction] = []
        self.happened: list[Answer] = []

    def interrupt(self, step: int, act: Callable[[], list[Answer]]) -> None:
        """Do something before the transaction that is sent after ``step`` more; keep what was answered."""
        due = len(self.transactions) + step

        def before(number: int, _transaction: Transaction) -> None:
            if number == due:
                self.happened += act()

        self.before = before

    def die(self, step: int, *, lost: bool) -> None:
        """Answer nothing after ``step`` more transactions; the next one takes effect where it is ``lost``."""
        due = len(self.transactions) + step

        def before(number: int, transaction: Transaction) -> None:
            if number == due and lost:
                self._inner.execute(transaction, TIMEOUT_S)
            if number >= due:
                raise OutcomeUnknown("dead") if lost else RegistryUnavailable("dead")

        self.before = before

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def execute(self, request: Request, timeout_s: float) -> Reply:
        assert isinstance(request, Transaction)
        number = len(self.transactions)
        self.transactions.append(request)
        self.before(number, request)
        return self._inner.execute(request, timeout_s)

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        return self._inner.watch(target, from_revision, sink)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(FakeClock())


@pytest.fixture
def meddler(store: MemoryStore) -> Meddler:
    return Meddler(store)


@pytest.fixture
def engine(meddler: Meddler) -> KeyValueEngine:
    return opened(meddler)


@pytest.fixture
def other(store: MemoryStore) -> KeyValueEngine:
    """Another connection, in whose way nothing comes."""
    return opened(MemoryRegistry(store))


def opened(registry: Registry) -> KeyValueEngine:
    engine = KeyValueEngine(registry, ROOT)
    engine.define(QUEUE, 1, TIMEOUT_S)
    return engine


def task_id(number: int) -> TaskId:
    return f"{number:040x}"


def make(number: int, after: Sequence[int] = (), payload: bytes = b"payload", **fields: object) -> Enqueue:
    head = Head(task_id(number), QUEUE, "send", after=tuple(map(task_id, after)))
    return Enqueue(Task(head, payload), 0, **fields)  # type: ignore[arg-type]


def make_two(after: Sequence[int]) -> EnqueueAll:
    """Two tasks together, of which the first one depends on these."""
    return EnqueueAll((make(9999, after=after), make(10_000, after=[9999])))


def cut_off(collector: KeyValueEngine, dying: Meddler, step: int, tasks: Sequence[Stored]) -> list[Answer]:
    """Collect tasks and die after so many steps; the answer if there are not so many."""
    dying.die(step, lost=True)
    with suppress(OutcomeUnknown):
        return apply(collector, collect(*tasks))
    return []


def unique(number: int, after: Sequence[int] = (), **fields: object) -> Enqueue:
    enqueue = make(number, after=after, **fields)  # type: ignore[arg-type]
    head = replace(enqueue.task.head, unique_key="k")
    return replace(enqueue, task=replace(enqueue.task, head=head))


def apply(engine: KeyValueEngine, *writes: Write) -> list[Answer]:
    return list(engine.apply(writes, TIMEOUT_S))


def everything(engine: KeyValueEngine) -> list[Stored]:
    return list(engine.page(QUEUE, TIMEOUT_S, limit=10_000).items)


def collect(*tasks: Stored) -> Collect:
    return Collect(QUEUE, {task.head.id: (task.partition, task.revision) for task in tasks})


def claimed(updates: int = 0) -> TaskState:
    return TaskState(Status.CLAIMED, ClaimState(0, "holder", "worker", ClaimTerm(30.0, "boot", 1.0), updates))


def move(of: Stored, state: TaskState, **fields: object) -> Move:
    return Move(of.head.id, QUEUE, of.partition, of.revision, state, **fields)  # type: ignore[arg-type]


def leftovers(store: MemoryStore) -> list[str]:
    """The keys that belong to tasks, without the root and the queue."""
    prefix = f"{ROOT}/q/{QUEUE}/"
    return [item.key.removeprefix(prefix) for item in store.items(prefix)]


def copy_of(store: MemoryStore) -> MemoryStore:
    """Another store that holds the same."""
    copy = MemoryStore(FakeClock())
    copy.load(store.items(), {}, store.revision)
    return copy


def put_component(engine: KeyValueEngine, size: int = LARGE) -> list[Stored]:
    """Tasks that depend on each other, one of them with a log and a long payload."""
    writes = [make(number, after=[number - 1] if number else []) for number in range(size - 1)]
    writes.append(make(size - 1, after=[size - 2, 0], payload=b"x" * 20_000))
    assert all(isinstance(answer, Applied) for answer in apply(engine, *writes))
    tasks = everything(engine)
    for sequence in range(55):
        last = engine.read(QUEUE, [task_id(1)], TIMEOUT_S)[task_id(1)]
        apply(engine, move(last, claimed(sequence + 1), update=Update(0, sequence, b"log")))
    assert len(tasks) == size
    return everything(engine)


# -- batches


@pytest.mark.rule("SK-12")
def test_a_batch_is_few_transactions(engine: KeyValueEngine, meddler: Meddler) -> None:
    apply(engine, *(make(number) for number in range(500)))
    apply(engine, TakeOver(QUEUE, OwnerEpoch(0, 7)))
    tasks = everything(engine)
    meddler.transactions.clear()
    epoch = OwnerEpoch(0, 7)
    answers = apply(engine, *(move(task, claimed(), epoch=epoch, head=task.head) for task in tasks))
    assert all(isinstance(answer, Applied) for answer in answers)
    assert len(meddler.transactions) == 4
    task = everything(engine)[0]
    meddler.transactions.clear()
    apply(engine, move(task, claimed(), epoch=epoch))
    assert len(meddler.transactions) == 2, "the head was not given, so it is read"


@pytest.mark.rule("SK-5", "SK-6")
@pytest.mark.parametrize("beside", [0, 1])
def test_a_move_may_have_the_payload_read_along(
    engine: KeyValueEngine, meddler: Meddler, beside: int
) -> None:
    """In one transaction. What is long or unreadable is not read along, and the move takes effect."""
    payloads = [b"short", b"x" * 100_000, b"broken", b"beside"]
    apply(engine, *(make(number, payload=payload) for number, payload in enumerate(payloads)))
    broken = engine._keys_of(QUEUE).payload(task_id(2))
    meddler.execute(Transaction(then=(Put(broken, b"no place"),)), TIMEOUT_S)
    for number, payload in enumerate([b"short", None, None]):
        tasks = everything(engine)
        asked = move(tasks[number], claimed(), head=tasks[number].head, with_payload=True)
        others = [move(tasks[3], claimed(updates=number), head=tasks[3].head)] * beside
        meddler.transactions.clear()
        answer, *_ = apply(engine, asked, *others)
        assert isinstance(answer, Applied)
        assert answer.payload == payload
        assert len(meddler.transactions) == 1
        assert everything(engine)[number].state == claimed()


@pytest.mark.rule("SK-12")
def test_a_batch_is_cut_where_it_gets_too_large(engine: KeyValueEngine, meddler: Meddler) -> None:
    payload = b"x" * 300_000
    answers = apply(engine, *(make(number, payload=payload) for number in range(7)))
    assert [isinstance(answer, Applied) for answer in answers] == [True] * 7
    assert len(meddler.transactions) == 1 + 3
    assert engine.payloads(QUEUE, [task_id(6)], TIMEOUT_S) == {task_id(6): payload}


def test_a_chain_in_one_batch_is_few_transactions(engine: KeyValueEngine, meddler: Meddler) -> None:
    answers = apply(engine, *(make(number, after=[number - 1] if number else []) for number in range(300)))
    assert all(isinstance(answer, Applied) for answer in answers)
    revisions = [answer.revision for answer in answers if isinstance(answer, Applied)]
    assert revisions == sorted(revisions)
    assert len(meddler.transactions) < 25


def test_a_failure_after_some_writes_is_an_unknown_outcome(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler
) -> None:
    def refuse(number: int, _transaction: Transaction) -> None:
        if number == 2:
            raise QuotaExceeded("full")

    meddler.before = refuse
    with pytest.raises(OutcomeUnknown, match="full"):
        apply(engine, *(make(number) for number in range(200)))
    assert 0 < len(everything(other)) < 200
    meddler.before = lambda _number, _transaction: (_ for _ in ()).throw(QuotaExceeded("full"))
    with pytest.raises(QuotaExceeded):
        apply(engine, make(1000))


def test_a_write_that_others_always_forestall_is_given_up(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler
) -> None:
    tokens = iter(range(1, 10_000))

    def forestall(_number: int, transaction: Transaction) -> None:
        if transaction.writes:
            apply(other, TakeOver(QUEUE, OwnerEpoch(0, next(tokens))))

    meddler.before = forestall
    with pytest.raises(RegistryUnavailable, match="quicker"):
        apply(engine, TakeOver(QUEUE, OwnerEpoch(0, 10_000)))
    meddler.before = lambda _number, _transaction: None
    assert isinstance(apply(engine, TakeOver(QUEUE, OwnerEpoch(0, 10_000)))[0], Applied)


@pytest.mark.rule("SK-12")
def test_moves_are_written_flat_and_one_that_is_refused_keeps_no_other(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler
) -> None:
    epoch = OwnerEpoch(0, 7)
    apply(engine, TakeOver(QUEUE, epoch), *(make(number) for number in range(100)))
    tasks = everything(engine)
    apply(other, move(tasks[50], TaskState(Status.CANCELLED)))
    moves = [move(task, claimed(), epoch=epoch, head=task.head) for task in tasks]
    meddler.transactions.clear()
    answers = apply(engine, *moves[:50])
    (flat,) = meddler.transactions
    assert len(flat.guards) == 52, "the epoch once, and once that the queue is not paused"
    assert all(isinstance(operation, Put) for operation in flat.then)
    answers += apply(engine, *moves[50:])
    assert [index for index, answer in enumerate(answers) if answer == WriteConflict()] == [50]
    assert len(meddler.transactions) == 3, "again, each for itself"
    found = everything(engine)
    assert [stored.state.status for stored in found].count(Status.CLAIMED) == 99
    assert [answer.revision for answer in answers if isinstance(answer, Applied)] == [
        stored.revision for stored in found if stored.state.status is Status.CLAIMED
    ]


def test_moves_of_many_partitions_fit_into_their_transactions(
    engine: KeyValueEngine, meddler: Meddler
) -> None:
    """Each partition adds a guard on its epoch, and each transaction one that the queue is not paused.

    A task that is moved twice is in two transactions.
    """
    for number in range(100):
        apply(engine, TakeOver(QUEUE, OwnerEpoch(number, 7)), replace(make(number), partition=number))
    tasks = [engine.read(QUEUE, [task_id(number)], TIMEOUT_S)[task_id(number)] for number in range(100)]
    meddler.transactions.clear()
    moves = [move(task, claimed(), epoch=OwnerEpoch(task.partition, 7), head=task.head) for task in tasks]
    answers = apply(engine, *moves, moves[99])
    assert [isinstance(answer, Applied) for answer in answers] == [True] * 100 + [False]
    assert [len(each.guards) for each in meddler.transactions] == [127, 75, 3]


@pytest.mark.rule("SK-13")
def test_a_deposed_owner_s_moves_are_all_refused(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler
) -> None:
    apply(engine, TakeOver(QUEUE, OwnerEpoch(0, 7)), *(make(number) for number in range(200)))
    tasks = everything(engine)
    meddler.interrupt(1, lambda: apply(other, TakeOver(QUEUE, OwnerEpoch(0, 8))))
    answers = apply(
        engine, *(move(task, claimed(), epoch=OwnerEpoch(0, 7), head=task.head) for task in tasks)
    )
    applied = sum(isinstance(answer, Applied) for answer in answers)
    assert 0 < applied < 200
    assert answers == [*answers[:applied], *[WriteConflict()] * (200 - applied)]
    statuses = [stored.state.status for stored in everything(engine)]
    assert statuses == [Status.CLAIMED] * applied + [Status.WAITING] * (200 - applied)


def test_moves_around_a_takeover_keep_their_order(engine: KeyValueEngine) -> None:
    apply(engine, TakeOver(QUEUE, OwnerEpoch(0, 7)), *(make(number) for number in range(4)))
    writes: list[Write] = [
        move(task, claimed(), epoch=OwnerEpoch(0, 7), head=task.head) for task in everything(engine)
    ]
    writes.insert(2, TakeOver(QUEUE, OwnerEpoch(0, 8)))
    answers = apply(engine, *writes)
    assert [isinstance(answer, Applied) for answer in answers] == [True, True, True, False, False]


@pytest.mark.parametrize("lost", [False, True])
def test_a_flat_transaction_whose_answer_is_lost_is_of_unknown_outcome(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler, lost: bool
) -> None:
    apply(engine, *(make(number) for number in range(3)))
    moves = [move(task, claimed(), head=task.head) for task in everything(engine)]
    meddler.die(0, lost=lost)
    with pytest.raises(OutcomeUnknown if lost else RegistryUnavailable):
        apply(engine, *moves)
    expected = Status.CLAIMED if lost else Status.WAITING
    assert [stored.state.status for stored in everything(other)] == [expected] * 3


@pytest.mark.parametrize(
    "state",
    [
        TaskState(),
        TaskState(
            Status.DEAD, None, 1e300, 3, 'a "quoted" \\ line\n\u20ac \U0001f600 \x00 \udc80', b"\x00\xff"
        ),
        TaskState(Status.WAITING, None, math.inf),
        replace(claimed(7), due=5, error="x"),
        TaskState(Status.CLAIMED, ClaimState(2, 'h"', "w\u00e4", ClaimTerm(30, "", -0.0), 0)),
    ],
)
def test_a_state_is_read_as_it_was_written(state: TaskState) -> None:
    head = Head(task_id(1), QUEUE, 'na"me\u20ac', 5, (task_id(2),), 3, 1.5)
    for each in (head, replace(head, after=()), Head(task_id(1), QUEUE, "name")):
        value = dump_task(state.status, dump_head(each), dump_state(state))
        assert value == json.dumps(json.loads(value), separators=(",", ":")).encode()
        assert load_task(QUEUE, 3, each.id, "key", value, 9).stored == Stored(each, state, 9, 3)


@pytest.mark.rule("SK-13")
def test_an_epoch_that_was_taken_over_unseen_conflicts(engine: KeyValueEngine, other: KeyValueEngine) -> None:
    apply(engine, make(1), TakeOver(QUEUE, OwnerEpoch(0, 1)))
    (task,) = everything(engine)
    apply(other, TakeOver(QUEUE, OwnerEpoch(0, 2)))
    assert apply(engine, move(task, claimed(), epoch=OwnerEpoch(0, 1))) == [WriteConflict()]
    assert apply(engine, move(task, claimed(), epoch=OwnerEpoch(0, 3))) == [WriteConflict()]
    assert isinstance(apply(engine, move(task, claimed(), epoch=OwnerEpoch(0, 2)))[0], Applied)
    (task,) = everything(engine)
    answers = apply(engine, TakeOver(QUEUE, OwnerEpoch(0, 4)), move(task, claimed(), epoch=OwnerEpoch(0, 4)))
    assert all(isinstance(answer, Applied) for answer in answers)


@pytest.mark.rule("SK-13")
def test_a_conflict_in_a_batch_beside_another_deposes_nobody(
    engine: KeyValueEngine, meddler: Meddler
) -> None:
    """It makes the engine forget what it knows of the epoch, which stands: an owner believes two refusals."""
    epoch = OwnerEpoch(0, 1)
    apply(engine, make(1), make(2), TakeOver(QUEUE, epoch))
    task, changed = everything(engine)
    stale = replace(move(changed, claimed(), epoch=epoch, head=changed.head), revision=changed.revision + 99)
    meddler.interrupt(0, lambda: apply(engine, stale))
    assert isinstance(apply(engine, move(task, claimed(), epoch=epoch))[0], Applied)
    assert meddler.happened == [WriteConflict()]


@pytest.mark.rule("SK-6", "SK-20")
def test_a_slot_that_is_used_while_it_is_withdrawn_is_told(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler
) -> None:
    """Else its worker would never know of the claim."""
    apply(other, make(1), TakeOver(QUEUE, OwnerEpoch(0, 1)))
    (task,) = everything(other)
    made = FreeSlot("h", "p", "w", frozenset({"send"}), 30.0, other.grant_slots(3600.0, TIMEOUT_S))
    other.publish_slots(QUEUE, [made], [], TIMEOUT_S)
    (slot,), _ = other.slots(QUEUE, TIMEOUT_S)
    assert isinstance(slot, FreeSlot)
    claim = replace(move(task, claimed(), epoch=OwnerEpoch(0, 1)), slot=slot)
    meddler.interrupt(1, lambda: apply(other, claim))
    used = UsedSlot("h", "p", task.head.id)
    assert engine.withdraw_slots(QUEUE, "p", None, TIMEOUT_S) == [used]
    assert isinstance(meddler.happened[0], Applied)
    assert other.slots(QUEUE, TIMEOUT_S)[0] == [used]


# -- dependencies


@pytest.mark.rule("SK-2")
@pytest.mark.parametrize("count", [3, MANY, 400])
def test_a_task_may_depend_on_many(engine: KeyValueEngine, count: int) -> None:
    dependencies = range(1, count + 1)
    missing = [make(number) for number in dependencies if number != 2]
    refused = apply(engine, *missing, make(1000, after=dependencies))[-1]
    assert refused == Unknown((task_id(2),))
    answers = apply(engine, make(2), make(1000, after=dependencies))
    assert all(isinstance(answer, Applied) for answer in answers)
    assert isinstance(apply(engine, make(1000, after=dependencies))[0], Exists)
    tasks = everything(engine)
    assert apply(engine, collect(tasks[1])) == [WriteConflict()]
    assert isinstance(apply(engine, collect(*tasks))[0], Applied)
    assert isinstance(apply(engine, make(1001, after=dependencies))[0], Unknown)


@pytest.mark.rule("SK-2")
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("size", [10, 100], ids=["flat", "nested"])
def test_tasks_that_are_enqueued_together_are_all_there_or_none(size: int, lost: bool) -> None:
    """Wherever the process dies, and whether its last request takes effect."""
    together = EnqueueAll(tuple(make(number, after=[number - 1]) for number in range(1, size + 1)))
    for step in range(10):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, make(0))
        meddler.die(step, lost=lost)
        try:
            apply(engine, together)
        except OutcomeUnknown:
            assert lost
        except RegistryUnavailable:
            assert not lost
        else:
            break
        assert len(everything(other)) in (1, size + 1)
    assert len(everything(other)) == size + 1
    assert step > 1


@pytest.mark.full_size
@pytest.mark.rule("SK-14")
@pytest.mark.parametrize("together", [False, True], ids=["one", "several"])
def test_whoever_enqueues_as_a_collection_is_cut_off_is_not_left_alone(together: bool) -> None:
    """Whoever meets its marks next brings it to an end, one way or the other."""
    for step in range(40):
        store = MemoryStore(FakeClock())
        meddler, dying = Meddler(store), Meddler(store)
        engine, other, collector = opened(meddler), opened(MemoryRegistry(store)), opened(dying)
        apply(other, *(make(number) for number in range(LARGE)))
        tasks = everything(other)

        meddler.interrupt(1, partial(cut_off, collector, dying, step, tasks))
        (enqueued,) = apply(engine, make_two([3]) if together else make(9999, after=[3]))
        if meddler.happened:
            break
        apply(other, *(make(20_000 + number, after=[number]) for number in (0, 3, LARGE - 1)))
        left = other.read(QUEUE, [task_id(number) for number in range(LARGE)], TIMEOUT_S)
        assert len(left) == (LARGE if isinstance(enqueued, Applied) else 0)
    else:
        pytest.fail("the collection took more steps than were tried")


@pytest.mark.rule("SK-2")
def test_an_id_that_is_taken_while_others_are_enqueued_with_it_refuses_all(
    engine: KeyValueEngine, other: KeyValueEngine, meddler: Meddler
) -> None:
    together = EnqueueAll(tuple(make(number) for number in range(1, 4)))
    meddler.interrupt(1, lambda: apply(other, make(2, payload=b"other")))
    (answer,) = apply(engine, together)
    assert isinstance(answer, Exists)
    assert answer.payload == b"other"
    assert [each.head.id for each in everything(other)] == [task_id(2)]


@pytest.mark.rule("SK-2")
def test_tasks_that_need_too_many_keys_together_are_refused(engine: KeyValueEngine) -> None:
    tasks = tuple(make(number, after=range(1, number)) for number in range(1, 90))
    with pytest.raises(RequestTooLarge, match="89 tasks that are enqueued together need"):
        apply(engine, EnqueueAll(tasks))
    assert everything(engine) == []


@pytest.mark.full_size
@pytest.mark.rule("SK-14")
@pytest.mark.parametrize("together", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("dependencies", [1, MANY])
@pytest.mark.parametrize("size", [MANY, LARGE], ids=["together", "swept"])
def test_whoever_enqueues_between_the_steps_of_a_collection_is_not_left_alone(
    dependencies: int, size: int, together: bool
) -> None:
    """Either the collection has an effect, and the new task is refused, or the other way round."""
    outcomes = set()
    for step in range(60):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, *(make(number) for number in range(size)))
        tasks = everything(other)
        after = range(dependencies)
        new = make_two(after) if together else make(9999, after=after)
        meddler.interrupt(step, partial(apply, other, new))
        (collected,) = apply(engine, collect(*tasks))
        answers = meddler.happened
        if not answers:
            break
        left = other.read(QUEUE, [task_id(number) for number in range(size)], TIMEOUT_S)
        outcomes.add(type(collected))
        if isinstance(collected, Applied):
            assert isinstance(answers[0], Unknown)
            assert not left
        else:
            assert isinstance(answers[0], Applied)
            assert len(left) == size
    else:
        pytest.fail("the collection took more steps than were tried")
    assert WriteConflict in outcomes


@pytest.mark.rule("SK-14")
@pytest.mark.parametrize("size", [10, LARGE], ids=["together", "swept"])
@pytest.mark.parametrize("dependencies", [2, MANY])
@pytest.mark.parametrize("together", [False, True], ids=["one", "several"])
def test_whoever_collects_between_the_steps_of_an_enqueueing(
    dependencies: int, size: int, together: bool
) -> None:
    size = max(size, dependencies)
    for step in range(20):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, *(make(number) for number in range(size)))
        tasks = everything(other)
        meddler.interrupt(step, partial(apply, other, collect(*tasks)))
        after = range(dependencies)
        (enqueued,) = apply(engine, make_two(after) if together else make(9999, after=after))
        collected = meddler.happened
        if not collected:
            break
        assert isinstance(collected[0], Applied) == isinstance(enqueued, Unknown)
        left = other.read(QUEUE, [task_id(number) for number in range(size)], TIMEOUT_S)
        assert len(left) == (0 if isinstance(collected[0], Applied) else size)
    else:
        pytest.fail("the enqueueing took more steps than were tried")


# -- unique keys

CLOSED = TaskState(Status.CANCELLED)


@pytest.mark.rule("SK-23")
@pytest.mark.parametrize("after_closed", [False, True])
@pytest.mark.parametrize("dependencies", [0, 2, MANY])
def test_whoever_enqueues_with_the_same_key_between_the_steps(dependencies: int, after_closed: bool) -> None:
    winners = set()
    for step in range(30):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, *(make(100 + number) for number in range(dependencies)))
        if after_closed:
            apply(other, unique(9, state=CLOSED))
        meddler.interrupt(step, partial(apply, other, unique(2)))
        after = range(100, 100 + dependencies)
        first, dependent = apply(engine, unique(1, after=after), make(3, after=[1]))
        if not meddler.happened:
            break
        (second,) = meddler.happened
        left = {task.head.id for task in everything(other)}
        if isinstance(first, Applied):
            winners.add(1)
            assert (second, task_id(3) in left) == (Duplicate(task_id(1)), True)
        else:
            winners.add(2)
            assert (first, dependent) == (Duplicate(task_id(2)), Unknown((task_id(1),)))
            assert isinstance(second, Applied)
        assert len(left & {task_id(1), task_id(2)}) == 1
    else:
        pytest.fail("the enqueueing took more steps than were tried")
    assert winners == {1, 2}


@pytest.mark.rule("SK-23")
@pytest.mark.parametrize("dependencies", [0, 2, MANY])
def test_whoever_requeues_the_last_of_a_key_between_the_steps(dependencies: int) -> None:
    for step in range(30):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, *(make(100 + number) for number in range(dependencies)), unique(9, state=CLOSED))
        last = other.read(QUEUE, [task_id(9)], TIMEOUT_S)[task_id(9)]
        meddler.interrupt(step, partial(apply, other, move(last, TaskState())))
        (enqueued,) = apply(engine, unique(1, after=range(100, 100 + dependencies)))
        if not meddler.happened:
            assert isinstance(enqueued, Applied)
            break
        assert enqueued == Duplicate(task_id(9))
    else:
        pytest.fail("the enqueueing took more steps than were tried")


@pytest.mark.rule("SK-14", "SK-23")
@pytest.mark.parametrize("size", [1, LARGE], ids=["together", "swept"])
def test_whoever_enqueues_between_the_steps_of_the_collection_of_the_last_of_a_key(size: int) -> None:
    for step in range(60):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, unique(9, state=CLOSED), *(make(100 + number) for number in range(size - 1)))
        meddler.interrupt(step, partial(apply, other, unique(1)))
        tasks = everything(other)
        (collected,) = apply(engine, collect(*tasks))
        if isinstance(collected, WriteConflict):  # read again
            (collected,) = apply(engine, collect(*tasks))
        assert isinstance(collected, Applied)
        if not meddler.happened:
            assert not any(key.startswith("k/") for key in leftovers(store))
            break
        assert isinstance(meddler.happened[0], Applied)
        assert apply(other, unique(2)) == [Duplicate(task_id(1))]
    else:
        pytest.fail("the collection took more steps than were tried")


# -- collections


@pytest.mark.rule("SK-14")
def test_a_large_collection_leaves_nothing(engine: KeyValueEngine, store: MemoryStore) -> None:
    tasks = put_component(engine)
    (answer,) = apply(engine, collect(*tasks))
    assert isinstance(answer, Applied)
    assert everything(engine) == []
    assert engine.updates(QUEUE, task_id(1), TIMEOUT_S) == []
    assert leftovers(store) == []


@pytest.mark.full_size
@pytest.mark.rule("SK-14")
@pytest.mark.parametrize("lost", [False, True], ids=["cut off before", "cut off after"])
def test_a_collector_may_die_at_any_step(lost: bool) -> None:
    """All or none: whoever then writes to a task finds it as it was, or gone with all the others."""
    gone = stood = 0
    original = MemoryStore(FakeClock())
    tasks = put_component(opened(MemoryRegistry(original)), 60)
    for step in range(200):
        store = copy_of(original)
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        states = {task.head.id: task.state for task in tasks}
        meddler.die(step, lost=lost)
        answer = None
        with suppress(OutcomeUnknown, RegistryUnavailable):
            (answer,) = apply(engine, collect(*tasks))
        if answer is not None:
            assert isinstance(answer, Applied)
            break
        present = everything(other)
        assert {task.head.id: task.state for task in present}.items() <= states.items()
        if present:
            settled_by_writing(other, present[-1])
        left = everything(other)
        assert len(left) in {0, len(tasks)}
        gone, stood = gone + (not left), stood + bool(left)
        if left:
            assert {task.head.id: task.state for task in left} == states | {left[-1].head.id: claimed()}
            tried = [apply(other, collect(*everything(other)))[0] for _ in range(2)]
            assert any(isinstance(each, Applied) for each in tried), "the first may meet a dead one's marks"
        assert leftovers(store) in ([], [f"c/{name}" for name in unfinished(store)])
    else:
        pytest.fail("the collection took more steps than were tried")
    assert gone
    assert stood


def unfinished(store: MemoryStore) -> list[str]:
    """The records of collections that have marked nothing (any more)."""
    return [key.removeprefix("c/") for key in leftovers(store) if key.startswith("c/")]


def settled_by_writing(engine: KeyValueEngine, task: Stored) -> None:
    """Move a task as its owner would: where that conflicts, read it again and move that."""
    for _ in range(3):
        (answer,) = apply(engine, move(task, claimed()))
        if isinstance(answer, Applied):
            return
        found = engine.read(QUEUE, [task.head.id], TIMEOUT_S)
        if task.head.id not in found:
            return
        task = found[task.head.id]
    pytest.fail("a task can neither be written nor is it gone")


@pytest.mark.full_size
@pytest.mark.rule("SK-14")
def test_whoever_moves_a_task_between_the_steps_of_a_collection() -> None:
    """Either is applied, never both; and a task that was not collected can be moved."""
    applied = set()
    for step in range(60):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, *(make(number) for number in range(LARGE)))
        tasks = everything(other)
        meddler.interrupt(step, partial(apply, other, move(tasks[LARGE // 2], claimed())))
        (collected,) = apply(engine, collect(*tasks))
        answers = meddler.happened
        if not answers:
            break
        left = everything(other)
        if isinstance(collected, Applied):
            assert answers == [WriteConflict()]
            assert left == []
        else:
            assert len(left) == LARGE
            assert sum(task.state == claimed() for task in left) == isinstance(answers[0], Applied)
            settled_by_writing(other, left[LARGE // 2])
        applied.add(type(collected))
    else:
        pytest.fail("the collection took more steps than were tried")
    assert applied == {Applied, WriteConflict}


@pytest.mark.full_size
@pytest.mark.rule("SK-14")
def test_of_two_collections_of_the_same_tasks_one_is_applied_in_the_end() -> None:
    outcomes = set()
    for step in range(60):
        store = MemoryStore(FakeClock())
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        apply(other, *(make(number) for number in range(LARGE)))
        tasks = everything(other)
        meddler.interrupt(step, partial(apply, other, collect(*tasks)))
        (answer,) = apply(engine, collect(*tasks))
        if not meddler.happened:
            break
        outcomes.add((type(answer), type(meddler.happened[0])))
        left = everything(other)
        assert len(left) in {0, LARGE}
        if left:
            assert isinstance(apply(other, collect(*left))[0], Applied)
        assert leftovers(store) == []
    else:
        pytest.fail("the collection took more steps than were tried")
    assert outcomes == {(Applied, WriteConflict), (WriteConflict, Applied), (WriteConflict, WriteConflict)}


@pytest.mark.full_size
@pytest.mark.rule("SK-14")
def test_the_next_large_collection_finishes_what_a_dead_collector_had_decided() -> None:
    original = MemoryStore(FakeClock())
    prepared = opened(MemoryRegistry(original))
    apply(prepared, *(make(number) for number in range(LARGE)))
    tasks = everything(prepared)
    apply(prepared, *(make(number) for number in range(1000, 1000 + LARGE)))
    others = everything(prepared)[LARGE:]
    decided = 0
    for step in range(60):
        store = copy_of(original)
        meddler = Meddler(store)
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        meddler.die(step, lost=True)
        with suppress(OutcomeUnknown):
            apply(engine, collect(*tasks))
            break
        marked = any("sweeping" in item.value.decode() for item in store.items(f"{ROOT}/q/{QUEUE}/c/"))
        assert isinstance(apply(other, collect(*others))[0], Applied)
        assert len(everything(other)) in ({0} if marked else {0, LARGE})
        decided += marked
    else:
        pytest.fail("the collection took more steps than were tried")
    assert decided > 1


@pytest.mark.rule("SK-14")
def test_a_small_collection_only_deletes(engine: KeyValueEngine, meddler: Meddler) -> None:
    """So that a registry over its quota, which refuses to put anything, can be emptied."""
    apply(engine, unique(1), make(2, after=[1]))
    tasks = everything(engine)
    meddler.transactions.clear()
    assert isinstance(apply(engine, collect(*tasks))[0], Applied)
    for transaction in meddler.transactions:
        for operation in transaction.then:
            nested = operation.then if isinstance(operation, Transaction) else (operation,)
            assert not any(isinstance(each, Put) for each in nested)


# -- what bad input gets


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (f"s/0/{task_id(1)}", b'{"v":2,"status":"waiting"}', "newer"),
        (f"s/0/{task_id(1)}", b'{"v":1,"status":"strange","head":{"name":"x"},"state":{}}', "repair"),
        (f"s/0/{task_id(1)}", b"\xff", "repair"),
        (f"p/{task_id(1)}", b'{"v":2}\n', "newer"),
        (f"p/{task_id(1)}", b"", "repair"),
    ],
)
def test_what_a_newer_version_or_nobody_wrote_is_refused(
    engine: KeyValueEngine, store: MemoryStore, key: str, value: bytes, message: str
) -> None:
    apply(engine, make(1))
    registry = MemoryRegistry(store)
    registry.execute(Transaction(then=(Put(f"{ROOT}/q/{QUEUE}/{key}", value),)), TIMEOUT_S)
    with pytest.raises(UnusableStore, match=message):
        engine.read(QUEUE, [task_id(1)], TIMEOUT_S)


def test_a_newer_definition_is_refused(engine: KeyValueEngine, store: MemoryStore) -> None:
    put = Put(f"{ROOT}/queues/{QUEUE}", b'{"v":2,"partitions":3}')
    MemoryRegistry(store).execute(Transaction(then=(put,)), TIMEOUT_S)
    with pytest.raises(UnusableStore, match="newer"):
        engine.queues(TIMEOUT_S)
    with pytest.raises(UnusableStore, match="newer"):
        engine.define(QUEUE, 1, TIMEOUT_S)


def test_a_state_or_a_head_that_is_too_large_is_refused(engine: KeyValueEngine) -> None:
    apply(engine, make(1))
    (task,) = everything(engine)
    with pytest.raises(RequestTooLarge, match="a state of"):
        apply(engine, make(2), move(task, replace(claimed(), error="x" * 1_000_000)))
    with pytest.raises(RequestTooLarge, match="depends"):
        apply(engine, make(2), make(3, after=range(20_000), waits_for_unknown=True))
    assert everything(engine) == [task]


def test_the_largest_of_all_fits(engine: KeyValueEngine) -> None:
    """A task that could be added can be moved, whatever its head, with the largest result and update."""
    dependencies = range(8000)
    apply(engine, make(9999, after=dependencies, waits_for_unknown=True))
    (task,) = everything(engine)
    limit = engine.capabilities.max_update_bytes
    state = replace(claimed(1), result=bytes(limit), error="x" * 50_000)
    (answer,) = apply(engine, move(task, state, update=Update(0, 0, bytes(limit)), head=task.head))
    assert isinstance(answer, Applied)
    (found,) = everything(engine)
    assert (found.head, found.state) == (task.head, state)


# -- opening


def test_opens_in_the_registry_of_a_url(store: MemoryStore) -> None:
    with closing(open_engine("memory://key-value-engine", TIMEOUT_S)) as engine:
        assert engine.define("größe/mail", 3, TIMEOUT_S) == 3
        assert engine.queues(TIMEOUT_S) == {"größe/mail": 3}
        assert not engine.capabilities.shared_between_hosts
    assert store.items() == ()


def test_tasks_lie_where_no_group_does(store: MemoryStore) -> None:
    engine = opened(MemoryRegistry(store))
    apply(engine, make(1))
    assert {item.key.split("/")[1] for item in store.items()} == {"+tasks"}
