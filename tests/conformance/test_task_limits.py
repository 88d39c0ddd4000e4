"""Limits of tasks that run at once, by function and by key: the same on all engines (SK-23)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebalanser import Settings
from rebalanser.core.tasks.model import LimitRoom, TaskId
from rebalanser.errors import InvalidTask
from rebalanser.tasks import Claim, Queue, Status
from rebalanser.tasks.checking import Check
from rebalanser.testing.waiting import PATIENCE_S, wait_until

QUICK = Settings(min_rebalance_interval_s=0.0, rejoin_initial_s=0.01)


class Stage:
    """Workers of a queue, and how many bodies run at once."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.began: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.queues = [self.open() for _ in range(2)]

    def open(self) -> Queue:
        queue = Queue(
            "work", self.url, partitions=3, state_folder=self.folder, settings=QUICK, timeout_s=PATIENCE_S
        )

        @queue.task(max_running_per_key=1, retries=1, backoff_s=0.01)
        def bill(claim: Claim, customer: str, name: str = "") -> None:
            self._run(customer, name or customer)

        @queue.task(max_running=2)
        def export(claim: Claim, name: str) -> None:
            self._run("export", name)

        @queue.task(rate_limit_per_key="1/h", retries=1, backoff_s=0.01)
        def call(claim: Claim, customer: str, name: str) -> None:
            self._run(customer, name)

        @queue.task(rate_limit="1/h burst 3")
        def mail(claim: Claim, name: str) -> None:
            self._run("mail", name)

        @queue.task
        def free(claim: Claim, name: str) -> None:
            self._run("free", name)

        return queue

    def _run(self, limit: str, name: str) -> None:
        with self._lock:
            self.running[limit] += 1
            self.most[limit] = max(self.most[limit], self.running[limit])
            self.began.append(name)
        try:
            gate = self.gates.get(name)
            assert gate is None or gate.wait(PATIENCE_S)
            if name.startswith("broken") and self.began.count(name) == 1:
                raise ValueError(name)
        finally:
            with self._lock:
                self.running[limit] -= 1

    def enqueue(self, name: str, function: str, key: str | None = None) -> TaskId:
        queue = self.queues[0]
        arguments = (name,) if key is None else (key, name)
        from rebalanser.tasks.functions import EnqueueOptions

        options = EnqueueOptions(key=key)
        (task,) = queue.commit([queue.build_enqueue(queue.functions[function], arguments, {}, options)])
        return task

    def start(self) -> None:
        for queue in self.queues:
            queue.start(concurrency=4)

    def restart(self) -> None:
        for queue in self.queues:
            queue.close()
        self.queues = [self.open() for _ in range(2)]
        self.start()

    def wait(self, *tasks: TaskId) -> None:
        for task in tasks:
            self.queues[0].wait(task, PATIENCE_S)

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        for queue in self.queues:
            queue.close()


