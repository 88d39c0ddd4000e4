"""huey on SQLite, with its ``fsync`` setting."""

from __future__ import annotations

import sys

from huey import SqliteHuey

from queues import bodies
from queues.place import folder

huey = SqliteHuey("bench", filename=str(folder() / "huey.db"), fsync=True)
BODIES = {
    each.__name__: huey.task(retries=3)(each)
    for each in (bodies.nothing, bodies.stamp, bodies.slow, bodies.held)
}


def prepare() -> None:
    """Its file is made as it is opened."""


def enqueue(body: str, *arguments: str) -> object:
    """Enqueue a call; a handle of it."""
    return BODIES[body](*arguments)


def worker(concurrency: int) -> list[str]:
    """The command of a worker that runs so many tasks at a time, and looks for one every 10 ms."""
    consumer = "from huey.bin.huey_consumer import consumer_main; consumer_main()"
    options = ["-w", str(concurrency), "-k", "thread", "-d", "0.001", "-m", "0.01", "-q"]
    return [sys.executable, "-c", consumer, "queues.on_huey.huey", *options]


def is_finished(handle: object) -> bool:
    """Whether the queue holds that the task has ended well."""
    return huey.get(handle.id, peek=True) is not None  # type: ignore[attr-defined]
