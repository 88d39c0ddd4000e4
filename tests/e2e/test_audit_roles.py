"""The audit of what Shiva's and NELI's own processes wrote on a real Kafka, to files and to a topic."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.cli import main
from rebalanser.core.shiva.types import ApplicationId, Mode
from rebalanser.history import KINDS, HistoryStep, Record, read_records
from rebalanser.testing.waiting import wait_until
from support.shiva_cluster import ShivaCluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SESSION_S = 2.0
SENT_S = 1.0
"""After so long what a process has told is on the topic too, so that killing it takes nothing away."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("spark_kafka")]


@dataclass(frozen=True)
class Played:
    """What processes did, one of which was killed: their history in a folder and, the same, in a topic."""

    folder: Path
    topic: str

    @property
    def options(self) -> tuple[str, ...]:
        """What makes a command write both."""
        return ("--history", str(self.folder), "--history-topic", self.topic)

    def records(self) -> list[Record]:
        """All that stands in the folder so far, in the order in which each process wrote it."""
        items = list(read_records(self.folder)) if self.folder.exists() else []
        assert all(isinstance(item, Record) for item in items), items
        return [item for item in items if isinstance(item, Record)]

    def steps(self, wanted: HistoryStep) -> list[Record]:
        return [record for record in self.records() if step(record) is wanted]

    def accesses_of(self, resource: str | None) -> list[Record]:
        """The beginnings of the accesses to a resource."""
        return [record for record in self.steps(HistoryStep.START_ENTERED) if record.resource == resource]

    def without_end(self) -> list[Record]:
        """The beginnings of the accesses that the killed process did not end."""
        ended = {(record.process, record.token) for record in self.steps(HistoryStep.STOP_RETURNED)}
        return [r for r in self.steps(HistoryStep.START_ENTERED) if (r.process, r.token) not in ended]


def step(record: Record) -> HistoryStep | None:
    return KINDS[record.protocol][record.kind].step


def token_of(record: Record) -> int:
    assert record.token is not None
    return record.token


def where(folder: Path, cluster: ShivaCluster) -> Played:
    return Played(folder / "history", f"kafka://{cluster.kafka}/history-{uuid.uuid4().hex}")


