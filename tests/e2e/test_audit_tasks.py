"""The audit of what the workers of a queue wrote, one of which was killed, as it is and edited."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.cli import main
from rebalanser.history import Protocol, Record, SkuldKind, read_records
from rebalanser.tasks import Queue, Status
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.testing.waiting import wait_until
from support.shiva_cluster import Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("spark")]

PROGRAM = """
import os, time
from pathlib import Path
from rebalanser import Settings
from rebalanser.tasks import Claim, Queue

here = Path(__file__).parent
tasks = Queue(
    "count", os.environ["ENGINE"], claim_ttl_s=2.0, partitions=2, state_folder=here / "state",
    settings=Settings(lease_ttl_s=2.0, history_dir=here / "history"),
)

@tasks.task(retries=10)
def count(claim: Claim, to: int) -> int:
    for number in range(to):
        claim.update(str(number).encode())
        time.sleep(0.05)
    return to
"""
TASKS = 6
UPDATES = 30


@dataclass(frozen=True)
class Played:
    """The history of two workers, the first of which was killed, and what the queue was then."""

    history: Path
    killed: str
    statuses: dict[Status, int]

    def records(self) -> list[Record]:
        """What the workers wrote of their claims."""
        return [record for record in everything(self.history) if record.protocol is Protocol.SKULD]


def everything(history: Path) -> list[Record]:
    """All records so far, of the queue's group too, in the order in which each process wrote them."""
    items = list(read_records(history)) if history.exists() else []
    return [item for item in items if isinstance(item, Record)]


def claims_of(history: Path, kind: SkuldKind) -> set[tuple[str, str | None]]:
    """Which process wrote such a record of which task."""
    return {(record.process, record.resource) for record in everything(history) if record.kind == kind}


@pytest.fixture(scope="module", params=["sqlite", "etcd"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("tasks")
    url = (
        f"sqlite:///{folder / 'tasks.db'}"
        if request.param == "sqlite"
        else request.getfixturevalue("etcd_url")
    )
    (folder / "counting.py").write_text(PROGRAM)
    history = folder / "history"
    with ExitStack() as stack:
        queue = stack.enter_context(Queue("count", url, partitions=2, state_folder=folder / "producer"))

        def worker(name: str) -> Process:
            command = [sys.executable, "-m", "rebalanser", "tasks", "worker", "counting:tasks"]
            environment = {**os.environ, "ENGINE": url, "PYTHONPATH": str(folder)}
            started = Process([*command, "--concurrency", "2"], environment, folder / f"{name}.log")
            stack.callback(started.kill)
            return started

        doomed = worker("doomed")
        payload = json.dumps({"to": UPDATES}).encode()
        options = [
            queue.build_raw_enqueue("count", payload, EnqueueOptions(), retries=10) for _ in range(TASKS)
        ]
        queue.commit(options)
        wait_until(lambda: len(claims_of(history, SkuldKind.UPDATED)) >= 2, "it works on two tasks")
        [(killed, _), *_] = claims_of(history, SkuldKind.CLAIMED)
        heir = worker("heir")
        doomed.kill()
        wait_until(lambda: queue.count().get(Status.COMPLETED, 0) == TASKS, "its heir completes them")
        assert heir.terminate() == 0
        yield Played(history, killed, dict(queue.count()))


def audit(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    """The verdict of ``rebalanser audit``, on the session that is there."""
    code = main(["audit", str(folder), "--json"])
    told = capsys.readouterr()
    assert (code, told.err) == (0, ""), told
    verdict: dict[str, Any] = json.loads(told.out)["verdict"]
    return verdict


@pytest.mark.rule("AU-2", "AU-4", "SK-6", "SK-9", "SK-17")
def test_what_the_workers_wrote_is_sound(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed worker's claims have no end, and that is no second claim, no gap and no doubt."""
    records = played.records()
    assert {record.process for record in records} > {played.killed}
    assert len({record.process for record in records}) == 2
    completed = [record for record in records if record.kind == SkuldKind.COMPLETED]
    assert len(completed) == len({record.resource for record in completed}) == TASKS
    verdict = audit(capsys, played.history)
    assert verdict["conclusion"] == "sound", verdict
    assert verdict["records"] == len(everything(played.history))
    assert (verdict["missing"], verdict["duplicates"], verdict["unread"]) == (0, 0, [])


@pytest.mark.rule("AU-2", "AU-4", "SK-6", "SK-9", "SK-10")
def test_what_was_edited_is_refuted(
    played: Played, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    records = played.records()
    again = next(r for r in records if r.process == played.killed and r.kind == SkuldKind.UPDATED)
    write(tmp_path, "twice", claimed_by_both(records, again))
    write(tmp_path, "skipped", without_an_update(records))
    write(tmp_path, "stale", written_too_late(records, again))
    verdict = audit(capsys, tmp_path)
    assert verdict["conclusion"] == "refuted"
    certain = {
        (found["group"], found["kind"], found["rule"])
        for found in verdict["worst"]
        if found["certainty"] == "certain"
    }
    assert certain >= {
        ("twice", "claim_twice", "SK-6"),
        ("skipped", "update_gap", "SK-9"),
        ("stale", "stale_write", "SK-10"),
    }
    assert {(group, kind) for group, kind, _ in certain} <= {
        ("twice", "claim_twice"),
        ("twice", "overlap"),
        ("skipped", "update_gap"),
        ("stale", "stale_write"),
    }


def write(folder: Path, group: str, records: Iterable[Record]) -> None:
    """The records as the history of another queue, of workers of other names."""
    renamed = [
        record.model_copy(update={"group": group, "process": f"{group} {record.process}"})
        for record in records
    ]
    (folder / f"{group}.jsonl").write_bytes(b"".join(record.to_line() for record in renamed))


def claimed_by_both(records: Sequence[Record], first: Record) -> list[Record]:
    """The heir's claim of a task has the number that the killed worker's had."""
    number = next(
        r.value
        for r in records
        if (r.process, r.resource, r.kind) == (first.process, first.resource, SkuldKind.CLAIMED)
    )
    return [
        record.model_copy(update={"value": number})
        if (record.resource, record.kind) == (first.resource, SkuldKind.CLAIMED)
        else record
        for record in records
    ]


def without_an_update(records: Sequence[Record]) -> list[Record]:
    """An update in the middle of a claim has another number than it had."""
    changed = next(record for record in records if record.kind == SkuldKind.UPDATED and record.value == 1)
    return [
        record.model_copy(update={"value": UPDATES + 1}) if record == changed else record
        for record in records
    ]


def written_too_late(records: Sequence[Record], first: Record) -> list[Record]:
    """An update of the killed worker was accepted after all that is known."""
    last = max(record.revision or 0 for record in records)
    return [
        record.model_copy(update={"revision": last + 1}) if record == first else record for record in records
    ]
