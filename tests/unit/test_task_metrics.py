"""Metrics and status: each task is counted once, whatever its thread, and workers say what fails in them."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rebalanser.cli.tasks_running import metrics_served
from rebalanser.core.tasks.ids import ready_since
from rebalanser.core.tasks.ready_index import ReadyTasks
from rebalanser.errors import InvalidSettings, QuotaExceeded, RegistryUnavailable
from rebalanser.tasks import Claim, GiveUp, Queue, Status
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.tasks.metrics import (
    BUCKETS_S,
    MAX_NAMES,
    OTHER,
    ClaimOutcome,
    QueueCollector,
    RunTimes,
    TaskMetrics,
)
from rebalanser.tasks.status import KEPT_S, NOTE_S, SILENT_S, WorkerNote
from rebalanser.testing.clock import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until


@pytest.fixture(params=["memory", "sqlite"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    urls = {"memory": f"memory://{uuid.uuid4().hex}", "sqlite": f"sqlite:///{tmp_path}/tasks.db"}
    with Queue("work", urls[request.param], partitions=2, state_folder=tmp_path) as queue:
        yield queue


def scraped(queue: Queue) -> dict[str, float]:
    """The samples of a scrape, by name and labels."""
    registry = CollectorRegistry()
    registry.register(QueueCollector(queue))
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


@pytest.mark.rule("SK-15")
def test_a_scrape_tells_what_became_of_tasks(queue: Queue) -> None:
    @queue.task(retries=1, backoff_s=0.001)
    def send(claim: Claim, to: str) -> None:
        if to == "nobody":
            raise GiveUp("no such address")
        if to == "later" and claim.failures == 0:
            raise ConnectionError

    tasks = [send.enqueue(to) for to in ("a", "b", "later", "nobody")]
    before = scraped(queue)
    assert before['rebalanser_tasks_enqueued_total{name="send",queue="work"}'] == 4
    assert not any("started" in name and "{" in name for name in before)
    queue.start(concurrency=2)
    for task in tasks[:3]:
        queue.wait(task, PATIENCE_S)
    wait_until(lambda: queue.get(tasks[3]).state.status is Status.DEAD)
    queue.stop()
    after = scraped(queue)
    assert after['rebalanser_tasks_started_total{name="send",queue="work"}'] == 5
    ended = 'rebalanser_tasks_ended_total{{name="send",outcome="{}",queue="work"}}'
    assert [after[ended.format(outcome)] for outcome in ("completed", "failed", "dead")] == [3, 1, 1]
    assert after['rebalanser_tasks_run_seconds_count{name="send",queue="work"}'] == 5
    assert after['rebalanser_tasks_run_seconds_bucket{le="+Inf",name="send",queue="work"}'] == 5


@pytest.mark.rule("SK-15")
def test_a_trouble_is_a_metric_as_long_as_it_lasts(queue: Queue) -> None:
    name = 'rebalanser_tasks_troubles{kind="outage",loop="claims",queue="work"}'
    queue.errors.failed("claims", RegistryUnavailable("away"))
    assert scraped(queue)[name] == 1
    queue.errors.worked("claims")
    after = scraped(queue)
    assert name not in after
    assert after['rebalanser_tasks_errors_total{kind="outage",loop="claims",queue="work"}'] == 1


@pytest.mark.rule("SK-15")
def test_a_store_that_is_away_costs_a_scrape_only_the_age(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> float | None:
        raise RegistryUnavailable("away")

    monkeypatch.setattr(queue, "_oldest_ready_s", away)
    queue.errors.failed("claims", RegistryUnavailable("away"))
    found = scraped(queue)
    assert not any(name.startswith("rebalanser_tasks_oldest") for name in found)
    assert any(name.startswith("rebalanser_tasks_troubles") for name in found)


@pytest.mark.rule("SK-12")
def test_a_worker_knows_the_oldest_task_that_it_can_not_run(queue: Queue) -> None:
    queue.commit([queue.build_raw_enqueue("unknown", b"{}", EnqueueOptions())])
    queue.start()
    wait_until(lambda: (queue.measure().oldest_ready_s or 0.0) > 0.0)
    queue.stop()


def test_the_oldest_of_all_priorities_is_found_behind_those_that_left() -> None:
    ready = ReadyTasks()
    assert ready.oldest() is None
    for number, priority in ((3, 1), (1, 0), (2, 5)):
        ready.add(f"{number}", priority)
    assert ready.oldest() == "1"
    ready.drop("1")
    assert ready.oldest() == "2"
    ready.drop("2")
    assert (ready.oldest(), ready.best()) == ("3", ("3", 1))
    ready.add("4", 5)
    assert (ready.oldest(), ready.best()) == ("3", ("4", 5))


@pytest.mark.parametrize(
    ("born_s", "due", "since"),
    [(1.7e9, 0.0, 1.7e9), (1.7e9, 1.71e9, 1.71e9), (9.0, 0.0, 1.8e9), (1e12, 0.0, 1.8e9)],
)
def test_a_task_waits_since_it_was_made_or_due(born_s: float, due: float, since: float) -> None:
    assert ready_since(f"{int(born_s * 1000):016x}{0:024x}", due, 1.8e9) == since


def test_counts_of_threads_that_have_ended_are_kept_in_bounds() -> None:
    metrics = TaskMetrics()
    for _ in range(300):
        thread = threading.Thread(target=metrics.enqueued, args=("send",))
        thread.start()
        thread.join()
    assert metrics.total().enqueued == {"send": 300}
    assert len(metrics._threads) <= 64


def test_names_are_bounded() -> None:
    metrics = TaskMetrics()
    for number in range(MAX_NAMES + 5):
        metrics.ended(f"{number}", ClaimOutcome.COMPLETED)
    ended = metrics.total().ended
    assert len(ended) == MAX_NAMES + 1
    assert ended[OTHER, ClaimOutcome.COMPLETED] == 5


def test_a_run_is_in_the_bucket_of_its_bound() -> None:
    times = RunTimes()
    for run_s in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, BUCKETS_S[-1] * 2):
        times.add(run_s)
    assert (times.counts[0], times.counts[1], times.counts[-1]) == (2, 1, 1)


def test_several_queues_are_in_one_scrape_with_each_family_once(queue: Queue, tmp_path: Path) -> None:
    with Queue("other", "memory://", state_folder=tmp_path) as other:
        for each in (queue, other):
            each.commit([each.build_raw_enqueue("send", b"{}", EnqueueOptions())])
        registry = CollectorRegistry()
        registry.register(QueueCollector(queue, other))
        text = generate_latest(registry).decode()
    assert text.count("# TYPE rebalanser_tasks_enqueued_total counter") == 1
    for name in (queue.name, "other"):
        assert f'rebalanser_tasks_enqueued_total{{name="send",queue="{name}"}} 1.0' in text


@pytest.mark.rule("SK-15")
def test_a_worker_serves_its_metrics_as_long_as_it_runs(queue: Queue) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(InvalidSettings, match="can't be served"),
            metrics_served([queue], "127.0.0.1", port),
        ):
            pass
    url = f"http://127.0.0.1:{port}/metrics"
    with (
        metrics_served([queue], "127.0.0.1", port),
        urllib.request.urlopen(url, timeout=PATIENCE_S) as answer,
    ):
        assert b"rebalanser_tasks_oldest_ready_seconds" in answer.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=PATIENCE_S)
    with metrics_served([queue], "127.0.0.1", None):
        """Nothing is served."""


@pytest.mark.rule("SK-15")
def test_a_worker_says_what_fails_in_it_until_it_does_not(queue: Queue) -> None:
    """At once, and every 10 seconds else; a worker that is not heard of any more is silent."""
    clock, errors = FakeClock(), queue.errors
    context: Any = SimpleNamespace(
        clock=clock, errors=errors, engine=queue.context.engine, queue="work", timeout_s=PATIENCE_S
    )
    note = WorkerNote(context, "me", 4, lambda: 3)

    def seen() -> tuple[float, list[str]]:
        (worker,) = queue.status().workers
        assert (worker.worker, worker.concurrency, worker.running) == ("me", 4, 3)
        return worker.seen - clock.wall(), [each.loop for each in worker.troubles]

    note.look()
    assert seen() == (0.0, [])
    clock.advance(NOTE_S - 1)
    note.look()
    assert seen() == (1 - NOTE_S, []), "nothing is new"
    errors.failed("claims", RegistryUnavailable("away"))
    note.look()
    assert seen() == (0.0, ["claims"])
    errors.worked("claims")
    note.look()
    assert seen() == (0.0, [])
    clock.advance(NOTE_S)
    note.look()
    (worker,) = queue.status().workers
    assert worker.seen == clock.wall()
    assert not worker.is_silent(clock.wall() + SILENT_S)
    assert worker.is_silent(clock.wall() + SILENT_S + 1)
    note.stop()
    assert queue.status().workers == ()


@pytest.mark.rule("SK-15")
def test_notes_of_the_dead_go_and_those_of_other_versions_do_no_harm(queue: Queue) -> None:
    engine = queue.context.engine
    queue.start()
    wait_until(lambda: queue.status().workers)
    (text,) = engine.workers("work", PATIENCE_S).values()
    old = json.loads(text) | {"seen": queue.context.clock.wall() - KEPT_S - 1.0}
    engine.note_worker("work", "dead", json.dumps(old).encode(), PATIENCE_S)
    engine.note_worker("work", "newer", b'{"version": 9}', PATIENCE_S)
    queue.stop()
    assert set(engine.workers("work", PATIENCE_S)) == {"dead", "newer"}
    queue.start()
    wait_until(lambda: len(queue.status().workers) == 1)
    wait_until(lambda: "dead" not in engine.workers("work", PATIENCE_S))
    queue.stop()
    assert set(engine.workers("work", PATIENCE_S)) == {"newer"}


@pytest.mark.rule("SK-15")
def test_a_store_that_takes_no_note_stops_no_worker(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise QuotaExceeded("full")

    @queue.task
    def send(claim: Claim) -> None:
        """Do nothing."""

    with monkeypatch.context() as patched:
        patched.setattr(queue.context.engine, "note_worker", full)
        queue.start()
        wait_until(lambda: [each for each in queue.troubles if each.loop == "status"])
        assert queue.wait(send.enqueue(), PATIENCE_S) is None
    wait_until(lambda: queue.troubles == ())
    wait_until(lambda: queue.status().workers)
    queue.stop()