@pytest.fixture(scope="module")
def shiva(kafka_address: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A leader and two workers; the one that runs ``t/c/web`` is killed, the other takes over and stops."""
    folder = tmp_path_factory.mktemp("shiva")
    with ShivaCluster(kafka_address, folder, round_s=1.5) as cluster:
        played = where(folder, cluster)
        leader = cluster.leader("leader-1", *played.options)
        workers = cluster.workers("worker-1", "worker-2", options=played.options)
        for name in ("web", "mail"):
            source = cluster.application(name, stop_timeout_s=0.3)
            cluster.start(f"t/c/{name}", source, mode=Mode.EXCLUSIVE)
        killed = cluster.running("t/c/web").worker or ""
        cluster.running("t/c/mail")
        # What was told in the last moments before a SIGKILL may be missing: that is the sink's promise.
        wait_until(
            lambda: len({each.resource for each in played.steps(HistoryStep.START_RETURNED)}) == 2,
            "the history says so",
        )
        time.sleep(SENT_S)
        [heir] = workers.keys() - {killed}
        workers[killed].kill()
        cluster.running("t/c/web", heir)
        cluster.running("t/c/mail", heir)
        cluster.cluster.stop(ApplicationId.parse("t/c/mail"))
        cluster.gone("t/c/mail")
        for process in (workers[heir], leader):
            assert process.terminate() == 0
    return played


@pytest.fixture(scope="module")
def neli(kafka_address: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The leader of two roles is killed; the next one leads both until it leaves."""
    folder = tmp_path_factory.mktemp("neli")
    command = ("neli", "run", f"neli-{uuid.uuid4().hex}", "office", "--roles", "billing,mail")
    settings = ("--partitions", "2", "--session-timeout", str(SESSION_S))
    with ShivaCluster(kafka_address, folder) as cluster:
        played = where(folder, cluster)
        doomed = cluster.launch("doomed", *command, *settings, *played.options)
        wait_until(lambda: len(played.steps(HistoryStep.START_ENTERED)) >= 2, "it leads both")
        time.sleep(SENT_S)
        doomed.kill()
        heir = cluster.launch("heir", *command, *settings, *played.options)
        wait_until(lambda: len(played.steps(HistoryStep.START_ENTERED)) >= 4, "its heir leads both")
        assert heir.terminate() == 0
    return played


def audit(capsys: pytest.CaptureFixture[str], *places: Path | str) -> dict[str, Any]:
    """The verdict of ``rebalanser audit``, on the session that is there."""
    code = main(["audit", *map(str, places), "--json"])
    told = capsys.readouterr()
    assert (code, told.err) == (0, ""), told
    verdict: dict[str, Any] = json.loads(told.out)["verdict"]
    return verdict


@pytest.mark.rule("AU-1", "AU-2", "AU-4", "SH-7", "SH-13", "NE-10", "NE-15")
@pytest.mark.parametrize("kept", ["folder", "topic"])
@pytest.mark.parametrize(("protocol", "processes", "resources"), [("shiva", 3, 2), ("neli", 2, 2)])
def test_what_they_wrote_is_sound(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    protocol: str,
    processes: int,
    resources: int,
    kept: str,
) -> None:
    """A killed process leaves no end of its accesses, and that is no overlap, no gap and no doubt."""
    played: Played = request.getfixturevalue(protocol)
    verdict = audit(capsys, getattr(played, kept))
    assert verdict["conclusion"] == "sound", verdict
    assert verdict["records"] == len(played.records())
    assert (verdict["missing"], verdict["rotated"], verdict["unread"]) == (0, 0, [])
    assert verdict["accesses"] == len(played.steps(HistoryStep.START_ENTERED)) > resources
    assert (verdict["resources"], verdict["processes"]) == (resources, processes)


@pytest.mark.rule("AU-2", "AU-4", "SH-13")
def test_what_was_edited_is_refuted_and_what_was_taken_out_cannot_be_known(
    shiva: Played, neli: Played, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "shiva-edited.jsonl", earlier_heir(shiva), "shiva edited")
    for protocol, played in (("shiva", shiva), ("neli", neli)):
        write(tmp_path / f"{protocol}-shortened.jsonl", without_an_end(played), f"{protocol} shortened")
    verdict = audit(capsys, tmp_path)
    assert verdict["conclusion"] == "refuted"
    told = ("kind", "group", "rule", "certainty", "resource")
    assert {tuple(found[part] for part in told) for found in verdict["worst"]} == {
        ("overlap", "shiva edited", "SH-13", "certain", shiva.without_end()[0].resource),
    }
    assert {gap["group"]: gap["missing"] for gap in verdict["gaps"]} == {
        "shiva shortened": 1,
        "neli shortened": 1,
    }


def write(file: Path, records: Iterable[Record], group: str) -> None:
    """The records as the history of another group, of processes of other names."""
    renamed = [
        record.model_copy(update={"group": group, "process": f"{group} {record.process}"})
        for record in records
    ]
    file.write_bytes(b"".join(record.to_line() for record in renamed))


def earlier_heir(played: Played) -> Sequence[Record]:
    """The heir of one resource started while the killed process still wrote, after it had started itself."""
    records, first = played.records(), played.without_end()[0]
    last = max((r for r in records if r.process == first.process), key=lambda r: r.monotonic_time)
    later = [each for each in played.accesses_of(first.resource) if token_of(each) > token_of(first)]
    heir = min(later, key=token_of)
    assert first.monotonic_time < last.monotonic_time
    times = {
        "monotonic_time": (first.monotonic_time + last.monotonic_time) / 2,
        "wall_time": (first.wall_time + last.wall_time) / 2,
    }
    return [record.model_copy(update=times) if record == heir else record for record in records]


def without_an_end(played: Played) -> Sequence[Record]:
    """The record is missing that the last owner of one resource has stopped."""
    ended = max(played.steps(HistoryStep.STOP_RETURNED), key=token_of)
    assert token_of(ended) == max(map(token_of, played.accesses_of(ended.resource)))
    return [record for record in played.records() if record != ended]
