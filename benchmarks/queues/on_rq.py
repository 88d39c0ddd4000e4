"""RQ on Redis, each job in a process of its own, as it comes."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from redis import Redis
from rq import Queue, Retry, Worker
from rq.job import Job, JobStatus

from queues import bodies
from queues.place import PATIENCE_S, url, variant

IS_DEFAULT = variant() == "default"
OPTIONS: dict[str, Any] = (
    {}
    if IS_DEFAULT
    # An idle worker looks after the dead as often as its wait for a job ends: 15 s before its worker_ttl.
    else {"maintenance_interval": PATIENCE_S, "job_monitoring_interval": 5, "worker_ttl": 15 + PATIENCE_S}
)
queue = Queue("bench", connection=Redis.from_url(url()))


def prepare() -> None:
    """Redis needs nothing."""


def enqueue(body: str, *arguments: str) -> Job:
    """Enqueue a call; a handle of it."""
    return queue.enqueue(getattr(bodies, body), *arguments, retry=None if IS_DEFAULT else Retry(3))


def enqueue_many(body: str, count: int) -> None:
    """Enqueue so many calls in one pipeline."""
    queue.enqueue_many([Queue.prepare_data(getattr(bodies, body)) for _ in range(count)])


def worker(concurrency: int) -> list[str]:
    """The command of a pool of so many workers: each runs one job at a time."""
    if concurrency > 1:
        watched = f"from queues.on_rq import pool; pool({concurrency})"
    else:
        watched = "from queues.on_rq import one; one()"
    return [sys.executable, "-c", watched]


def one(*_: object) -> None:
    """A worker, until it is told to stop."""
    Worker([queue], connection=queue.connection, **OPTIONS).work(logging_level="ERROR")


def pool(concurrency: int) -> None:
    """Several workers, which end together with this process."""
    workers = [multiprocessing.Process(target=one) for _ in range(concurrency)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()


def is_finished(handle: Job) -> bool:
    """Whether the queue holds that the task has ended well."""
    return handle.get_status(refresh=True) == JobStatus.FINISHED
