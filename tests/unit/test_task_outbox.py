"""The outbox: what is spooled is forwarded once and in order, and what is refused is told to somebody."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import pickle
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from rebalanser.cli import main
from rebalanser.core.tasks.failures import ErrorKind
from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import (
    ClaimState,
    ClaimTerm,
    EnqueueAnswer,
    Enqueued,
    Head,
    Status,
    Task,
    TaskId,
    TaskState,
)
from rebalanser.core.tasks.store import Answer, Collect, Duplicate, Enqueue, Forwarded, Move, Skip, Write
from rebalanser.errors import (
    InvalidState,
    InvalidTask,
    NotSettled,
    OutcomeUnknown,
    RegistryUnavailable,
    RequestTooLarge,
    TaskExists,
    UnknownQueue,
    UnknownTask,
    UnusableFolder,
    UnusableStore,
)
from rebalanser.registry.urls import parse_url
from rebalanser.tasks import AsyncQueue, Claim, Queue, TaskFunction
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.outbox import Forwarding, WaitingCallers, engine_name
from rebalanser.tasks.results import sources_in
from rebalanser.tasks.spool import DUPLICATE, KEPT_DUPLICATES, Spool, SpoolName, SpoolRefusal
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from rebalanser_sqlite.tasks import SqliteEngine

QUEUE = "mail"
ABSENT = f"{9:040x}"


def task_id(number: int) -> TaskId:
    return f"{number:040x}"


def made(number: int, **fields: object) -> Enqueue:
    return Enqueue(Task(Head(task_id(number), QUEUE, "send", **fields), bytes([number])), 0)  # type: ignore[arg-type]


Ask: TypeAlias = Callable[[Sequence[Write], float], Sequence[Answer]]


class Network:
    """What lies between a producer and its engine: it can be cut, before or behind what is asked."""

    def __init__(self) -> None:
        self.is_cut = False
        self.loses_answers = 0
        self.asked: list[Write] = []
        self.limit_bytes = 1 << 20
        self.changed = threading.Condition()

    def pass_on(self, ask: Ask, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        with self.changed:
            if self.is_cut:
                raise RegistryUnavailable("the engine is away")
            tasks = [each.task for each in writes if isinstance(each, Enqueue)]
            if any(len(task.payload) > self.limit_bytes for task in tasks):
                raise RequestTooLarge("a payload is over the limit")
            self.asked += writes
            answers = ask(writes, timeout_s)
            if self.loses_answers:
                self.loses_answers -= 1
                raise OutcomeUnknown("no answer came")
            return answers


class Stage:
    """A queue with an outbox on a file, and a network between them."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder = folder
        self.network = network
        self.file = folder / "mail.db"
        self.outbox = folder / "outbox"

    def open(self, **named: object) -> tuple[Queue, TaskFunction[[str]]]:
        queue = Queue(
            QUEUE,
            f"sqlite:///{self.file}",
            partitions=4,
            outbox=self.outbox,
            state_folder=self.folder / "state",
            **named,  # type: ignore[arg-type]
        )

        @queue.task()
        def send(claim: Claim, to: str) -> None:
            """Never called."""

        return queue, send

    def spool(self) -> Spool:
        name = SpoolName.of(QUEUE, engine_name(parse_url(f"sqlite:///{self.file}")))
        return Spool(name.file_in(self.outbox), None, PATIENCE_S)

    def counts(self) -> tuple[int, int]:
        with closing(self.spool()) as spool:
            return spool.counts()

    def drained(self) -> None:
        """Wait until nothing is left to forward."""
        with self.network.changed:
            done = self.network.changed.wait_for(lambda: self.counts()[0] == 0, PATIENCE_S)
        assert done, f"left in the spool: {self.counts()}"

    def tasks(self) -> list[TaskId]:
        with closing(SqliteEngine(self.file)) as engine:
            return [item.head.id for item in engine.page(QUEUE, PATIENCE_S).items]

    def complete_and_collect(self) -> list[TaskId]:
        """Have all tasks done and deleted; which they were."""
        with closing(SqliteEngine(self.file)) as engine:
            claim = ClaimState(0, "holder", "worker", ClaimTerm(30.0, "", 0.0))
            items = engine.page(QUEUE, PATIENCE_S).items
            moves = [
                Move(each.head.id, QUEUE, each.partition, each.revision, TaskState(Status.COMPLETED, claim))
                for each in items
            ]
            engine.apply(moves, PATIENCE_S)
            done = engine.page(QUEUE, PATIENCE_S).items
            engine.apply(
                [Collect(QUEUE, {each.head.id: (each.partition, each.revision) for each in done})], PATIENCE_S
            )
            return [each.head.id for each in done]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    apply, define = SqliteEngine.apply, SqliteEngine.define

    def cut_apply(self: SqliteEngine, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        if not any(isinstance(each, Move | Collect) for each in writes):
            return network.pass_on(lambda *asked: apply(self, *asked), writes, timeout_s)
        return apply(self, writes, timeout_s)

    def cut_define(self: SqliteEngine, queue: str, partitions: int, timeout_s: float) -> int:
        if network.is_cut:
            raise RegistryUnavailable("the engine is away")
        return define(self, queue, partitions, timeout_s)

    def told(name: str) -> None:
        change = getattr(Spool, name)

        def changed(self: Spool, *numbers: int) -> None:
            change(self, *numbers)
            with network.changed:
                network.changed.notify_all()

        monkeypatch.setattr(Spool, name, changed)

    told("forward")
    told("keep")
    monkeypatch.setattr(SqliteEngine, "apply", cut_apply)
    monkeypatch.setattr(SqliteEngine, "define", cut_define)
    return network


@pytest.fixture
def stage(tmp_path: Path, network: Network) -> Stage:
    return Stage(tmp_path, network)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with closing(Spool(tmp_path / "mail.spool", SpoolName(QUEUE, "memory://x", "mail"), PATIENCE_S)) as spool:
        yield spool


# -- the spool


@pytest.mark.rule("SK-4")
def test_entries_are_numbered_without_a_gap_and_no_number_is_used_twice(spool: Spool) -> None:
    assert spool.add([made(1), made(2)]) == range(1, 3)
    nothing = replace(made(4), task=replace(made(4).task, payload=None))  # type: ignore[arg-type]
    with pytest.raises(UnusableFolder):
        spool.add([made(3), nothing])
    assert spool.add([made(3)]) == range(3, 4), "what was rolled back takes no number"
    spool.forward(1, 3)
    assert spool.add([made(4)]) == range(4, 5), "what was deleted gives none back"
    assert [(each.number, each.enqueue) for each in spool.waiting()] == [(4, Enqueue(made(4).task, -1))]


@pytest.mark.rule("SK-4")
def test_an_entry_is_kept_as_it_was_enqueued(spool: Spool) -> None:
    task = Task(Head(task_id(1), QUEUE, "größe", 5, (task_id(2),), 7, 0.25), bytes(range(256)))
    written = Enqueue(task, -1, TaskState(due=1.7e9 + 0.125), waits_for_unknown=True)
    spool.add([written])
    (entry,) = spool.first(10)
    assert entry.enqueue == written
    assert entry.refusal is None


def test_of_large_entries_few_are_read_at_once(spool: Spool) -> None:
    large = replace(made(1), task=replace(made(1).task, payload=bytes(3 << 20)))
    spool.add([large] * 5)
    assert [each.number for each in spool.first(60)] == [1, 2]
    assert [each.number for each in spool.waiting()] == [1, 2, 3, 4, 5]


@pytest.mark.rule("SK-4")
def test_every_commit_of_a_spool_is_synced(spool: Spool) -> None:
    assert spool._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert spool._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.rule("SK-4")
def test_a_refused_entry_is_kept_for_an_operator(spool: Spool) -> None:
    spool.add([made(1), made(2)])
    spool.refuse(1, SpoolRefusal("TaskExists", "it is taken"))
    assert spool.first(1)[0].refusal == SpoolRefusal("TaskExists", "it is taken")
    assert spool.counts() == (2, 0)
    spool.keep(1)
    assert spool.counts() == (1, 1)
    (refused,) = spool.refused()
    assert (refused.head.id, refused.refusal) == (task_id(1), SpoolRefusal("TaskExists", "it is taken"))
    spool.forget(1)
    assert spool.counts() == (1, 0)


def test_a_spool_of_a_newer_version_and_no_spool_are_refused(tmp_path: Path, spool: Spool) -> None:
    spool._connection.execute("UPDATE spool SET version = 2")
    with pytest.raises(UnusableStore, match=r"version 2 .* knows 1"):
        Spool(spool.path, None, 1.0)
    with pytest.raises(UnusableFolder):
        Spool(tmp_path / "absent.spool", None, 1.0)
    with closing(sqlite3.connect(tmp_path / "theirs.spool")) as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(UnusableFolder, match="no spool"):
        Spool(tmp_path / "theirs.spool", SpoolName(QUEUE, "", ""), 1.0)
    (tmp_path / "text.spool").write_text("no database at all, but text that is long enough to be none")
    with pytest.raises(UnusableFolder, match="not a database"):
        Spool(tmp_path / "text.spool", None, 1.0)


def test_a_locked_spool_is_waited_for_and_then_refused(tmp_path: Path, spool: Spool) -> None:
    locked = pytest.raises(RegistryUnavailable, match="locked")
    with closing(Spool(spool.path, None, 0.05)) as hurried, spool._writing(), locked:
        hurried.add([made(1)])
    assert spool.counts() == (0, 0)


def test_engines_are_told_apart_by_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert engine_name(parse_url("sqlite:///mail.db")) == f"sqlite:///{tmp_path.resolve()}/mail.db"
    assert (
        engine_name(parse_url(f"sqlite:///{tmp_path}/mail.db")) == f"sqlite:///{tmp_path.resolve()}/mail.db"
    )
    first = engine_name(parse_url("etcd://me:secret@b:1,a:2/root"))
    assert first == engine_name(parse_url("etcd://you:another-secret@a:2,b:1/root/")) == "etcd://a:2,b:1/root"
    assert engine_name(parse_url("etcd+srv://me:secret@a.test/root")) == "etcd+srv://a.test:0/root"
    assert SpoolName.of("a/b", first).key != SpoolName.of("a-b", first).key


def test_an_id_that_says_where_its_task_is_is_an_id() -> None:
    spooled = Enqueued(task_id(1), EnqueueAnswer.SPOOLED)
    assert spooled == task_id(1)
    assert json.dumps([spooled, spooled.answer]) == json.dumps([task_id(1), "spooled"])
    again = pickle.loads(pickle.dumps(spooled))
    assert (again, again.answer) == (spooled, EnqueueAnswer.SPOOLED)
    assert Enqueued(task_id(2)).answer is EnqueueAnswer.COMMITTED


# -- forwarding


@pytest.mark.rule("SK-4")
def test_while_the_engine_answers_tasks_are_committed(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        tasks = [send.enqueue("a"), *send.options(delay_s=5).enqueue_many([(("b",), {}), (("c",), {})])]
        assert {each.answer for each in tasks} == {EnqueueAnswer.COMMITTED}
        assert stage.tasks() == sorted(tasks)
        assert queue.get(tasks[2]).state.due > 0
        assert [queue.get(each).partition for each in tasks] == [partition_of_id(each, 4) for each in tasks]
    stage.drained()


@pytest.mark.rule("SK-4")
def test_without_an_outbox_the_answer_is_always_committed(tmp_path: Path) -> None:
    with Queue(QUEUE, "memory://no-outbox", partitions=1, state_folder=tmp_path) as queue:
        (task,) = queue.commit([queue.build_raw_enqueue("send", b"{}", EnqueueOptions())])
        assert task.answer is EnqueueAnswer.COMMITTED


@pytest.mark.rule("SK-4")
def test_what_is_spooled_while_the_engine_is_away_is_forwarded_in_order(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        first = send.enqueue("before")
        stage.network.is_cut = True
        spooled = [send.enqueue("a")]
        spooled += [send.options(after=[spooled[-1]]).enqueue(str(number)) for number in range(5)]
        spooled += send.enqueue_many([(("x",), {})] * 100)
        assert {each.answer for each in spooled} == {EnqueueAnswer.SPOOLED}
        assert stage.tasks() == [first]
        assert stage.counts() == (106, 0)
        stage.network.is_cut = False
        stage.drained()
        assert stage.tasks() == sorted([first, *spooled])
        sent = [each.task.head.id for each in stage.network.asked if isinstance(each, Enqueue)]
        assert sent == [first, *spooled]
        assert send.enqueue("after").answer is EnqueueAnswer.COMMITTED


@pytest.mark.rule("SK-4")
def test_a_spooled_task_is_waited_for_before_the_engine_has_it(stage: Stage) -> None:
    """Who has just enqueued it was told that there is no such task."""
    queue, send = stage.open()
    with queue, ThreadPoolExecutor(1) as others:
        stage.network.is_cut = True
        task = send.enqueue("a")
        assert task.answer is EnqueueAnswer.SPOOLED
        with pytest.raises(
            NotSettled, match=f"^task {task} was not forwarded by its outbox within 0 s: see "
        ):
            queue.wait(task, 0.0)
        with pytest.raises(UnknownTask):
            queue.wait(str(task), 0.0)
        waited = others.submit(queue.wait, task, PATIENCE_S)
        wait_until(lambda: task in queue.notifier._listeners)
        assert not waited.done()
        stage.network.is_cut = False
        stage.drained()
        assert queue.run_until_idle() == 1
        assert waited.result(PATIENCE_S) is None


@pytest.mark.rule("SK-4")
def test_a_coroutine_waits_for_a_spooled_task_too(stage: Stage) -> None:
    async def awaited() -> None:
        url = f"sqlite:///{stage.file}"
        async with AsyncQueue(QUEUE, url, outbox=stage.outbox, state_folder=stage.folder) as queue:
            stage.network.is_cut = True
            task = await queue.task("send")(lambda claim: None).enqueue()  # type: ignore[misc]
            with pytest.raises(NotSettled, match="was not forwarded by its outbox within 0 s"):
                await queue.wait(task, 0.0)
            waited = asyncio.ensure_future(queue.wait(task, PATIENCE_S))
            stage.network.is_cut = False
            await asyncio.to_thread(stage.drained)
            assert await queue.run_until_idle() == 1
            assert await waited is None

    asyncio.run(awaited())


@pytest.mark.rule("SK-4", "SK-5")
def test_a_chain_is_spooled_whole_and_forwarded_in_its_order(stage: Stage) -> None:
    queue, _ = stage.open()
    with queue:

        @queue.task
        def fetch(claim: Claim, page: str) -> int:
            return len(page)

        @queue.task
        def double(claim: Claim, number: int) -> int:
            return 2 * number

        stage.network.is_cut = True
        first = fetch.call("abc")
        last = first.then(double).then(double).enqueue()
        assert last.answer is EnqueueAnswer.SPOOLED
        assert stage.counts() == (3, 0)
        stage.network.is_cut = False
        stage.drained()
        sent = [each.task.head.id for each in stage.network.asked if isinstance(each, Enqueue)]
        assert (sent[0], sent[2], len(sent)) == (first.id, last, 3)
        assert queue.run_until_idle() == 3
        assert queue.wait(last) == 12


@pytest.mark.rule("SK-4")
def test_a_queue_is_made_and_enqueued_to_while_the_engine_is_away(stage: Stage) -> None:
    stage.network.is_cut = True
    queue, send = stage.open()
    with queue:
        with pytest.raises(InvalidTask):
            send.enqueue(to=["no text"])
        task = send.enqueue("a")
        assert task.answer is EnqueueAnswer.SPOOLED
        with pytest.raises(RegistryUnavailable):
            queue.count()
    assert stage.counts() == (1, 0)
    again, send = stage.open()
    with again:
        second = send.enqueue("b")
        stage.network.is_cut = False
        stage.drained()
        assert stage.tasks() == [task, second]
        assert again.get(task).partition == partition_of_id(task, 4)
    assert stage.counts() == (0, 0)


def test_what_a_person_has_to_mend_is_not_put_off(stage: Stage) -> None:
    with pytest.raises(UnknownQueue):
        stage.open(create=False)
    assert not stage.outbox.exists()
    stage.outbox.write_text("a file")
    with pytest.raises(UnusableFolder, match="can't be made"):
        stage.open()


@pytest.mark.rule("SK-4")
def test_a_lost_answer_makes_no_task_twice(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        stage.network.loses_answers = 3
        task = send.enqueue("a")
        stage.drained()
        assert stage.tasks() == [task]
        assert sum(isinstance(each, Enqueue) for each in stage.network.asked) == 4


@pytest.mark.rule("SK-4")
def test_a_task_collected_before_its_producer_could_note_it_is_not_made_again(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        tasks = [send.enqueue("a"), send.enqueue("b")]
    with closing(stage.spool()) as spool:
        identity = spool.identity()
        spool._connection.execute("INSERT INTO entries VALUES (2, ?, ?, NULL, NULL)", _row(queue, tasks[1]))
    assert stage.complete_and_collect() == tasks
    again, send = stage.open()
    with again:
        third = send.enqueue("c")
        stage.drained()
        assert third.answer is EnqueueAnswer.COMMITTED
        assert stage.tasks() == [third]
    with closing(stage.spool()) as spool:
        assert spool.identity() == identity


def _row(queue: Queue, task: TaskId) -> tuple[str, bytes]:
    content = {
        "head": {"id": task, "queue": queue.name, "name": "send"},
        "state": {},
        "waits_for_unknown": False,
    }
    return json.dumps(content), b'{"to": "b"}'


@pytest.mark.rule("SK-4")
def test_who_enqueues_is_told_what_the_engine_refuses(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        task = send.enqueue("a")
        stage.network.limit_bytes = 1000
        with pytest.raises(TaskExists):
            send.options(task_id=str(task)).enqueue("other")
        with pytest.raises(UnknownTask):
            send.options(after=[ABSENT]).enqueue("a")
        with pytest.raises(RequestTooLarge):
            send.enqueue("x" * 2000)
        assert send.options(task_id=str(task)).enqueue("a").answer is EnqueueAnswer.COMMITTED
        waits = send.options(after=[ABSENT], waits_for_unknown=True).enqueue("a")
        with pytest.raises(InvalidTask, match="wait for itself"):
            send.options(task_id=ABSENT, after=[waits]).enqueue("a")
        last = send.enqueue("last")
        assert stage.tasks() == [task, waits, last]
    assert stage.counts() == (0, 0), "who was told need not be told again"


@pytest.mark.rule("SK-4", "SK-23")
def test_a_spooled_duplicate_makes_no_task_and_troubles_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    queue, send = stage.open()
    with queue, caplog.at_level(logging.WARNING, "rebalanser"):
        task = send.options(unique_key="k").enqueue("a")
        stage.network.is_cut = True
        caplog.clear()
        spooled = [send.options(unique_key="k").enqueue("b"), send.enqueue("c")]
        assert [each.answer for each in spooled] == [EnqueueAnswer.SPOOLED] * 2
        stage.network.is_cut = False
        stage.drained()
        assert stage.tasks() == [task, spooled[1]]
    assert "was refused" not in caplog.text
    assert stage.counts() == (0, 0)


@pytest.mark.rule("SK-4", "SK-23")
def test_what_comes_after_a_spooled_duplicate_comes_after_the_task_that_is_there(stage: Stage) -> None:
    queue, send = stage.open()

    @queue.task(name="join")
    def join(claim: Claim, first: str, rest: list[str]) -> None:
        """Never called."""

    with queue:
        task = send.options(unique_key="k").enqueue("a")
        stage.network.is_cut = True
        dropped, other = send.options(unique_key="k").enqueue("b"), send.enqueue("c")
        after = send.options(after=[dropped, task]).enqueue("after")
        unknown = send.options(after=[ABSENT, dropped], waits_for_unknown=True).enqueue("unknown")
        gets = join.enqueue(dropped.result, [other.result, dropped.result])
        assert gets.answer is EnqueueAnswer.SPOOLED
        stage.network.loses_answers = 2
        stage.network.is_cut = False
        stage.drained()
        assert stage.tasks() == [task, other, after, unknown, gets]
        assert queue.get(after).head.after == (task,)
        assert queue.get(unknown).head.after == (ABSENT, task)
        assert queue.get(gets).head.after == (task, other)
        assert sources_in(queue.payload(gets)) == {"first": task, "rest": (other, task)}
    assert stage.counts() == (0, 0)


@pytest.mark.rule("SK-4", "SK-23")
def test_a_duplicate_that_another_process_forwarded_is_told(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        task = send.options(unique_key="k").enqueue("a")
    with closing(stage.spool()) as spool:
        numbers = spool.add([made(number) for number in range(7, 9)])
        waiting = WaitingCallers(spool)
        (future,) = waiting.enter(numbers[:1])
        for number in numbers:
            spool.refuse(number, SpoolRefusal(DUPLICATE, task))
            spool.keep(number)
        assert (list(spool.refused()), spool.counts()) == ([], (0, 0))
        waiting.look()
        assert future.result(0) == Duplicate(task)
        assert spool.refusal(numbers[0]) is None
        (last,) = spool.add([made(9)] * (KEPT_DUPLICATES - 1))[-1:]
        spool.refuse(last, SpoolRefusal(DUPLICATE, task))
        spool.keep(last)
        assert spool.refusal(numbers[1]) is not None
        (more,) = spool.add([made(9)])
        spool.refuse(more, SpoolRefusal(DUPLICATE, task))
        spool.keep(more)
        assert spool.refusal(numbers[1]) is None, "it was kept for long enough"
        assert spool.refusal(last) is not None


@pytest.mark.rule("SK-4", "SK-15")
def test_a_forwarder_that_fails_is_a_trouble_until_it_works_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by an error that nobody foresaw: what waits on the disk must not wait in silence."""
    forward = Forwarding.forward

    def broken(_forwarding: Forwarding) -> bool:
        raise ZeroDivisionError("what nobody foresaw")

    queue, send = stage.open()
    with queue:
        monkeypatch.setattr(Forwarding, "forward", broken)
        assert send.enqueue("a").answer is EnqueueAnswer.SPOOLED
        (trouble,) = queue.troubles
        assert (trouble.loop, trouble.kind) == ("outbox", ErrorKind.BUG)
        monkeypatch.setattr(Forwarding, "forward", forward)
        stage.drained()
        assert wait_until(lambda: queue.troubles == ())
        assert send.enqueue("b").answer is EnqueueAnswer.COMMITTED


@pytest.mark.rule("SK-4")
def test_what_is_refused_later_is_kept_told_and_does_not_stop_the_others(
    stage: Stage, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, send = stage.open()
    with queue, caplog.at_level(logging.INFO, "rebalanser"):
        task = send.enqueue("a")
        stage.network.is_cut = True
        stage.network.limit_bytes = 1000
        spooled = [
            send.enqueue("first"),
            send.options(task_id=str(task)).enqueue("other"),
            send.options(after=[ABSENT]).enqueue("a"),
            send.enqueue("x" * 2000),
            send.options(task_id=str(task)).enqueue("a"),
            send.enqueue("last"),
        ]
        assert [each.loop for each in queue.troubles] == ["outbox"]
        stage.network.is_cut = False
        stage.drained()
        assert stage.tasks() == sorted([task, spooled[0], spooled[5]])
    assert queue.troubles == ()
    assert [each.action for each in caplog.records if each.levelno == logging.WARNING] == [  # type: ignore[attr-defined]
        "tasks_engine_away", "task_refused", "task_refused", "task_refused",
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["tasks", "outbox", str(stage.outbox), "--json"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["id"], each["kind"]) for each in documents[:-1]] == [
        (spooled[1], "TaskExists"), (spooled[2], "UnknownTask"), (spooled[3], "RequestTooLarge"),
    ]  # fmt: skip
    assert documents[0]["payload"] == {"value": {"to": "other"}, "base64": None}
    assert documents[-1]["refused"] == 3
    assert main(["tasks", "outbox", str(stage.outbox), "--forget-refused"]) == 0
    assert "UnknownTask: task" in capsys.readouterr().out
    assert stage.counts() == (0, 0)


@pytest.mark.rule("SK-4")
@pytest.mark.parametrize("is_counted", [False, True])
def test_a_refusal_is_not_lost_when_the_producer_dies_in_its_middle(stage: Stage, is_counted: bool) -> None:
    queue, send = stage.open()
    with queue:
        task = send.enqueue("a")
    with closing(stage.spool()) as spool:
        (number,) = spool.add([made(7)])
        spool.refuse(number, SpoolRefusal("TaskExists", "it is taken"))
        outbox, _ = spool.identity()
    if is_counted:
        with closing(SqliteEngine(stage.file)) as engine:
            engine.apply([Skip(QUEUE, Forwarded(outbox, 2))], PATIENCE_S)
    again, send = stage.open()
    with again:
        last = send.enqueue("b")
        assert last.answer is EnqueueAnswer.COMMITTED
    assert stage.tasks() == [task, last]
    assert stage.counts() == (0, 1)


@pytest.mark.rule("SK-4")
def test_an_engine_that_has_lost_what_it_had_taken_takes_the_rest(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    queue, send = stage.open()
    with queue:
        send.enqueue_many([(("a",), {})] * 3)
    for path in stage.folder.glob("mail.db*"):
        path.unlink()
    again, send = stage.open()
    with again, caplog.at_level(logging.WARNING, "rebalanser"):
        tasks = [send.enqueue("b"), send.enqueue("c")]
        assert stage.tasks() == tasks
    assert [each.action for each in caplog.records] == ["outbox_renewed"]  # type: ignore[attr-defined]


@pytest.mark.rule("SK-4")
def test_two_processes_forward_one_spool_one_at_a_time(stage: Stage) -> None:
    one, send_one = stage.open()
    two, send_two = stage.open()
    with one, two:
        threads = [
            threading.Thread(target=lambda send=send: [send.enqueue("a") for _ in range(20)])
            for send in (send_one, send_two, send_one)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        stage.drained()
        assert len(stage.tasks()) == 60
        asked = [each.forwarded for each in stage.network.asked if isinstance(each, Enqueue)]
        numbers = [entry.number for entry in asked if entry is not None]
        assert numbers == list(range(1, 61)), "in their order, and none of them twice"


@pytest.mark.rule("SK-4")
def test_while_another_process_forwards_nobody_waits_for_ever(stage: Stage) -> None:
    queue, send = stage.open()
    with queue:
        first = send.enqueue("a")
    (path,) = stage.outbox.glob("*.lock")
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        queue, send = stage.open(timeout_s=0.2)
        task = send.enqueue("a")
        assert task.answer is EnqueueAnswer.SPOOLED
        assert stage.counts() == (1, 0)
        fcntl.flock(held, fcntl.LOCK_UN)
    with queue:
        stage.drained()
        assert stage.tasks() == [first, task]


@pytest.mark.rule("SK-4")
def test_who_waits_for_another_process_hears_what_that_one_found(stage: Stage) -> None:
    queue, _ = stage.open()
    with queue:
        outbox = queue._outbox
        assert outbox is not None
        waiting = outbox._waiting
        with closing(stage.spool()) as spool:
            numbers = spool.add([made(1), made(2), made(3)])
            spool.refuse(numbers[1], SpoolRefusal("UnknownTask", "it is not there"))
            spool.keep(numbers[1])
            spool.forward(numbers[0], numbers[0])
            futures = waiting.enter(numbers)
            waiting.look()
            assert futures[0].result(0) is EnqueueAnswer.COMMITTED
            assert isinstance(futures[1].exception(0), UnknownTask)
            assert spool.counts()[1] == 0
    assert futures[2].result(0) in EnqueueAnswer


def test_a_closed_queue_takes_nothing(stage: Stage) -> None:
    queue, send = stage.open()
    queue.close()
    queue.close()
    with pytest.raises(InvalidState):
        send.enqueue("a")
    assert stage.counts() == (0, 0)


@pytest.mark.rule("SK-4")
@pytest.mark.usefixtures("open_umask")
def test_what_is_spooled_is_for_its_user_alone(tmp_path: Path, stage: Stage) -> None:
    stage.outbox = tmp_path / "new" / "outbox"
    queue, send = stage.open()
    stage.network.is_cut = True
    with queue:
        send.enqueue("a")
        made = [stage.outbox.parent, stage.outbox, *stage.outbox.iterdir()]
        modes = {file.suffix or file.name: stat.S_IMODE(file.stat().st_mode) for file in made}
    assert modes == {
        "new": 0o700, "outbox": 0o700,
        ".spool": 0o600, ".spool-wal": 0o600, ".spool-shm": 0o600, ".lock": 0o600,
    }  # fmt: skip


@pytest.mark.usefixtures("permissions_count")
def test_a_folder_that_cannot_be_written_is_said(stage: Stage) -> None:
    stage.outbox.mkdir(mode=0o500)
    with pytest.raises(UnusableFolder):
        stage.open()


# -- the command line


@pytest.mark.rule("SK-4")
def test_the_command_enqueues_by_way_of_an_outbox(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(stage.folder / "state"))
    place = ["--registry", f"sqlite:///{stage.file}", "--outbox", str(stage.outbox)]
    assert main(["tasks", "outbox", str(stage.outbox)]) != 0
    assert main(["tasks", "enqueue", QUEUE, "send", "{}", "--create", *place, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["answer"] == "committed"
    stage.network.is_cut = True
    assert main(["tasks", "enqueue", QUEUE, "send", "{}", "--create", *place]) == 0
    second, answer = capsys.readouterr().out.split()
    assert answer == "spooled"
    assert main(["tasks", "outbox", str(stage.outbox)]) == 0
    told = capsys.readouterr().out
    assert f"{second} send: spooled" in told
    assert "1 task waits, 0 were refused" in told
    stage.network.is_cut = False
    assert main(["tasks", "enqueue", QUEUE, "send", "{}", *place]) == 0
    third, answer = capsys.readouterr().out.split()
    assert answer == "committed"
    assert stage.tasks() == [first["id"], second, third]
    assert main(["tasks", "check", QUEUE, "--registry", f"sqlite:///{stage.file}"]) == 0
    assert "3 tasks: 0 findings" in capsys.readouterr().out
