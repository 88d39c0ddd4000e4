"""Periodic tasks with real workers on real engines: each tick once, also where a worker is killed."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rebalanser.core.tasks.ids import created_at
from rebalanser.tasks import Status
from rebalanser.testing.waiting import wait_until
from tests.faults.queue_stage import Stage

EVERY_S = 2


@pytest.fixture(params=["sqlite", "etcd"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'tasks.db'}"
    else:
        url = f"{request.getfixturevalue('etcd_url')}/periodic/{uuid.uuid4().hex}"
    with ExitStack() as stack:
        yield Stage(url, tmp_path, stack)


def ticks(stage: Stage) -> list[int]:
    """The ticks whose tasks are in the store, in seconds since 1970."""
    return [int(created_at(each.head.id)) for each in stage.queue.tasks() if each.head.name == "tick"]


def has_no_gap(found: list[int]) -> bool:
    """Whether each tick is there, from the first to the last."""
    return {later - earlier for earlier, later in itertools.pairwise(found)} == {EVERY_S}


@pytest.mark.rule("SK-3", "SK-13", "SK-15")
def test_each_tick_makes_one_task_whatever_becomes_of_the_workers(stage: Stage) -> None:
    """Two workers whose clocks differ by most of a second; one of them is killed."""
    every = {"periodic": f"* * * * * */{EVERY_S}"}
    first = stage.start("work", **every)
    stage.start("work", shift_s=0.7, **every)
    started_at = time.time()
    wait_until(lambda: len({each["pid"] for each in stage.events("began")}) == 2)
    wait_until(lambda: max(ticks(stage)) > started_at + 2 * EVERY_S)
    first.kill()
    killed_at = time.time()
    wait_until(lambda: max(ticks(stage)) > killed_at + 5 * EVERY_S)
    # All is there from the first to the last tick, also what came while nobody owned its partition.
    last = max(ticks(stage))
    wait_until(lambda: has_no_gap([tick for tick in ticks(stage) if tick <= last]))
    wait_until(lambda: any(tick > last for tick in ticks(stage)))
    found = ticks(stage)
    assert len(found) == len(set(found))
    wait_until(lambda: all(each.state.status is Status.COMPLETED for each in stage.queue.tasks()))
    tries: dict[str, list[int]] = {}
    for each in stage.events("began"):
        tries.setdefault(each["task"], []).append(each["number"])
    assert all(numbers == sorted(set(numbers)) for numbers in tries.values())
    assert sum(len(numbers) > 1 for numbers in tries.values()) <= 2, "only what the killed worker had"
