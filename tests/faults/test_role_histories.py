"""The histories that Shiva's processes and NELI's write on a real Kafka, read back after one of them died."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rebalanser.core.neli.settings import NeliSettings
from rebalanser.core.shiva.messages import FactKind
from rebalanser.core.shiva.types import ApplicationId, Mode
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import InternalError
from rebalanser.history import KINDS, UNLIMITED_S, HistoryStep, MemorySink, Record, read_records
from rebalanser.neli import Neli
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from support.shiva_cluster import Process, ShivaCluster

if TYPE_CHECKING:
    from rebalanser.core.shiva.messages import Stop
    from rebalanser_kafka.shiva.worker import KafkaWorker

SESSION_S = 2.0


def histories(folder: Path) -> dict[str, list[Record]]:
    """What stands in the folder, by process, in the order in which each wrote it.

    A number that is missing would be a record that was dropped.
    """
    found: dict[str, list[Record]] = defaultdict(list)
    for record in read_records(folder):
        assert isinstance(record, Record), record
        found[record.process].append(record)
    for process, records in found.items():
        assert [record.sequence for record in records] == list(range(len(records))), process
        late = {"fenced", "process_exited"}
        walls = [record.monotonic_time for record in records if record.kind not in late]
        assert walls == sorted(walls)
    return found


def step(record: Record) -> HistoryStep | None:
    return KINDS[record.protocol][record.kind].step


def kinds(folder: Path) -> list[str]:
    """What has been written so far, while it may still be written."""
    records = read_records(folder) if folder.exists() else []
    return [record.kind for record in records if isinstance(record, Record)]


def accesses(records: list[Record]) -> dict[tuple[str, int], list[HistoryStep]]:
    """The steps of each access, by resource and token."""
    found: dict[tuple[str, int], list[HistoryStep]] = defaultdict(list)
    for record in records:
        its_step = step(record)
        if record.resource is not None and its_step is not None:
            assert record.token is not None
            found[record.resource, record.token].append(its_step)
    return found


def first(records: list[Record], wanted: HistoryStep) -> Record:
    return next(record for record in records if step(record) is wanted)


@pytest.fixture
def shiva(kafka_address: str, tmp_path: Path) -> Iterator[ShivaCluster]:
    with ShivaCluster(kafka_address, tmp_path) as cluster:
        yield cluster


def history_of(cluster: ShivaCluster) -> Path:
    return cluster.folder / "history"


@pytest.mark.rule("AU-2", "AU-3", "SH-7", "SH-13")
def test_a_cluster_whose_worker_is_killed(shiva: ShivaCluster) -> None:
    """Every access of a live process ends, those of the killed one stay open."""
    shiva.round_s = 1.5
    options = ("--history", str(history_of(shiva)))
    leader = shiva.leader("leader-1", *options)
    workers = shiva.workers("worker-1", "worker-2", options=options)
    shiva.start("t/c/web")
    shiva.start("t/c/mail", shiva.application("mail", stop_timeout_s=0.3), mode=Mode.EXCLUSIVE)
    killed = shiva.running("t/c/web").worker or ""
    shiva.running("t/c/mail")
    [heir] = workers.keys() - {killed}
    workers[killed].kill()
    shiva.running("t/c/web", heir)
    shiva.running("t/c/mail", heir)
    shiva.cluster.stop(ApplicationId.parse("t/c/mail"))
    shiva.gone("t/c/mail")
    for process in (workers[heir], leader):
        assert process.terminate() == 0
    written = histories(history_of(shiva))
    by_label = {records[0].label: records for records in written.values()}
    assert len(written) == 3
    assert {record.group for records in written.values() for record in records} == {shiva.name}

    opened = [
        steps for steps in accesses(by_label[killed]).values() if HistoryStep.STOP_RETURNED not in steps
    ]
    assert opened
    whole = accesses(by_label[heir])
    assert {resource for resource, _ in whole} == {"t/c/web", "t/c/mail"}
    for steps in whole.values():  # a round that is missed has a process stopped before it has started
        assert steps[0] is HistoryStep.START_ENTERED
        assert set(steps[1:-2]) <= {HistoryStep.START_RETURNED}
        assert steps[-2:] == [HistoryStep.STOP_ENTERED, HistoryStep.STOP_RETURNED]
    last = [  # a worker that missed rounds before the kill may have had earlier ones
        max(token for resource, token in accesses(by_label[name]) if resource == "t/c/web")
        for name in (killed, heir)
    ]
    assert last[0] < last[1]
    starts = [record for record in by_label[heir] if step(record) is HistoryStep.START_ENTERED]
    limits = {record.resource: record.overlap_limit_s for record in starts}
    assert limits["t/c/web"] == UNLIMITED_S
    assert limits["t/c/mail"] is None

    elected = first(by_label["leader-1"], HistoryStep.ELECTED)
    documents = {
        record.value: record for record in by_label["leader-1"] if step(record) is HistoryStep.PUBLISHED
    }
    assert {record.term for record in documents.values()} == {elected.term}
    for name in workers:
        adopted = [record for record in by_label[name] if step(record) is HistoryStep.ADOPTED]
        assert {record.version for record in adopted} <= documents.keys()
        assert [record.version for record in adopted] == sorted({record.version for record in adopted})
        assert all(record.node == record.process for record in by_label[name])


@pytest.mark.rule("AU-2", "SH-7")
def test_a_daemon_writes_one_history_as_leader_and_one_as_worker(shiva: ShivaCluster) -> None:
    daemon = shiva.daemon("daemon-1", "--history", str(history_of(shiva)))
    shiva.start()
    shiva.running()
    assert daemon.terminate() == 0
    written = histories(history_of(shiva))
    assert [records[0].label for records in written.values()] == ["daemon-1", "daemon-1"]
    steps = [{step(record) for record in records} for records in written.values()]
    assert sorted(HistoryStep.ELECTED in each for each in steps) == [False, True]
    assert sorted(HistoryStep.STOP_RETURNED in each for each in steps) == [False, True]


@pytest.mark.rule("AU-3", "SH-17")
def test_a_worker_that_ends_by_a_fault_writes_that_its_processes_have_ended(shiva: ShivaCluster) -> None:
    shiva.leader()
    sink = MemorySink()
    worker = shiva.cluster.run_worker("worker-1", shiva.data("worker-1"), WorkerOptions(), sink)
    shiva.start()
    shiva.running()
    cast("KafkaWorker", worker)._items.put(cast("Stop", object()))
    with pytest.raises(InternalError):
        worker.wait(PATIENCE_S)
    assert sink.closed
    assert sink.records[-1].kind == FactKind.PROCESS_EXITED
    assert sink.records[-1].token == first(sink.records, HistoryStep.START_ENTERED).token
    assert not shiva.processes_of("worker-1")


def member(kafka: str, topic: str, history: Path, folder: Path, name: str) -> Process:
    """``rebalanser neli run`` with a history."""
    command = ("neli", "run", topic, "office", "--roles", "billing,mail", "--partitions", "2")
    options = ("--session-timeout", str(SESSION_S), "--json", "--history", str(history))
    return ShivaCluster(kafka, folder).launch(name, *command, *options)


def induced(process: Process) -> set[str]:
    """The roles that a process has said it leads."""
    events = [json.loads(line) for line in process.said.splitlines() if line.startswith("{")]
    return {event["role"] for event in events if event["event"] == "induced"}


@pytest.mark.rule("AU-2", "AU-3", "NE-10", "NE-15")
def test_members_of_which_one_is_killed_and_one_leaves(kafka_address: str, tmp_path: Path) -> None:
    topic, history = f"neli-{uuid.uuid4().hex}", tmp_path / "history"
    doomed = member(kafka_address, topic, history, tmp_path, "doomed")
    wait_until(lambda: induced(doomed) == {"billing", "mail"}, "it leads everything")
    # What was told in the last moments before a SIGKILL may be missing: that is the sink's promise.
    wait_until(lambda: kinds(history).count("induced") == 2, "its history says so")
    doomed.kill()
    heir = member(kafka_address, topic, history, tmp_path, "heir")
    try:
        wait_until(lambda: induced(heir) == {"billing", "mail"}, "its heir leads everything")
        heir.interrupt()
        assert heir.wait() == 0
    finally:
        heir.kill()
    written = sorted(histories(history).values(), key=lambda records: records[0].monotonic_time)
    assert [records[0].group for records in written] == [f"{topic}/office"] * 2
    killed, left = map(accesses, written)
    assert {resource for resource, _ in killed} == {resource for resource, _ in left} == {"0", "1"}
    assert set(map(tuple, killed.values())) == {(HistoryStep.START_ENTERED,)}
    assert set(map(tuple, left.values())) == {
        (HistoryStep.START_ENTERED, HistoryStep.STOP_ENTERED, HistoryStep.STOP_RETURNED)
    }
    assert all(dict(left.keys())[resource] > token for resource, token in killed)
    roles = {record.detail["roles"] for record in written[1] if step(record) is HistoryStep.START_ENTERED}
    assert roles == {"billing", "mail"}


@pytest.mark.rule("AU-3", "NE-4", "NE-7")
def test_leadership_that_ended_while_its_process_was_stopped_is_written_as_of_then(
    kafka_address: str, tmp_path: Path
) -> None:
    """Otherwise the audit would find two leaders where there was one."""
    topic, history = f"neli-{uuid.uuid4().hex}", tmp_path / "history"
    stopped = member(kafka_address, topic, history, tmp_path, "stopped")
    wait_until(lambda: induced(stopped) == {"billing", "mail"}, "it leads everything")
    stopped.pause()
    settings = NeliSettings(session_timeout_s=SESSION_S, max_poll_interval_s=10.0)
    with Neli(
        topic, "office", ["billing", "mail"], kafka=kafka_address, settings=settings, history_dir=history
    ) as heir:
        assert heir.wait_leader("billing", PATIENCE_S)
        assert heir.wait_leader("mail", PATIENCE_S)
        stopped.resume()
        wait_until(lambda: "fenced" in stopped.said, "it has noticed")
        wait_until(lambda: "fenced" in kinds(history), "its history says so")
    stopped.kill()
    first_written, second_written = sorted(
        histories(history).values(), key=lambda records: records[0].monotonic_time
    )
    ends = [record for record in first_written if record.kind == "fenced"]
    begins = {
        record.resource: record for record in second_written if step(record) is HistoryStep.START_ENTERED
    }
    assert {record.resource for record in ends} == {"0", "1"}
    for record in ends:
        assert isinstance(record.detail["late_s"], float)
        assert record.monotonic_time < begins[record.resource].monotonic_time
        assert record.wall_time < begins[record.resource].wall_time


@pytest.mark.rule("AU-3", "SH-14")
def test_an_exclusive_application_of_a_stopped_worker_has_ended_before_its_successor_began(
    shiva: ShivaCluster,
) -> None:
    """Its shim kills it at its deadline, and the worker hears of that when it goes on."""
    shiva.round_s = 1.5
    options = ("--history", str(history_of(shiva)))
    leader = shiva.leader("leader-1", *options)
    workers = shiva.workers("worker-1", "worker-2", options=options)
    shiva.start(source=shiva.application(stop_timeout_s=0.3), mode=Mode.EXCLUSIVE)
    stopped = shiva.running().worker or ""
    [heir] = workers.keys() - {stopped}
    workers[stopped].pause()
    shiva.running(worker=heir)
    workers[stopped].resume()
    workers[stopped].says("process exited")
    for process in (*workers.values(), leader):
        assert process.terminate() == 0
    by_label = {records[0].label: records for records in histories(history_of(shiva)).values()}
    ended = first(by_label[stopped], HistoryStep.STOP_RETURNED)
    begun = first(by_label[heir], HistoryStep.START_ENTERED)
    assert ended.monotonic_time < begun.monotonic_time
    assert ended.wall_time < begun.wall_time
