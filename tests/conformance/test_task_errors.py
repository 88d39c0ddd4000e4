"""Errors of bodies, hooks and the store: what was waiting is done, without a restart."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from rebalanser import Settings
from rebalanser.core.group import Fact, FactKind
from rebalanser.core.tasks import rules
from rebalanser.core.tasks.failures import ErrorKind, kind_of
from rebalanser.core.tasks.ids import partition_of_id
from rebalanser.core.tasks.model import OPEN, Head, Stored, TaskId, TaskState
from rebalanser.core.tasks.store import (
    Answer,
    Applied,
    ClaimAnswer,
    ClaimQuery,
    Enqueue,
    Move,
    OwnerEpoch,
    TakeOver,
    Write,
)
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import (
    InternalError,
    InvalidArgument,
    NotSettled,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RequestTooLarge,
    TaskFailed,
    UnusableStore,
)
from rebalanser.tasks import Claim, Middleware, Queue, Retry, Status
from rebalanser.tasks.batcher import result_of
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import ClaimsFromIndex
from rebalanser.tasks.execution.bodies import Bodies
from rebalanser.tasks.execution.worker import FIRST_THREADS
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from rebalanser_sqlite.tasks import claims
from rebalanser_sqlite.tasks.rows import Row, stored_of

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)
GOOD = 20
TIMEOUT_S = 2.0
"""Seconds of one call to the engine: enough for a thousand tasks on a busy machine."""


def rate(currency: str) -> str:
    """A validator that raises what is not its kind of error."""
    return {"EUR": "1"}[currency]


class Silent(Exception):
    """An error that can't be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


class Rude(BaseException):
    """What ends a thread that is not prepared for it."""


