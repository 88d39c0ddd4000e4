"""What is measured of Skuld alone: one producer, a deep queue, and tasks that depend on each other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from queues import bodies
from queues.place import folder
from queues.workers import await_that, workers

BATCH = 1_000
"""As many as one task waits for at most."""
CLAIMS = 5_000
CONCURRENCY = 4
WORKERS = 2
CHAIN = 1_000
FAN = 10_000
LONGEST_S = 600.0
PRODUCERS = 8
WARM = 200
"""Calls before those that are measured: the first opens the slot of ids and fills the caches."""


def waiting(app: Any, count: int) -> dict[str, Any]:
    """One worker takes over so many waiting tasks and some more, holds them all, and then claims those.

    How long it takes to hold them, its memory then, also beyond that of an idle one for each task, tasks
    begun in a second, and for each how long it was from asking for its claim to its beginning.
    """
    with workers(app, CONCURRENCY) as idle:
        idle.await_idle(LONGEST_S)
        idle_mb = idle.resident_mb
    left = count + CLAIMS
    while left > 0:
        app.enqueue_many("asked", min(BATCH, left))
        left -= BATCH
    began = time.monotonic()
    with workers(app, CONCURRENCY) as owner:
        held_at = owner.await_idle(LONGEST_S)
        owner_mb = owner.resident_mb
        (folder() / "gate").touch()
        await_that(lambda: bodies.ticks() >= CLAIMS // 10, LONGEST_S)
        first, first_at = bodies.ticks(), time.monotonic()
        await_that(lambda: bodies.ticks() >= CLAIMS, LONGEST_S)
        last, last_at = bodies.ticks(), time.monotonic()
        await_that(lambda: len(bodies.asked()) >= CLAIMS // 2, LONGEST_S)
    return {
        "held after s": held_at - began,
        "owner MB": owner_mb,
        "bytes a task": (owner_mb - idle_mb) * 1e6 / (count + CLAIMS),
        "claims": (last - first) / (last_at - first_at),
        "seconds": bodies.asked(),
    }


def drained(app: Any, count: int) -> dict[str, float]:
    """Enqueue tasks in batches, and drain them by two workers.

    How many a second are enqueued, drained, and drained in the last tenth; and the processor time of the
    workers for each.
    """
    began = time.monotonic()
    for _ in range(0, count, BATCH):
        app.enqueue_many("nothing", BATCH)
    count = -(-count // BATCH) * BATCH
    enqueued_s = time.monotonic() - began
    with ExitStack() as stack:
        started = [stack.enter_context(workers(app, CONCURRENCY)) for _ in range(WORKERS)]
        await_that(lambda: bodies.ticks() >= count // 100, LONGEST_S)
        first, first_at, busy_s = bodies.ticks(), time.monotonic(), sum(each.busy_s for each in started)
        await_that(lambda: bodies.ticks() >= count * 9 // 10, LONGEST_S)
        late, late_at = bodies.ticks(), time.monotonic()
        await_that(lambda: bodies.ticks() >= count, LONGEST_S)
        last, last_at = bodies.ticks(), time.monotonic()
        busy_s = sum(each.busy_s for each in started) - busy_s
    return {
        "enqueue": count / enqueued_s,
        "drain": (last - first) / (last_at - first_at),
        "last tenth": (last - late) / (last_at - late_at),
        "cpu us": busy_s / max(1, last - first) * 1e6,
    }


def producing(app: Any, count: int) -> dict[str, float]:
    """What one call of enqueue costs a process with one thread, and how many a second eight threads make."""
    for _ in range(WARM):
        app.enqueue("nothing")
    before, cpu_s, began = _written(), time.process_time(), time.monotonic()
    for _ in range(count):
        app.enqueue("nothing")
    lasted_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
    writes, size = (after - was for after, was in zip(_written(), before, strict=True))
    began = time.monotonic()
    with ThreadPoolExecutor(PRODUCERS) as pool:
        list(pool.map(lambda _: app.enqueue("nothing"), range(count)))
    return {
        "enqueue": count / lasted_s,
        "cpu us": cpu_s / count * 1e6,
        "writes": writes / count,
        "kB": size / count / 1e3,
        "eight threads": count / (time.monotonic() - began),
    }


def _written() -> tuple[int, int]:
    """Write calls of this process, and the bytes that they had, sockets included."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["syscw"]), int(counters["wchar"])


def chain(app: Any, _count: int) -> dict[str, float]:
    """Each task after the one before: how many a second are enqueued and run."""
    began = time.monotonic()
    task = app.enqueue("nothing")
    for _ in range(CHAIN - 1):
        task = app.nothing.options(after=[task]).enqueue()
    return {"enqueue": CHAIN / (time.monotonic() - began)} | _run(app, CHAIN)


def fan(app: Any, _count: int) -> dict[str, float]:
    """Many tasks after one, one after each batch of them, and one after these: how many a second are run."""
    began = time.monotonic()
    root = app.enqueue("nothing")
    joins = []
    for _ in range(0, FAN, BATCH):
        tasks = app.nothing.options(after=[root]).enqueue_many([((), {})] * BATCH)
        joins.append(app.nothing.options(after=tasks).enqueue())
    app.nothing.options(after=joins).enqueue()
    total = FAN + len(joins) + 2
    return {"enqueue": total / (time.monotonic() - began)} | _run(app, total)


def _run(app: Any, tasks: int) -> dict[str, float]:
    with ExitStack() as stack:
        for _ in range(WORKERS):
            stack.enter_context(workers(app, CONCURRENCY))
        await_that(lambda: bodies.ticks() > 0, LONGEST_S)
        began = time.monotonic()
        await_that(lambda: bodies.ticks() >= tasks, LONGEST_S)
        return {"run": tasks / (time.monotonic() - began)}


ACTIONS = {"producing": producing, "waiting": waiting, "drained": drained, "chain": chain, "fan": fan}
