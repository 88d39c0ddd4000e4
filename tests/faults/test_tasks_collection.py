"""Collection on real engines while producers and workers run; all of them are killed meanwhile (SK-14)."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rebalanser.tasks import Status
from rebalanser.tasks.checking import Check
from rebalanser.testing.waiting import wait_until
from tests.faults.queue_stage import Stage

YOUNG_S = 3.0
"""Longer than a producer takes to name a task that it has just enqueued."""


@pytest.fixture(params=["sqlite", "etcd"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'tasks.db'}"
    else:
        url = f"{request.getfixturevalue('etcd_url')}/collection/{uuid.uuid4().hex}"
    with ExitStack() as stack:
        yield Stage(url, tmp_path, stack)


def collected(stage: Stage) -> int:
    return sum(each["tasks"] for each in stage.events("collected"))


def told(stage: Stage, event: str) -> set[str]:
    return {each["task"] for each in stage.events(event)}


def archived(archive: Path) -> list[dict[str, Any]]:
    """The whole lines of an archive; a line that was cut off is written again by the next who collects."""
    lines = archive.read_text().splitlines() if archive.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def faults(stage: Stage) -> list[str]:
    context = stage.queue.context
    look = Check(context.engine, "work", stage.queue.partition_count, context.timeout_s)
    return [f"{each.fault} {each.task} {each.message}" for each in look.findings()]


@pytest.mark.rule("SK-14", "SK-17")
def test_just_what_is_complete_goes_and_all_of_it_while_everybody_works(stage: Stage, tmp_path: Path) -> None:
    archives = [tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "last.jsonl"]
    worker = stage.start("work")
    stage.start("work")
    producer = stage.start("produce")
    (waiting,) = stage.queue.commit([stage.made("nobody", delay_s=86_400.0)])
    (blocked,) = stage.queue.commit([stage.made("nobody", after=(waiting,))])

    collector = stage.start("collect", older_than_s=YOUNG_S, archive=str(archives[0]))
    wait_until(lambda: collected(stage) >= 30)
    assert faults(stage) == []
    collector.kill()
    worker.kill()
    collector = stage.start("collect", older_than_s=YOUNG_S, archive=str(archives[1]))
    so_far = collected(stage)
    wait_until(lambda: collected(stage) >= so_far + 30)
    producer.kill()
    wait_until(lambda: stage.statuses().get(Status.CLAIMED, 0) == 0 and stage.statuses()[Status.WAITING] == 2)
    collector.kill()

    stage.queue.collect(0.0, archives[2])
    assert stage.statuses() == {Status.WAITING: 2}, "what waits is never collected, nor what waits for it"
    assert {each.head.id for each in stage.queue.tasks()} == {waiting, blocked}
    assert faults(stage) == []
    gone = [line for archive in archives for line in archived(archive)]
    assert {line["state"]["status"] for line in gone} == {"completed"}
    assert {line["payload"] != "" and len(line["log"]) >= 1 for line in gone} == {True}
    ids = {line["head"]["id"] for line in gone}
    assert ids >= told(stage, "enqueued"), "nothing went that was not written first"
    assert ids <= told(stage, "began"), "nothing went that was not worked on"
