"""Metrics of tasks: each is counted once, in whatever thread, and the oldest ready one is found at once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rebalanser.errors import RegistryUnavailable
from rebalanser.tasks import Claim, GiveUp, Queue, Status
from rebalanser.tasks.flakes import ready_since
from rebalanser.tasks.metrics import (
    BUCKETS_S,
    MAX_NAMES,
    OTHER,
    Outcome,
    QueueCollector,
    RunTimes,
    TaskMetrics,
)
from rebalanser.tasks.options import EnqueueOptions
from rebalanser.tasks.ready import Ready
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


@pytest.mark.rule("SK-24")
def test_the_oldest_ready_task_is_found_by_the_store(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any priority; what is delayed or blocked does not wait for a worker."""
    engine, base = queue.context.engine, 1_700_000_000.0

    def add(age_s: float, **options: object) -> str:
        task_id = f"{int((base - age_s) * 1000):016x}{0:024x}"
        made = queue.made_raw("send", b"{}", EnqueueOptions(task_id=task_id, **options))  # type: ignore[arg-type]
        return str(queue.commit([made])[0])

    def oldest() -> float | None:
        since = engine.ready_since("work", base, PATIENCE_S)
        return None if since is None else base - since

    assert oldest() is None
    first = add(50.0, priority=7)
    assert oldest() == 50.0
    add(10.0, priority=9)
    add(90.0, after=[first])
    assert oldest() == 50.0, "what is blocked does not count"
    monkeypatch.setattr(queue._clock, "wall", lambda: base, raising=False)
    add(200.0, delay_s=3600.0)
    assert oldest() == 50.0, "what is delayed does not count"
    add(60.0, priority=-1)
    assert oldest() == 60.0
    queue.cancel(first)
    assert oldest() == 60.0


@pytest.mark.rule("SK-24")
def test_a_worker_knows_the_oldest_task_that_it_can_not_run(queue: Queue) -> None:
    queue.commit([queue.made_raw("unknown", b"{}", EnqueueOptions())])
    queue.start()
    wait_until(lambda: (queue.measure().oldest_ready_s or 0.0) > 0.0)
    queue.stop()


def test_the_oldest_of_all_priorities_is_found_behind_those_that_left() -> None:
    ready = Ready()
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
        metrics.ended(f"{number}", Outcome.COMPLETED)
    ended = metrics.total().ended
    assert len(ended) == MAX_NAMES + 1
    assert ended[OTHER, Outcome.COMPLETED] == 5


def test_a_run_is_in_the_bucket_of_its_bound() -> None:
    times = RunTimes()
    for run_s in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, BUCKETS_S[-1] * 2):
        times.add(run_s)
    assert (times.counts[0], times.counts[1], times.counts[-1]) == (2, 1, 1)
