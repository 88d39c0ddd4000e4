"""Measures, kills or pauses the workers of one queue: ``python -m queues.drive NAME ACTION``; prints JSON.

Run by the benchmarks, with what ``queues.place`` reads in its environment.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from queues import bodies
from queues.catalogue import PEERS
from queues.place import folder
from queues.workers import await_that, workers

WORKERS = 2
CONCURRENCY = 4
BATCH = 100
TASKS = 12
STARTS = 100
QUIET_S = 0.02
"""How long the queue is idle before each task whose start is measured."""
LONGEST_S = 15.0
"""How long one rate is measured at most: the slowest queues would take all day."""
SETTLE_S = 120.0
"""How long it is waited for tasks that a dead or paused worker held."""


def rate(once: Callable[[], object], weight: int, tasks: int) -> tuple[float, int]:
    """How many tasks a second are enqueued, ``weight`` by each call, and how many were."""
    began, done = time.monotonic(), 0
    while done < tasks and time.monotonic() < began + LONGEST_S:
        once()
        done += weight
    return done / (time.monotonic() - began), done


def throughput(app: Any, tasks: int) -> dict[str, float]:
    """Enqueued one by one and in batches, then drained by two workers: tasks in a second."""
    told = {}
    told["enqueue"], enqueued = rate(lambda: app.enqueue("nothing"), 1, tasks)
    if hasattr(app, "enqueue_many"):
        told["enqueue in batches"], more = rate(lambda: app.enqueue_many("nothing", BATCH), BATCH, tasks)
        enqueued += more
    with ExitStack() as stack:
        for _ in range(WORKERS):
            stack.enter_context(workers(app, CONCURRENCY))
        await_that(lambda: bodies.ticks() >= 100, SETTLE_S)
        began, before = time.monotonic(), bodies.ticks()
        await_that(lambda: bodies.ticks() >= enqueued, LONGEST_S)
        told["drain"] = (bodies.ticks() - before) / (time.monotonic() - began)
    return told


def starts(app: Any, _tasks: int) -> dict[str, list[float]]:
    """From the call of enqueue to the start of the body, in seconds, on an idle queue."""
    seconds = []
    with workers(app, CONCURRENCY):
        app.enqueue("stamp")
        await_that(lambda: len(bodies.starts()) == 1, SETTLE_S)
        for known in range(1, STARTS + 1):
            time.sleep(QUIET_S)
            began = time.monotonic()
            app.enqueue("stamp")
            if await_that(lambda: len(bodies.starts()) > known, LONGEST_S):  # noqa: B023 - called at once
                seconds.append(bodies.starts()[-1] - began)
    return {"seconds": seconds}


def crash(app: Any, _tasks: int) -> dict[str, Any]:
    """Twelve tasks, two at a time; every process killed in the first ones; then one worker more."""
    names = [f"task-{number}" for number in range(TASKS)]
    for name in names:
        app.enqueue("slow", name)
    with workers(app, 2) as first:
        await_that(lambda: len(bodies.runs()) >= 2, SETTLE_S)
        time.sleep(1)
        first.kill()
        killed = time.monotonic()
    with workers(app, 2):
        await_that(lambda: _ended() == set(names), SETTLE_S)
        time.sleep(bodies.SLOW_S)  # what runs a second time would begin by now
    ended: dict[str, float] = {}
    for name, what, at in bodies.runs():
        if what == "ended":
            ended.setdefault(name, at - killed)
    began = [name for name, what, _ in bodies.runs() if what == "begun"]
    return {
        "ended": sorted(ended.values()),
        "twice": sum(began.count(name) > 1 for name in names),
        "more than twice": sum(began.count(name) > 2 for name in names),
    }


def _ended() -> set[str]:
    return {name for name, what, _ in bodies.runs() if what == "ended"}


def stale(app: Any, _tasks: int) -> dict[str, str]:
    """A worker is paused, its task taken by another, and resumed: does the queue let it finish?"""

    def told(what: str, count: int) -> Callable[[], bool]:
        return lambda: sum(done == what for _, done, _ in bodies.runs()) >= count

    handle = app.enqueue("held", "held")
    with workers(app, 1) as first:
        await_that(told("begun", 1), SETTLE_S)
        first.send(signal.SIGSTOP)
        with workers(app, 1):
            if not await_that(told("begun", 2), SETTLE_S):
                return {"stale": "never taken over"}
            (folder() / "let-1").touch()
            first.send(signal.SIGCONT)
            if not await_that(told("ended-1", 1), LONGEST_S):
                return {"stale": "no: the paused worker did not go on"}
            accepted = await_that(lambda: bool(app.is_finished(handle)), 5.0)
    return {"stale": "yes: it was taken as finished" if accepted else "no: refused"}


ACTIONS: dict[str, Callable[[Any, int], Any]] = {
    "throughput": throughput,
    "starts": starts,
    "crash": crash,
    "stale": stale,
}


def main() -> None:
    name, action, tasks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    peer = next(each for each in PEERS if each.name == name)
    app = importlib.import_module(f"queues.{peer.module}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    app.prepare()
    actions = ACTIONS | getattr(app, "ACTIONS", {})
    print(json.dumps(actions[action](app, tasks)), flush=True)
    os._exit(0)  # what a client of the queue still does in the background is of no interest


if __name__ == "__main__":
    main()