@pytest.fixture
def stage(engine_url: str, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(engine_url, tmp_path)
    yield stage
    stage.close()


@pytest.mark.rule("SK-23")
def test_one_at_a_time_per_key_and_few_of_a_function(stage: Stage) -> None:
    tasks = [stage.enqueue(f"{key}{number}", "bill", key) for number in range(6) for key in "abc"]
    tasks += [stage.enqueue(f"broken {key}", "bill", key) for key in "abc"]
    tasks += [stage.enqueue(f"export {number}", "export") for number in range(12)]
    tasks += [stage.enqueue(f"free {number}", "free") for number in range(12)]
    stage.start()
    stage.wait(*tasks)
    assert [stage.most[key] for key in "abc"] == [1, 1, 1]
    assert stage.most["export"] <= 2
    assert sorted(stage.began) == sorted(
        [f"{key}{number}" for key in "abc" for number in range(6)]
        + [f"broken {key}" for key in "abc"] * 2
        + [f"{name} {number}" for name in ("export", "free") for number in range(12)]
    )
    of_key = [name for name in stage.began if name in {f"a{number}" for number in range(6)}]
    assert of_key == sorted(of_key), "the oldest first"
    check = Check(stage.queues[0].context.engine, "work", 3, PATIENCE_S)
    assert list(check.findings()) == []


@pytest.mark.rule("SK-23")
def test_what_a_limit_holds_back_keeps_nothing_else_waiting(stage: Stage) -> None:
    gate = stage.gates["slow"] = threading.Event()
    slow = stage.enqueue("slow", "bill", "a")
    stage.start()
    wait_until(lambda: "slow" in stage.began)
    held = [stage.enqueue(f"held {number}", "bill", "a") for number in range(50)]
    others = [stage.enqueue(f"other {number}", "bill", f"key {number}") for number in range(10)]
    others += [stage.enqueue(f"free {number}", "free") for number in range(10)]
    others += [stage.enqueue(f"none {number}", "bill") for number in range(0)]
    stage.wait(*others)
    queue = stage.queues[0]
    assert queue.rooms([queue.get(each) for each in (slow, *held)]) == {each: LimitRoom(1) for each in held}
    assert not any(name.startswith("held") for name in stage.began)
    cancelled, first, *rest = held
    stage.queues[0].cancel(cancelled)
    gate.set()
    stage.wait(slow, first, *rest)
    assert stage.most["a"] == 1
    assert "held 0" not in stage.began
    assert stage.queues[0].count()[Status.COMPLETED] == 70


@pytest.mark.rule("SK-23")
def test_a_cancelled_one_makes_room_for_the_next(stage: Stage) -> None:
    stage.gates["slow"] = threading.Event()
    slow, following = stage.enqueue("slow", "bill", "a"), stage.enqueue("next", "bill", "a")
    stage.start()
    wait_until(lambda: "slow" in stage.began)
    stage.queues[0].cancel(slow)
    stage.wait(following)
    stage.queues[0].requeue(slow)
    stage.gates["slow"].set()
    stage.wait(slow)


@pytest.mark.rule("SK-18", "SK-23")
def test_no_more_start_than_a_rate_allows_also_after_a_restart(stage: Stage) -> None:
    calls = [stage.enqueue(f"{key} {number}", "call", key) for number in range(3) for key in "ab"]
    mails = [stage.enqueue(f"mail {number}", "mail") for number in range(5)]
    broken = stage.enqueue("broken", "call", "c")
    free = [stage.enqueue(f"free {number}", "free") for number in range(5)]
    stage.start()
    stage.wait(*calls[:2], *mails[:3], *free)
    wait_until(lambda: stage.queues[0].get(broken).state.failures == 1)
    stage.restart()
    stage.wait(stage.enqueue("a later one", "free"), stage.enqueue("first of its key", "call", "d"))
    names = {name for name in stage.began if not name.startswith("free")}
    assert names == {
        *("a 0", "b 0", "mail 0", "mail 1", "mail 2", "broken", "a later one", "first of its key")
    }
    assert stage.began.count("broken") == 1, "a retry is a start, too"
    queue = stage.queues[0]
    assert queue.count()[Status.WAITING] == 4 + 2 + 1
    rooms = queue.rooms(map(queue.get, (*calls, *mails, *free)))
    assert list(rooms) == [*calls[2:], *mails[3:]]
    assert all(room.running == 0 and time.time() < room.at < time.time() + 3601 for room in rooms.values())
    stage.queues[0].cancel(broken)


@pytest.mark.rule("SK-23")
def test_a_task_without_a_key_has_no_limit(stage: Stage) -> None:
    stage.gates["x"] = threading.Event()
    queue = stage.queues[0]
    tasks = [
        queue.commit([queue.build_enqueue(queue.functions["bill"], ("none", "x"), {})])[0] for _ in range(3)
    ]
    stage.start()
    wait_until(lambda: stage.running["none"] == 3)
    assert queue.get(tasks[0]).head.max_running == 0
    stage.gates["x"].set()
    stage.wait(*tasks)


@pytest.mark.rule("SK-23")
def test_what_can_not_be_a_limit_is_refused_where_it_is_said(tmp_path: Path) -> None:
    with Queue("memory://", state_folder=tmp_path) as queue:
        for options in (
            {"max_running": 0},
            {"max_running": 1001},
            {"max_running_per_key": "x"},
            {"max_running": 1, "max_running_per_key": 1},
            {"max_running": 1, "rate_limit_per_key": "1/s"},
        ):
            with pytest.raises(InvalidTask, match="max_running"):
                queue.task(**options)
        for rate in ("10", "0/s", "1/d", "1.5/s", "10/s burst 0", "1/h burst 25", "10/s, burst 2", 5):
            with pytest.raises(InvalidTask, match="rate_limit"):
                queue.task(rate_limit=rate)  # type: ignore[call-overload]

        @queue.task(max_running_per_key=1)
        def bill(claim: Claim) -> None:
            pass

        with pytest.raises(InvalidTask, match="key"):
            bill.options(key="")
        assert queue.get(bill.options(key="7").enqueue()).head.limit_key == "7"