def nested(levels: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def too_large_a_result(claim: Claim) -> str:
    return "x" * (5 << 20)


def too_large_an_update(claim: Claim) -> None:
    claim.update(b"x" * (5 << 20))


def update_of_a_wrong_type(claim: Claim) -> None:
    claim.update({"progress": 50})  # type: ignore[arg-type]


def update_of_text(claim: Claim) -> None:
    claim.update("half")  # type: ignore[arg-type]


def no_number(claim: Claim) -> float:
    return math.nan


def no_number_within(claim: Claim) -> dict[str, list[float]]:
    return {"NaN": [1.0, -math.inf]}


def no_json(claim: Claim) -> object:
    return object()


def too_deep(claim: Claim) -> Any:
    return nested(100_000)


def half_a_pair(claim: Claim) -> str:
    return "\ud800"


def half_a_pair_in_an_error(claim: Claim) -> None:
    raise ValueError("no such file: " + os.fsdecode(b"\xff"))


def no_delay(claim: Claim) -> None:
    raise Retry("later", delay_s=math.nan)


def delay_of_a_wrong_type(claim: Claim) -> None:
    raise Retry("later", delay_s="5")  # type: ignore[arg-type]


def silent(claim: Claim) -> None:
    raise Silent


def rude(claim: Claim) -> None:
    raise Rude


def exiting(claim: Claim) -> None:
    raise SystemExit(3)


def interrupted(claim: Claim) -> None:
    raise KeyboardInterrupt


def strange_argument(claim: Claim, currency: Annotated[str, AfterValidator(rate)]) -> None:
    raise AssertionError("its argument is refused")


A_CLAIM = Move("", "work", 0, 0, TaskState(Status.CLAIMED), OwnerEpoch(0, 0))
"""Stands for the claims that an engine makes itself."""
BAD: dict[Callable[..., Any], str] = {
    too_large_a_result: "a result has 5242882 bytes; the limit is",
    too_large_an_update: "an update has 5242880 bytes; the limit is",
    update_of_a_wrong_type: "an update is of type dict; it must be bytes",
    update_of_text: "an update is of type str; it must be bytes",
    no_number: "the result is not JSON",
    no_number_within: "the result is not JSON",
    no_json: "the result is not JSON",
    too_deep: "the result is not JSON",
    half_a_pair: "the result is not JSON",
    half_a_pair_in_an_error: r"no such file: \udcff",
    no_delay: "delay_s is nan; it must be a number of seconds",
    delay_of_a_wrong_type: "delay_s is '5'; it must be a number of seconds",
    silent: "Silent",
    rude: "Rude",
    exiting: "SystemExit: 3",
    interrupted: "KeyboardInterrupt",
    strange_argument: "KeyError: 'CHF'",
}
"""Bodies that fail, and what is kept of that."""


class Stage:
    """A queue whose engine raises what a test wants."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.queue = self.another()
        self.good = self.queue.task(retries=0)(good)
        engine = self.queue.context.engine
        self._apply = engine.apply
        engine.apply = self._applied  # type: ignore[method-assign]
        self.claims_from_index = isinstance(engine, ClaimsFromIndex)
        if isinstance(engine, ClaimsFromIndex):
            self._claim = engine.claim
            engine.claim = self._claimed  # type: ignore[method-assign]
        self.without_payloads: Callable[[TaskId], bool] = lambda _: False
        """Whether the payload of a task does not come with its claim."""
        self.refuses: Callable[[Sequence[Write]], Exception | None] = lambda _: None
        """The error that is raised instead of writing these."""
        self.loses: Callable[[Sequence[Write]], Exception | None] = lambda _: None
        """The error that is raised after these were written."""

    def another(self, **options: Any) -> Queue:
        return Queue(
            "work",
            self.url,
            partitions=2,
            settings=QUICK,
            state_folder=self.folder,
            timeout_s=TIMEOUT_S,
            **options,
        )

    def _applied(self, writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        if (error := self.refuses(writes)) is not None:
            raise error
        answers = [
            replace(answer, payload=None)
            if isinstance(write, Move) and isinstance(answer, Applied) and self.without_payloads(write.id)
            else answer
            for write, answer in zip(writes, self._apply(writes, timeout_s), strict=True)
        ]
        if (error := self.loses(writes)) is not None:
            raise error
        return answers

    def _claimed(self, request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
        if (error := self.refuses([A_CLAIM])) is not None:
            raise error
        answer = self._claim(request, timeout_s)
        claimed = [
            (stored, None if self.without_payloads(stored.head.id) else payload)
            for stored, payload in answer.claimed
        ]
        return replace(answer, claimed=claimed)

    def enqueue(self, count: int = GOOD) -> list[TaskId]:
        return list(self.good.enqueue_many([((number,), {}) for number in range(count)]))

    def see_done(self, tasks: Sequence[TaskId]) -> None:
        """Wait until tasks are complete, each with its own result."""
        assert [self.queue.wait(task, PATIENCE_S) for task in tasks] == list(range(len(tasks)))


def good(claim: Claim, number: int) -> int:
    return number


def is_claim(write: Write) -> bool:
    return isinstance(write, Move) and write.state.status is Status.CLAIMED and write.epoch is not None


def is_completion(write: Write) -> bool:
    return isinstance(write, Move) and write.state.status is Status.COMPLETED


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    places = {"memory": f"memory://{uuid.uuid4().hex}", "sqlite": f"sqlite:///{tmp_path / 'tasks.db'}"}
    url = places.get(request.param) or f"{request.getfixturevalue('etcd_url')}/{uuid.uuid4().hex}"
    stage = Stage(url, tmp_path)
    with stage.queue:
        yield stage


def closed(queue: Queue, task: TaskId) -> tuple[Status, str]:
    """How a task ended, once it has."""
    changed = threading.Event()
    queue.notifier.listen(task, changed.set)
    try:
        while (state := queue.get(task).state).status in (Status.WAITING, Status.CLAIMED):
            assert changed.wait(PATIENCE_S)
            changed.clear()
    finally:
        queue.notifier.leave(task, changed.set)
    return state.status, state.error


@pytest.mark.rule("SK-15")
def test_a_bad_task_ends_its_own_try_and_nothing_else(stage: Stage) -> None:
    queue = stage.queue
    bad = {queue.task(retries=0)(function).name: told for function, told in BAD.items()}
    arguments = {"strange_argument": b'{"currency": "CHF"}'}
    before = stage.enqueue()
    made = [
        queue.build_raw_enqueue(name, arguments.get(name, b"{}"), EnqueueOptions(), retries=0) for name in bad
    ]
    tasks = queue.commit(made)
    after = stage.enqueue()
    queue.start(concurrency=4)
    stage.see_done(before)
    stage.see_done(after)
    for task, (name, told) in zip(tasks, bad.items(), strict=True):
        status, error = closed(queue, task)
        assert (status, name) == (Status.DEAD, name)
        assert told in error, name
    stage.see_done(stage.enqueue())
    assert queue.troubles == ()


@pytest.mark.rule("SK-21")
def test_a_task_that_an_older_worker_can_not_read_waits_for_a_newer_one(stage: Stage) -> None:
    old = stage.queue

    @old.task("send", retries=0, backoff_s=0.01, max_backoff_s=0.02)
    def send_older(claim: Claim, to: str) -> str:
        return to

    with stage.another() as new:

        @new.task("send", retries=0)
        def send_newer(claim: Claim, to: str, cc: str = "nobody") -> str:
            return f"{to} {cc}"

        @new.task
        def unknown_before(claim: Claim) -> None: ...

        changed = threading.Event()
        unknown = unknown_before.enqueue()
        both, without = send_newer.enqueue("a", cc="b"), send_newer.enqueue("a")
        old.notifier.listen(both, changed.set)
        old.start()
        assert old.wait(without, PATIENCE_S) == "a", "it has no argument that the older one does not know"
        while (claim := (state := old.get(both).state).claim) is None or claim.number < 3:
            assert changed.wait(PATIENCE_S)
            changed.clear()
        assert (state.failures, state.status in OPEN) == (0, True)
        assert [each.loop for each in old.troubles] == ["task send"]
        assert old.get(unknown).state.claim is None, "a function that is not there is not tried"
        old.notifier.leave(both, changed.set)
        old.stop()
        new.start()
        assert new.wait(both, PATIENCE_S) == "a b"
        assert new.wait(unknown, PATIENCE_S) is None


class Raising(Middleware):
    """Hooks that all raise."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def enqueued(self, head: Head) -> None:
        if isinstance(self._error, Exception):
            raise self._error

    def before(self, claim: Claim) -> None:
        raise self._error

    def after(self, claim: Claim, error: BaseException | None) -> None:
        raise self._error

    def failed(self, claim: Claim, error: BaseException, *, is_dead: bool) -> None:
        raise self._error


class Reporter(Middleware):
    """Keeps the failures that it is told of, once it may return."""

    def __init__(self) -> None:
        self.told: list[tuple[TaskId, int, str, bool]] = []
        self.may_return = threading.Event()

    def failed(self, claim: Claim, error: BaseException, *, is_dead: bool) -> None:
        self.may_return.wait(PATIENCE_S)
        self.told.append((claim.task_id, claim.failures, str(error), is_dead))


@pytest.mark.rule("SK-15")
def test_each_failure_is_reported_once_with_its_try_and_whether_it_was_the_last(tmp_path: Path) -> None:
    """Though another hook raises; and a hook that does not return holds up no task."""
    stage = Stage(f"memory://{uuid.uuid4().hex}", tmp_path)
    reporter = Reporter()
    with stage.another(middleware=[Raising(Rude()), reporter]) as queue:

        @queue.task(retries=1, backoff_s=0.001)
        def fail(claim: Claim, why: str) -> None:
            if why:
                raise ValueError(f"{why} {claim.failures}")

        @queue.task(retries=0, timeout_s=0.01)
        def linger(claim: Claim) -> None:
            claim.stop_requested.wait(PATIENCE_S)

        queue.start(concurrency=2)
        bad, late = fail.enqueue("bad"), linger.enqueue()
        for task in (bad, late):
            with pytest.raises(TaskFailed):
                queue.wait(task, PATIENCE_S)
        assert queue.wait(fail.enqueue(""), PATIENCE_S) is None
        assert reporter.told == [], "the hook has not returned"
        reporter.may_return.set()
        queue.stop()
        assert sorted(reporter.told) == sorted(
            [
                (bad, 0, "bad 0", False),
                (bad, 1, "bad 1", True),
                (late, 0, "the body took longer than timeout_s 0.01", True),
            ]
        )
    stage.queue.close()


@pytest.mark.rule("SK-15")
@pytest.mark.parametrize("error", [ConnectionError("statsd is down"), Rude()], ids=["error", "rude"])
def test_what_a_hook_raises_is_logged_and_ignored(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(f"memory://{uuid.uuid4().hex}", tmp_path)
    with stage.another(middleware=[Raising(error)]) as queue:
        body = queue.task(retries=0)(good)
        queue.start(concurrency=2)
        tasks = body.enqueue_many([((number,), {}) for number in range(GOOD)])
        assert [queue.wait(task, PATIENCE_S) for task in tasks] == list(range(GOOD))
        assert queue.troubles == ()
    told = [each.getMessage() for each in caplog.records if "an error is ignored" in each.getMessage()]
    assert len(told) == (3 if isinstance(error, Exception) else 2), "once for each hook, not for each task"
    stage.queue.close()


@pytest.mark.rule("SK-5", "SK-15")
@pytest.mark.parametrize(
    "error",
    [RequestTooLarge("over the limit"), QuotaExceeded("full"), InternalError("refused"), KeyError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_after_an_engine_has_refused_claims_for_a_while_all_tasks_are_claimed(
    stage: Stage, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a thousand: one whose claim was left half made would never be offered again."""
    monkeypatch.setattr("rebalanser.core.tasks.claims.ASIDE_S", 0.01)
    refused = threading.Event()
    left = [error] * 5

    def refuses(writes: Sequence[Write]) -> Exception | None:
        if any(map(is_claim, writes)) and left:
            return left.pop()
        if any(map(is_claim, writes)):
            refused.set()
        return None

    stage.refuses = refuses
    tasks = stage.enqueue(1000)
    stage.queue.start(concurrency=4)
    assert refused.wait(PATIENCE_S)
    stage.see_done(tasks)


@pytest.mark.rule("SK-13", "SK-15")
@pytest.mark.parametrize("error", [QuotaExceeded("full"), KeyError("a bug")], ids=["outage", "bug"])
def test_a_partition_that_can_not_be_taken_over_is_a_trouble_until_one_is(
    stage: Stage, error: Exception
) -> None:
    if stage.claims_from_index:
        pytest.skip("nobody owns a partition of this engine")
    stage.refuses = lambda writes: error if any(isinstance(each, TakeOver) for each in writes) else None
    (task,) = stage.enqueue(1)
    stage.queue.start()
    trouble = wait_until(lambda: [each for each in stage.queue.troubles if each.loop == "take-over"])
    assert trouble[0].kind is kind_of(error)
    stage.refuses = lambda _: None
    assert stage.queue.wait(task, PATIENCE_S) == 0
    wait_until(lambda: stage.queue.troubles == ())


@pytest.mark.rule("SK-15", "SK-16")
def test_a_claim_that_failed_for_a_client_is_a_trouble_until_the_store_is_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no client asks again."""
    is_away = threading.Event()

    def cut(request: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any, **named: Any) -> Any:
            if is_away.is_set():
                raise RegistryUnavailable("away")
            return request(*arguments, **named)

        return asked

    dispenser = Dispenser(stage.queue.context)
    source = stage.queue.start_claim_source(dispenser.wake)
    monkeypatch.setattr(source, "claim", cut(source.claim))
    monkeypatch.setattr(stage.queue.context.engine, "queues", cut(stage.queue.context.engine.queues))
    dispenser.start(source)
    try:
        is_away.set()
        assert isinstance(
            dispenser.request("client", 1, 0.0).future.exception(PATIENCE_S), RegistryUnavailable
        )
        assert ("claims", ErrorKind.OUTAGE) in [(each.loop, each.kind) for each in stage.queue.troubles]
        wait_until(lambda: any(each.attempts > 1 for each in stage.queue.troubles))
        is_away.clear()
        wait_until(lambda: stage.queue.troubles == ())
    finally:
        dispenser.stop()


@pytest.mark.rule("SK-5", "SK-15")
@pytest.mark.parametrize("error", [RequestTooLarge("too large"), KeyError("a bug")], ids=["poison", "bug"])
def test_a_task_that_can_not_be_claimed_keeps_no_other_from_being(
    stage: Stage, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    (poison,) = stage.enqueue(1)
    tried: list[TaskId] = []

    def refuses(writes: Sequence[Write]) -> Exception | None:
        if not any(isinstance(each, Move) and each.id == poison for each in writes):
            return None
        if len(writes) == 1:
            tried.append(poison)
        return error

    def unreadable(queue: str, row: Row) -> Stored:
        if row[0].hex() == poison:
            tried.append(poison)
            raise error
        return stored_of(queue, row)

    stage.refuses = refuses
    if stage.claims_from_index:
        monkeypatch.setattr(claims, "stored_of", unreadable)
    tasks = stage.enqueue()
    stage.queue.start(concurrency=4)
    stage.see_done(tasks)
    assert tried
    more: list[int] = []
    for _ in range(3):  # a node that a busy machine cost its lease tries once more
        before = len(tried)
        stage.see_done(stage.enqueue())
        more.append(len(tried) - before)
    assert stage.queue.get(poison).state.status is Status.WAITING
    assert 0 in more, "it is left aside, not tried with each claim"


@pytest.mark.rule("SK-10", "SK-15", "SK-17")
@pytest.mark.parametrize(
    "error",
    [RegistryUnavailable("away"), QuotaExceeded("full"), UnusableStore("read-only"), OutcomeUnknown("lost")],
    ids=lambda error: type(error).__name__,
)
def test_a_result_is_kept_while_the_store_takes_nothing(stage: Stage, error: Exception) -> None:
    ran: list[int] = []
    away = threading.Event()

    @stage.queue.task(retries=0)
    def charge(claim: Claim) -> str:
        ran.append(claim.failures)
        away.set()
        return "charged"

    def refuses(_: Sequence[Write]) -> Exception | None:
        is_kept = any(each.loop == "writer" for each in stage.queue.troubles)
        return error if away.is_set() and not is_kept else None

    stage.refuses = refuses
    task = charge.enqueue()
    stage.queue.start(concurrency=1)
    assert stage.queue.wait(task, PATIENCE_S) == "charged"
    assert ran == [0]
    assert stage.queue.get(task).state.failures == 0


@pytest.mark.rule("SK-10", "SK-15")
def test_a_completion_whose_answers_are_lost_counts_once(stage: Stage) -> None:
    left = [OutcomeUnknown("lost")]
    stage.loses = lambda writes: left.pop() if left and any(map(is_completion, writes)) else None
    tasks = stage.enqueue(3)
    stage.queue.start(concurrency=1)
    stage.see_done(tasks)
    assert not left


@pytest.mark.rule("SK-10", "SK-15")
@pytest.mark.parametrize(
    "error", [RequestTooLarge("over the limit"), KeyError("a bug")], ids=["poison", "bug"]
)
def test_a_task_whose_completion_the_store_can_not_take_has_failed(stage: Stage, error: Exception) -> None:
    """It is told with its reason at once, and its body does not run again and again."""
    (bad,) = stage.enqueue(1)
    stage.refuses = lambda writes: error if any(is_completion(w) and w.id == bad for w in writes) else None  # type: ignore[union-attr]
    tasks = stage.enqueue()
    stage.queue.start(concurrency=4)
    stage.see_done(tasks)
    status, told = closed(stage.queue, bad)
    assert status is Status.DEAD
    assert str(error) in told


@pytest.mark.rule("SK-10")
def test_a_result_is_checked_before_it_is_in_a_transaction(tmp_path: Path) -> None:
    path = tmp_path / "tasks.db"
    stage = Stage(f"sqlite:///{path}", tmp_path)

    @stage.queue.task(retries=0)
    def write(claim: Claim) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(RequestTooLarge):
                claim.complete_in(connection, b"x" * (5 << 20))
            with pytest.raises(InvalidArgument):
                claim.complete_in(connection, "text")  # type: ignore[arg-type]
            claim.complete_in(connection, b'"both"')
            connection.execute("COMMIT")

    with stage.queue as queue:
        task = write.enqueue()
        queue.start()
        assert queue.wait(task, PATIENCE_S) == "both"


@pytest.mark.rule("SK-3", "SK-15")
@pytest.mark.parametrize(
    "error",
    [RequestTooLarge("over the limit"), QuotaExceeded("full")],
    ids=lambda error: type(error).__name__,
)
def test_who_enqueues_is_told_and_the_worker_goes_on(stage: Stage, error: Exception) -> None:
    stage.queue.start(concurrency=2)
    stage.refuses = lambda writes: error if any(isinstance(each, Enqueue) for each in writes) else None
    with pytest.raises(type(error)):
        stage.enqueue(1)
    stage.refuses = lambda _: None
    stage.see_done(stage.enqueue())
    assert stage.queue.troubles == ()


@pytest.mark.rule("SK-15")
def test_a_fault_of_the_worker_itself_ends_one_try(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    (bad,) = stage.enqueue(1)
    work = Bodies.work

    def broken(self: Bodies, claim: WorkerClaim, head: Head, payload: bytes) -> Any:
        if claim.task_id == bad:
            raise Rude
        return work(self, claim, head, payload)

    monkeypatch.setattr(Bodies, "work", broken)
    tasks = stage.enqueue()
    stage.queue.start(concurrency=1)
    stage.see_done(tasks)
    status, told = closed(stage.queue, bad)
    assert (status, told.splitlines()[-1].rpartition(".")[2]) == (Status.DEAD, "Rude")


@pytest.mark.rule("SK-15")
def test_a_task_without_a_payload_fails_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    (bad,) = stage.enqueue(1)
    engine = stage.queue.context.engine
    payloads = engine.payloads

    def without(queue: str, ids: Sequence[TaskId], timeout_s: float) -> Mapping[TaskId, bytes]:
        return payloads(queue, [task for task in ids if task != bad], timeout_s)

    monkeypatch.setattr(engine, "payloads", without)
    stage.without_payloads = lambda task: task == bad
    tasks = stage.enqueue()
    stage.queue.start(concurrency=4)
    stage.see_done(tasks)
    status, told = closed(stage.queue, bad)
    assert status is Status.DEAD
    assert "payload is not in the store" in told


@pytest.mark.rule("SK-5", "SK-15")
@pytest.mark.parametrize(
    "error",
    [RegistryUnavailable("away"), UnusableStore("can't be read"), KeyError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_while_payloads_can_not_be_read_claims_are_given_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    left = [error] * 6
    engine = stage.queue.context.engine
    payloads = engine.payloads

    def failing(queue: str, ids: Sequence[TaskId], timeout_s: float) -> Mapping[TaskId, bytes]:
        if left:
            raise left.pop()
        return payloads(queue, ids, timeout_s)

    monkeypatch.setattr(engine, "payloads", failing)
    stage.without_payloads = lambda _: True
    tasks = stage.enqueue()
    stage.queue.start(concurrency=4)
    stage.see_done(tasks)
    assert {each.state.failures for each in stage.queue.tasks()} == {0}


@pytest.mark.rule("SK-17")
def test_a_group_that_has_failed_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its group a worker owns nothing, and nobody else what it owned, while it looks alive."""
    ended: list[Queue] = []
    monkeypatch.setattr(Queue, "_end_process", lambda queue: ended.append(queue))
    stage = Stage(f"memory://{uuid.uuid4().hex}", tmp_path)
    with stage.queue as queue:
        for _ in range(2):
            queue._on_fact(Fact(FactKind.ENGINE_FAILED, "n", 1, 1, detail={"error": "KeyError: 1"}))
        queue._on_fact(Fact(FactKind.ISOLATED, "n", 1, 1))
        assert ended == [queue]


@pytest.mark.rule("SK-7", "SK-10")
def test_a_body_hears_at_once_that_its_task_was_cancelled_elsewhere(stage: Stage) -> None:
    """Long before its next renewal: the claim lasts for an hour."""
    with stage.another(claim_ttl_s=3600.0) as worker, stage.another() as operator:
        began, told = threading.Event(), threading.Event()

        @worker.task(retries=0)
        def long(claim: Claim) -> None:
            began.set()
            if claim.stop_requested.wait(PATIENCE_S) and not claim.still_mine():
                told.set()

        worker.start()
        task = long.enqueue()
        assert began.wait(PATIENCE_S)
        assert operator.cancel(task) is Status.CANCELLED
        assert told.wait(PATIENCE_S)


@pytest.mark.rule("SK-7", "SK-8")
def test_a_body_is_asked_to_stop_though_calls_to_the_store_do_not_return(stage: Stage) -> None:
    with stage.another(claim_ttl_s=2.0) as queue:
        began, goes_on = threading.Event(), threading.Event()
        engine = queue.context.engine
        apply = engine.apply

        @queue.task(retries=0)
        def long(claim: Claim) -> bool:
            began.set()
            stopped = claim.stop_requested.wait(PATIENCE_S)
            goes_on.set()
            return stopped

        def stuck(writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
            if began.is_set():
                goes_on.wait(PATIENCE_S)
            return apply(writes, timeout_s)

        engine.apply = stuck  # type: ignore[method-assign]
        task = long.enqueue()
        queue.start()
        assert queue.wait(task, PATIENCE_S) is True


@pytest.mark.rule("SK-9", "SK-12")
def test_a_body_reads_all_that_was_written_before_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the oldest part, from which it would take a checkpoint for the last one."""
    monkeypatch.setattr(Context.updates, "__defaults__", (None, 0, 2))

    @stage.queue.task(retries=1, backoff_s=0.001)
    def steps(claim: Claim) -> list[str]:
        for number in range(5):
            claim.update(b"%d.%d" % (claim.failures, number))
        if claim.failures == 0:
            raise Retry(delay_s=0.0)
        return [each.content.decode() for each in claim.log()]

    task = steps.enqueue()
    stage.queue.start()
    expected = [f"{failures}.{number}" for failures in range(2) for number in range(5)]
    assert stage.queue.wait(task, PATIENCE_S) == expected
    assert [each.content.decode() for each in stage.queue.log(task)] == expected


@pytest.mark.rule("SK-15")
def test_a_task_that_is_due_in_the_far_future_stops_no_worker(stage: Stage) -> None:
    """As an earlier version took it: no thread can wait for so long."""
    made = stage.queue.build_raw_enqueue("good", b'{"number": 1}', EnqueueOptions())
    (late,) = stage.queue.commit([replace(made, state=TaskState(due=1e300))])
    tasks = stage.enqueue()
    stage.queue.start(concurrency=2)
    stage.see_done(tasks)
    stage.see_done(stage.enqueue())
    assert stage.queue.get(late).state.status is Status.WAITING
    assert stage.queue.troubles == ()


@pytest.mark.rule("SK-14")
def test_all_that_is_complete_can_be_collected_whatever_its_id(stage: Stage) -> None:
    """Also what an earlier version took with an id of the far future."""
    made = stage.queue.build_raw_enqueue("good", b'{"number": 0}', EnqueueOptions(), retries=0)
    (late,) = stage.queue.commit(
        [
            replace(
                made,
                task=replace(made.task, head=replace(made.task.head, id="f" * 40)),
                partition=partition_of_id("f" * 40, 2),
            )
        ]
    )
    stage.queue.start()
    stage.see_done([late])
    assert stage.queue.collect(1.0).tasks == 0
    assert stage.queue.collect(0.0).tasks == 1


def test_a_body_that_waits_for_a_task_that_nobody_can_run_is_told(stage: Stage) -> None:
    @stage.queue.task(retries=0)
    def parent(claim: Claim) -> str:
        (child,) = stage.enqueue(1)
        with pytest.raises(NotSettled) as raised:
            stage.queue.wait(child, 0.0)
        return str(raised.value)

    task = parent.enqueue()
    stage.queue.start(concurrency=1)
    assert "all bodies of this worker (1) wait" in stage.queue.wait(task, PATIENCE_S)


def completions_of(writes: Sequence[Write]) -> list[TaskId]:
    return [each.id for each in writes if isinstance(each, Move) and is_completion(each)]


@pytest.mark.rule("SK-10", "SK-15", "SK-17")
def test_a_result_is_kept_for_longer_than_its_claim(stage: Stage) -> None:
    """As long as nobody else has claimed the task: its body is not run again."""
    ran: list[int] = []
    is_back = threading.Event()
    with stage.another(claim_ttl_s=0.5, buffer_s=0.1) as queue:
        engine, clock = queue.context.engine, queue.context.clock
        apply = engine.apply
        back_at: list[float] = []

        @queue.task(retries=5)
        def charge(claim: Claim) -> str:
            ran.append(claim.failures)
            return "charged"

        def away(writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
            if completions_of(writes) and not back_at:
                back_at.append(clock.now() + 1.0)
            is_kept = any(each.loop == "writer" for each in queue.troubles)
            if back_at and not is_back.is_set() and not (is_kept and clock.now() >= back_at[0]):
                raise RegistryUnavailable("away")
            answers = apply(writes, timeout_s)
            if back_at:
                is_back.set()
            return answers

        engine.apply = away  # type: ignore[method-assign]
        if isinstance(engine, ClaimsFromIndex):
            claim_from_index = engine.claim

            def claimed(request: ClaimQuery, timeout_s: float) -> ClaimAnswer:
                if back_at and not is_back.is_set():
                    raise RegistryUnavailable("away")
                return claim_from_index(request, timeout_s)

            engine.claim = claimed  # type: ignore[method-assign]
        task = charge.enqueue()
        queue.start()
        assert queue.wait(task, PATIENCE_S) == "charged"
        assert is_back.wait(PATIENCE_S)
        assert ran == [0]
        assert queue.get(task).state.failures == 0


@pytest.mark.rule("SK-6", "SK-10")
def test_a_result_that_comes_after_another_claim_is_reported(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A thing may be done twice then, which somebody has to know."""
    engine = stage.queue.context.engine
    apply = engine.apply
    is_away, is_known = threading.Event(), threading.Event()

    @stage.queue.task(retries=5)
    def charge(claim: Claim) -> str:
        is_away.set()
        return "charged"

    def away(writes: Sequence[Write], timeout_s: float) -> Sequence[Answer]:
        if is_away.is_set():
            if not is_known.is_set():
                claim_elsewhere(task)
            is_known.set()
        return apply(writes, timeout_s)

    def claim_elsewhere(task: TaskId) -> None:
        other = elsewhere.get(task)
        term = elsewhere.context.term()
        rule = partial(rules.claim, other.head, holder="other", worker="other", term=term, over=True)
        pending = PendingMove(other, lambda stored: rule(state=stored.state))
        elsewhere.context.submit(pending)
        result_of(pending, PATIENCE_S)

    engine.apply = away  # type: ignore[method-assign]
    with stage.another() as elsewhere:
        task = charge.enqueue()
        stage.queue.start()
        assert is_known.wait(PATIENCE_S)
        stage.queue.stop()
        state = elsewhere.get(task).state
        assert (state.status, state.claim and state.claim.holder) == (Status.CLAIMED, "other")
    (told,) = [each.getMessage() for each in caplog.records if "was refused" in each.getMessage()]
    assert "superseded" in told


@pytest.mark.rule("SK-15")
def test_as_many_bodies_run_at_once_as_may(stage: Stage) -> None:
    count = 3 * FIRST_THREADS
    together = threading.Barrier(count)

    @stage.queue.task(retries=0)
    def meet(claim: Claim) -> None:
        together.wait(PATIENCE_S)

    stage.queue.start(concurrency=count)
    for task in meet.enqueue_many([((), {})] * 2 * count):
        assert stage.queue.wait(task, PATIENCE_S) is None


@pytest.mark.rule("SK-17", "SK-20")
@pytest.mark.parametrize("step", ["stop_claiming", "stop", "give_back", "flush"])
def test_a_stop_that_is_interrupted_ends_all_and_gives_back(
    stage: Stage, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a second Ctrl-C: else the task would be renewed as long as the process lives."""
    queue, begun, may_end = stage.queue, threading.Event(), threading.Event()

    @queue.task(retries=0)
    def slow(claim: Claim) -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    task = slow.enqueue()
    queue.start()
    assert begun.wait(PATIENCE_S)
    owners = {"flush": queue.context.batcher, "give_back": queue._bodies}
    group, owner = queue._group, owners.get(step, queue._worker)
    interrupted = getattr(owner, step)

    def interrupt(*_: Any) -> None:
        setattr(owner, step, interrupted)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.stop(0.0 if step in owners else PATIENCE_S)
    if step == "flush":
        queue.context.batcher.flush()
    state = queue.get(task).state
    assert (state.status, state.failures) == (Status.WAITING, 0)
    assert group is None or group._run is None
    assert queue.status().workers == ()
    may_end.set()
    queue.start()
    assert queue.wait(task, PATIENCE_S) is None
