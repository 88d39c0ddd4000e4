"""Celery on Redis, with processes for its tasks, as it comes."""

from __future__ import annotations

import sys
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from queues import bodies
from queues.place import PATIENCE_S, url, variant

LATE: dict[str, Any] = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "worker_prefetch_multiplier": 1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "late": LATE,
    "": LATE | {"broker_transport_options": {"visibility_timeout": PATIENCE_S}},
}
app = Celery("bench", broker=url(), backend=url())
app.conf.update(SETTINGS[variant()])
BODIES = {
    each.__name__: app.task(name=each.__name__, ignore_result=each is bodies.nothing)(each)
    for each in (bodies.nothing, bodies.stamp, bodies.slow, bodies.held)
}


def prepare() -> None:
    """Redis needs nothing."""


def enqueue(body: str, *arguments: str) -> AsyncResult:
    """Enqueue a call; a handle of it."""
    return BODIES[body].apply_async(arguments)


def worker(concurrency: int) -> list[str]:
    """The command of a worker that runs so many tasks at a time."""
    options = ["--concurrency", str(concurrency), "--loglevel", "ERROR", "--hostname", "bench-%n@%h"]
    return [sys.executable, "-m", "celery", "-A", "queues.on_celery:app", "worker", *options]


def is_finished(handle: AsyncResult) -> bool:
    """Whether the queue holds that the task has ended well."""
    return bool(app.AsyncResult(handle.id).state == "SUCCESS")
