"""dramatiq on Redis: a message is acknowledged once its actor has returned."""

from __future__ import annotations

import sys
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from dramatiq.results.errors import ResultMissing

from queues import bodies
from queues.place import PATIENCE_S, url, variant

MILLION = 1_000_000
OPTIONS: dict[str, Any] = (
    {}
    if variant() == "default"
    else {"heartbeat_timeout": PATIENCE_S * 1000, "maintenance_chance": MILLION // 10}
)
broker = RedisBroker(url=url(), **OPTIONS)
broker.add_middleware(Results(backend=RedisBackend(url=url())))
dramatiq.set_broker(broker)
BODIES = {
    each.__name__: dramatiq.actor(store_results=each is bodies.held, throws=())(each)
    for each in (bodies.nothing, bodies.stamp, bodies.slow, bodies.held)
}


def prepare() -> None:
    """Redis needs nothing."""


def enqueue(body: str, *arguments: str) -> dramatiq.Message[Any]:
    """Enqueue a call; a handle of it."""
    return BODIES[body].send(*arguments)


def worker(concurrency: int) -> list[str]:
    """The command of a worker that runs so many tasks at a time, in threads."""
    options = ["--processes", "1", "--threads", str(concurrency)]
    return [sys.executable, "-m", "dramatiq", "queues.on_dramatiq:broker", *options]


def is_finished(handle: dramatiq.Message[Any]) -> bool:
    """Whether the queue holds that the task has ended well."""
    try:
        handle.get_result()
    except ResultMissing:
        return False
    return True
