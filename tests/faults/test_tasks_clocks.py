"""Hosts whose wall clocks are an hour apart work on one queue: claims stay right, somebody warns (SK-18)."""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rebalanser.core.tasks.clocks import MAX_SKEW_S
from rebalanser.tasks import Status
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from tests.faults.queue_process import CLAIM_TTL_S
from tests.faults.queue_stage import Stage

HOUR_S = 3600.0
TASKS = 12
BODY_S = 1.0


@pytest.fixture(params=["sqlite", "etcd"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'tasks.db'}"
    else:
        url = f"{request.getfixturevalue('etcd_url')}/clocks/{uuid.uuid4().hex}"
    with ExitStack() as stack:
        yield Stage(url, tmp_path, stack)


@pytest.mark.rule("SK-6", "SK-8", "SK-13", "SK-18")
def test_clocks_an_hour_apart_break_no_claim_and_are_warned_about(stage: Stage) -> None:
    right = stage.start("work", host="right")
    calls = [("sleep", [BODY_S], {})] * TASKS + [("add", [1, 2], {"delay_s": 1.0})]
    *ids, delayed = stage.start("enqueue", host="ahead", shift_s=HOUR_S, calls=calls).answer()
    wait_until(lambda: len(stage.events("ended")) >= 2 and len(stage.events("began")) >= 4)
    right.kill()
    running = {each.head.id for each in stage.queue.tasks(frozenset({Status.CLAIMED}))}
    behind = stage.start("work", host="behind", shift_s=-HOUR_S)
    wait_until(lambda: stage.statuses() == {Status.COMPLETED: TASKS, Status.WAITING: 1})
    _see_that_claims_are_right(stage, set(ids), running)

    assert stage.queue.get(delayed).state.status is Status.WAITING, "it waits for an hour of this clock"
    behind.kill()
    stage.start("work", host="ahead", shift_s=HOUR_S)
    assert stage.queue.wait(delayed, PATIENCE_S) == 3, "on its producer's clock it is due"

    for worker, ahead_s in ((right, HOUR_S), (behind, 2 * HOUR_S)):
        (warning,) = worker.logged("clock_far_off")
        assert (warning["level"], warning["limit_s"]) == ("warning", MAX_SKEW_S)
        assert warning["ahead_s"] == pytest.approx(ahead_s, abs=120.0)
        assert warning["host"] == ids[0][24:36]


def _see_that_claims_are_right(stage: Stage, ids: set[str], running: set[str]) -> None:
    """Each claim number of a task once, and the next one only after the time of the one before."""
    claims = defaultdict(list)
    for each in stage.events("began"):
        claims[each["task"]].append((each["number"], each["token"], each["at"]))
    assert set(claims) == ids
    assert {task for task, tries in claims.items() if len(tries) > 1} <= running
    for tries in claims.values():
        for (number, token, at), (later_number, later_token, later_at) in itertools.pairwise(tries):
            assert number < later_number
            assert token < later_token
            assert later_at - at >= CLAIM_TTL_S


@pytest.mark.rule("SK-18")
def test_a_delay_that_was_counted_on_a_clock_that_is_behind_is_cut_short(stage: Stage) -> None:
    calls = [("add", [1, 2], {"delay_s": HOUR_S / 2})]
    (task,) = stage.start("enqueue", host="behind", shift_s=-HOUR_S, calls=calls).answer()
    worker = stage.start("work", host="right")
    assert stage.queue.wait(task, PATIENCE_S) == 3, "as the documentation says"
    assert worker.logged("clock_far_off") == [], "one id that comes late proves nothing"
