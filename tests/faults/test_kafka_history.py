"""The history on a real Kafka whose broker stops, is away or is slow; and read back by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.group.messages import FactKind
from rebalanser.errors import InvalidUrl, RegistryRefused, RegistryUnavailable
from rebalanser.history import GAP, Author, Event, Journal, Protocol, Record, UnreadableLine, UnreadableReason
from rebalanser.history.buffer import TOO_SLOW
from rebalanser.testing.servers import free_ports
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_kafka.history import PARTITIONS, SETTINGS, KafkaSink, connection_of, open_sink
from rebalanser_kafka.history_source import open_source
from rebalanser_kafka.log import LogWriter
from rebalanser_kafka.topics import TopicSpec, describe, ensure_topics

if TYPE_CHECKING:
    from rebalanser.testing.kafka_server import KafkaCluster

LONGEST_WRITE_S = 5.0 * patience_ratio()
"""Far above what taking in a record costs, far below any time that Kafka waits for."""
CLOSES_WITHIN_S = 2.0
"""Limit given to a close that cannot deliver everything."""


def record(sequence: int, process: str = "w-p", detail: str = "") -> Record:
    event = Event(FactKind.BARRIER_ADDED, "w-1", resource=f"partition-{sequence}", detail={"error": detail})
    author = Author(Protocol.GROUP, "orders", process, "w")
    return Record.of(author, event, sequence=sequence, wall=1.7e9 + sequence, monotonic=float(sequence))


def read(url: str) -> list[Record | UnreadableLine]:
    source = open_source(url, PATIENCE_S)
    try:
        return list(source.read(growing=False))
    finally:
        source.close()


def records(url: str) -> list[Record]:
    items = read(url)
    assert all(isinstance(item, Record) for item in items), items
    return [item for item in items if isinstance(item, Record)]


def accounted(found: list[Record]) -> list[int]:
    """The sequence numbers that the records, each counted once, and the gaps among them stand for."""
    numbers: list[int] = []
    for item in {each.sequence: each for each in found}.values():
        if item.kind == GAP:
            first, last = item.detail["first"], item.detail["last"]
            assert isinstance(first, int)
            assert isinstance(last, int)
            assert item.detail["dropped"] == last - first + 1
            numbers += range(first, last + 1)
        else:
            numbers.append(item.sequence)
    return numbers


def make_topic(url: str, settings: dict[str, str]) -> None:
    connection = connection_of(url)
    spec = TopicSpec(connection.cluster, 1, settings, must_match=frozenset(settings))
    ensure_topics(connection, [spec], PATIENCE_S)


@pytest.fixture
def url(kafka: KafkaCluster) -> str:
    return kafka.url(f"history-{uuid.uuid4().hex}")


@pytest.mark.rule("AU-1")
def test_records_of_each_process_stay_in_order_in_one_partition(url: str) -> None:
    sink = open_sink(url, "orders", "w")
    for sequence in range(2_000):
        for process in ("a", "b", "c"):
            sink.write(record(sequence, process))
    sink.close(PATIENCE_S)
    topic = connection_of(url).cluster
    assert describe(connection_of(url), [topic], PATIENCE_S)[topic].partitions == PARTITIONS
    found = records(url)
    assert len(found) == 6_000
    for process in ("a", "b", "c"):
        assert [item.sequence for item in found if item.process == process] == list(range(2_000))
    assert [item.wall_time for item in found] == sorted(item.wall_time for item in found), "merged by time"


def test_a_journal_writes_to_the_topic_what_it_would_write_to_a_file(url: str) -> None:
    sink = open_sink(url, "orders", "w")
    journal = Journal(
        Author(Protocol.GROUP, "orders", "p", "w"), sink, wall=lambda: 1.7e9, monotonic=lambda: 1.0
    )
    journal.write(Event(FactKind.START_ENTERED, "w-1", resource="ü\n", token=7))
    journal.close(PATIENCE_S)
    (found,) = records(url)
    assert (found.kind, found.resource, found.token, found.sequence) == ("start_entered", "ü\n", 7, 0)


def test_the_topic_is_made_as_documented_and_an_existing_one_taken_as_it_is(
    url: str, kafka: KafkaCluster
) -> None:
    open_sink(url, "orders", "w").close(PATIENCE_S)
    with pytest.raises(RegistryRefused, match="there is no topic"):
        read(url)
    sink = open_sink(url, "orders", "w")
    sink.write(record(0))
    sink.close(PATIENCE_S)
    topic = connection_of(url).cluster
    made = describe(connection_of(url), [topic], PATIENCE_S)[topic]
    assert {name: made.settings[name] for name in SETTINGS} == dict(SETTINGS)

    other = kafka.url(f"history-{uuid.uuid4().hex}")
    topic = connection_of(other).cluster
    make_topic(other, {})
    sink = open_sink(other, "orders", "w")
    sink.write(record(0))
    sink.close(PATIENCE_S)
    assert records(other) == [record(0)]
    assert describe(connection_of(other), [topic], PATIENCE_S)[topic].partitions == 1


@pytest.mark.rule("AU-2")
def test_a_broker_that_is_killed_and_restarted_costs_no_record(url: str, kafka: KafkaCluster) -> None:
    sink = KafkaSink(connection_of(url), "orders", "w", queue_size=50_000)
    restarting = threading.Thread(target=kafka.restart, args=(0,))
    meanwhile = 0
    for sequence in range(20_000):
        if sequence == 5_000:
            wait_until(lambda: bool(read_or_nothing(url)))
            restarting.start()
        sink.write(record(sequence))
        meanwhile += restarting.is_alive()
        if sequence % 100 == 0:
            time.sleep(0.01)
    restarting.join()
    sink.close(PATIENCE_S)
    assert sink.dropped == 0
    assert sorted(accounted(records(url))) == list(range(20_000))
    assert meanwhile > 1_000, "writing goes on while the broker is away"


def read_or_nothing(url: str) -> list[Record | UnreadableLine]:
    try:
        return read(url)
    except RegistryRefused:
        return []


@pytest.mark.rule("AU-2")
def test_what_the_queue_has_no_room_for_is_a_gap_with_the_right_numbers(
    url: str, kafka: KafkaCluster
) -> None:
    sink = KafkaSink(connection_of(url), "orders", "w", queue_size=50)
    sink.write(record(0))
    wait_until(lambda: bool(read_or_nothing(url)))
    kafka.kill(0)
    try:
        sink.write(record(1))
        wait_until(lambda: not sink._waiting._records, "that one is under way, and stays so")
        wait_until(lambda: sink._waiting.reason != TOO_SLOW, "the sink knows that the broker is away")
        longest_s = 0.0
        for sequence in range(2, 1_002):
            began = time.monotonic()
            sink.write(record(sequence))
            longest_s = max(longest_s, time.monotonic() - began)
    finally:
        kafka.restart(0)
    assert longest_s < LONGEST_WRITE_S
    assert sink.dropped == 950
    wait_until(lambda: any(isinstance(item, Record) and item.kind == GAP for item in read(url)))
    sink.write(record(1_002))
    sink.close(PATIENCE_S)
    found = records(url)
    assert [item.sequence for item in found] == [*range(53), 1_002]
    gap = found[52]
    assert gap.kind == GAP
    assert gap.detail.pop("reason") != TOO_SLOW
    assert gap.detail == {"dropped": 950, "first": 52, "last": 1_001}
    assert accounted(found) == list(range(1_003))


def test_a_broker_that_is_away_from_the_start_is_waited_for(url: str, kafka: KafkaCluster) -> None:
    kafka.kill(0)
    try:
        sink = KafkaSink(connection_of(url), "orders", "w")
        for sequence in range(100):
            sink.write(record(sequence))
    finally:
        kafka.restart(0)
    sink.close(PATIENCE_S)
    assert [item.sequence for item in records(url)] == list(range(100))


def test_close_takes_no_longer_than_it_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (port,) = free_ports(1)
    sink = KafkaSink(connection_of(f"kafka://127.0.0.1:{port}/history"), "orders", "w")
    for sequence in range(10):
        sink.write(record(sequence))
    began = time.monotonic()
    sink.close(CLOSES_WITHIN_S)
    assert time.monotonic() - began < CLOSES_WITHIN_S + LONGEST_WRITE_S
    wait_until(lambda: sink.dropped == 10)
    sink.write(record(10))
    assert sink.dropped == 11
    sink.close(CLOSES_WITHIN_S)
    assert any(getattr(each, "action", "").startswith("history_") for each in caplog.records)


def test_a_silent_broker_holds_up_neither_write_nor_close(url: str, kafka: KafkaCluster) -> None:
    sink = KafkaSink(connection_of(url), "orders", "w", queue_size=100)
    sink.write(record(0))
    wait_until(lambda: bool(read_or_nothing(url)))
    kafka.pause(0)
    try:
        began = time.monotonic()
        for sequence in range(1, 1_000):
            sink.write(record(sequence))
        assert time.monotonic() - began < LONGEST_WRITE_S
        sink.close(CLOSES_WITHIN_S)
        assert time.monotonic() - began < 2 * LONGEST_WRITE_S + CLOSES_WITHIN_S
        assert sink.dropped > 0
    finally:
        kafka.resume(0)
        kafka.wait_ready()


def test_a_record_that_the_topic_never_takes_is_a_gap(url: str) -> None:
    make_topic(url, {"max.message.bytes": "1500"})
    sink = KafkaSink(connection_of(url), "orders", "w")
    sink.write(record(0, detail=os.urandom(1_800).hex()))
    wait_until(lambda: bool(read_or_nothing(url)))
    sink.write(record(1))
    sink.close(PATIENCE_S)
    gap, other = records(url)
    assert gap.detail == {
        "dropped": 1,
        "first": 0,
        "last": 0,
        "reason": "the topic takes no record of this size",
    }
    assert other == record(1)
    assert sink.dropped == 1


@pytest.mark.parametrize(
    ("url", "fragment"),
    [
        ("kafka://127.0.0.1:9092", "names no topic"),
        ("kafka://127.0.0.1:9092/a%20b", "cannot name a topic"),
        ("kafka://127.0.0.1:9092/a?acks=0", "acks"),
        ("kafka://127.0.0.1:9092/a?security.protocol=nonsense", "NONSENSE"),
        ("etcd://127.0.0.1:9092/a", "names no topic"),
    ],
)
def test_what_no_waiting_would_mend_is_said_at_once(url: str, fragment: str) -> None:
    with pytest.raises(InvalidUrl, match=fragment):
        open_sink(url, "orders", "w")


@pytest.mark.rule("AU-1")
def test_what_is_no_record_is_told_with_its_partition_and_offset(url: str) -> None:
    sink = open_sink(url, "orders", "w")
    sink.write(record(0))
    sink.close(PATIENCE_S)
    connection = connection_of(url)
    with LogWriter(connection) as writer:
        offsets = [
            writer.append_and_wait(connection.cluster, None, value, timeout_s=PATIENCE_S, partition=2)
            for value in (b"{torn", b"{}", None)
        ]
    bad = [item for item in read(url) if isinstance(item, UnreadableLine)]
    assert [(str(item.file), item.line) for item in bad] == [
        (f"{connection.cluster}/2", offset) for offset in offsets
    ]
    assert [item.reason for item in bad] == [
        UnreadableReason.NOT_JSON,
        UnreadableReason.NOT_A_RECORD,
        UnreadableReason.NOT_JSON,
    ]


def test_a_broker_that_falls_silent_ends_the_reading(url: str, kafka: KafkaCluster) -> None:
    sink = open_sink(url, "orders", "w")
    sink.write(record(0))
    sink.close(PATIENCE_S)
    source = open_source(url, 2.0)
    kafka.pause(0)
    try:
        with pytest.raises(RegistryUnavailable):
            list(source.read(growing=False))
    finally:
        source.close()
        kafka.resume(0)
        kafka.wait_ready()


class Shell:
    """The command line in a process of its own."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rebalanser", "history", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def following(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rebalanser", "history", "tail", "--follow", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def filled(url: str) -> str:
    sink = open_sink(url, "orders", "w")
    for sequence in range(30):
        sink.write(record(sequence, f"p{sequence % 3}"))
    sink.close(PATIENCE_S)
    return url


def test_the_command_line_reads_counts_and_exports_a_topic(filled: str, tmp_path: Path) -> None:
    shell = Shell()
    shown = shell.run("tail", filled, "--resource", "partition-7")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "orders/w  barrier_added  partition-7" in shown.stdout
    counted = json.loads(shell.run("stats", filled, "--json").stdout)
    assert counted["records"] == 30
    assert counted["nodes"][0]["processes"] == 3
    done = shell.run("export", filled, "--to", str(tmp_path / "out.jsonl"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert lines == [record(sequence, f"p{sequence % 3}").to_line() for sequence in range(30)]


def test_following_a_topic_shows_what_comes_and_ends_by_ctrl_c(filled: str) -> None:
    with Shell().following(filled, "--json", "--last", "1") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["sequence"] == 29
        sink = open_sink(filled, "orders", "w")
        sink.write(record(99))
        sink.close(PATIENCE_S)
        assert json.loads(process.stdout.readline())["sequence"] == 99
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130


def test_a_wrong_address_is_told_within_a_few_seconds() -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    answer = Shell().run("tail", f"kafka://127.0.0.1:{port}/history")
    assert answer.returncode == 4
    assert answer.stderr.startswith("error: kafka://127.0.0.1:")
    assert "does not answer" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert time.monotonic() - began < 20.0 * patience_ratio()


def test_the_documentation_names_the_settings_of_the_topic() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "kafka.md").read_text()
    for name, value in SETTINGS.items():
        assert f"| `{name}` | `{value}` |" in text
    assert f"with {PARTITIONS} partitions" in text
