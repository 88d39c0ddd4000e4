"""Shiva's topics on a real Kafka: retention that really runs, poison, and what clients and brokers refuse."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
import threading
import uuid
import zipfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from rebalanser.cli import main
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import AssignmentDocument, StartCommand
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Incarnation,
    Mode,
    WorkerEntry,
)
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import (
    AccessDenied,
    InvalidName,
    InvalidSettings,
    RegistryRefused,
    RequestTooLarge,
)
from rebalanser.registry.urls import parse_url
from rebalanser.shiva import TopicNames, open_cluster
from rebalanser.shiva.archives import pack
from rebalanser.shiva.data_folder import DataFolder
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.log import LogReader, LogTruncated, LogWriter
from rebalanser_kafka.shiva import follower
from rebalanser_kafka.shiva import topics as shiva_topics
from rebalanser_kafka.shiva.parts import FileThreads
from rebalanser_kafka.shiva.wire import ASSIGNEMENT_KEY, PartKey, encode, key_of
from rebalanser_kafka.shiva.worker import KafkaWorker
from rebalanser_kafka.topics import describe
from support.shiva_cluster import ROUND_S, RUNS, ShivaCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rebalanser.shiva.manifest import Manifest


@pytest.fixture
def shiva(kafka_address: str, tmp_path: Path) -> Iterator[ShivaCluster]:
    with ShivaCluster(kafka_address, tmp_path) as cluster:
        yield cluster


def connection_of(shiva: ShivaCluster) -> Connection:
    return Connection.from_url(shiva.url)


def make_topic(shiva: ShivaCluster, kind: str, settings: Mapping[str, str], partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": shiva.kafka, "log_level": 0})
    topic = NewTopic(f"{shiva.name}-{kind}", partitions, 1, config=dict(settings))
    for made in admin.create_topics([topic]).values():
        made.result(PATIENCE_S)


def publish(shiva: ShivaCluster, name: str, archive: bytes) -> tuple[str, int]:
    """Publish a part and a start command as a client would that checks nothing.

    The part's key, and the offset of the command.
    """
    application = ApplicationId.parse(name)
    sha256 = hashlib.sha256(archive).hexdigest()
    start = StartCommand(application, uuid.uuid4().hex, Archive(sha256, len(archive), 1), Mode.AVAILABLE)
    part = str(PartKey(application, sha256, 0))
    append(shiva, part, archive)
    return part, append(shiva, key_of(start), encode(start))


def append(shiva: ShivaCluster, key: str, value: bytes) -> int:
    """Append a record to COMMAND; its offset."""
    with LogWriter(connection_of(shiva)) as writer:
        return writer.append_and_wait(f"{shiva.name}-command", key.encode(), value, timeout_s=PATIENCE_S)


def delete_before(shiva: ShivaCluster, offset: int) -> None:
    """Have the broker forget what COMMAND holds before an offset."""
    admin = AdminClient({"bootstrap.servers": shiva.kafka, "log_level": 0})
    places = [TopicPartition(f"{shiva.name}-command", 0, offset)]
    for deleted in admin.delete_records(places).values():
        deleted.result(PATIENCE_S)


def topic_end(shiva: ShivaCluster) -> int:
    """The offset behind the last record of COMMAND."""
    with LogReader(connection_of(shiva), f"{shiva.name}-command", "earliest") as reader:
        return reader.end_offset(PATIENCE_S)


def keys_before(shiva: ShivaCluster, offset: int) -> list[bytes]:
    """The keys of what COMMAND still holds before an offset."""
    keys: list[bytes] = []
    with LogReader(connection_of(shiva), f"{shiva.name}-command", "earliest") as reader:
        try:
            while reader.position < offset:
                keys += [record.key or b"" for record in reader.poll(1.0) if record.offset < offset]
        except LogTruncated:  # The broker deleted the start of the log between two reads.
            return keys_before(shiva, offset)
    return keys


def lag_of(shiva: ShivaCluster, reader: str) -> dict[str, int]:
    """The lag of a reader in its topics, as ``kafka-consumer-groups --describe`` computes it."""
    admin = AdminClient({"bootstrap.servers": shiva.kafka, "log_level": 0})
    wanted = ConsumerGroupTopicPartitions(f"{shiva.name}-lag:{reader}")
    (answer,) = admin.list_consumer_group_offsets([wanted]).values()
    committed = {
        each.topic: each.offset
        for each in answer.result(PATIENCE_S).topic_partitions or ()
        if each.offset >= 0
    }
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    ends = admin.list_offsets({TopicPartition(topic, 0): latest for topic in committed})
    return {
        place.topic: end.result(PATIENCE_S).offset - committed[place.topic] for place, end in ends.items()
    }


@pytest.mark.rule("SH-29")
def test_the_lag_of_a_worker_that_stands_still_is_visible_and_ends(shiva: ShivaCluster) -> None:
    command, control = f"{shiva.name}-command", f"{shiva.name}-control"
    shiva.leader()
    worker = shiva.worker("worker-1")
    shiva.start("t/c/a")
    shiva.running("t/c/a")
    for reader in ("worker:worker-1", "leader"):
        wait_until(lambda reader=reader: lag_of(shiva, reader).get(command) == 0, f"{reader} has read all")
        assert control in lag_of(shiva, reader)
    worker.pause()
    shiva.start("t/c/b")
    wait_until(lambda: lag_of(shiva, "leader")[command] == 0, "the leader goes on")
    assert lag_of(shiva, "worker:worker-1")[command] >= 2, "a part of an archive, and its start command"
    worker.resume()
    wait_until(lambda: lag_of(shiva, "worker:worker-1")[command] == 0, "it has caught up")
    admin = AdminClient({"bootstrap.servers": shiva.kafka, "log_level": 0})
    groups = [f"{shiva.name}-{name}" for name in ("leader", "lag:leader", "lag:worker:worker-1")]
    found = [each.result(PATIENCE_S) for each in admin.describe_consumer_groups(groups).values()]
    assert [len(each.members) for each in found] == [1, 0, 0], "nobody joins a group to show its lag"


class TestRetention:
    @pytest.mark.rule("SH-1", "SH-15")
    @pytest.mark.parametrize("policy", ["delete", "compact,delete"])
    def test_a_worker_that_starts_after_the_log_was_cleaned_gets_every_application(
        self, shiva: ShivaCluster, policy: str
    ) -> None:
        quick = {
            "cleanup.policy": policy,
            "retention.ms": "12000",
            "segment.ms": "1000",
            "min.cleanable.dirty.ratio": "0.01",
            "max.compaction.lag.ms": "1000",
        }
        make_topic(shiva, "command", quick)
        shiva.leader().says("took over")
        first = shiva.worker("worker-1")
        names = [f"t/c/app-{number}" for number in range(3)]
        for name in names:
            shiva.start(name)
            shiva.running(name)
        behind = topic_end(shiva)
        wait_until(
            lambda: not any(key.startswith(b"part:") for key in keys_before(shiva, behind)), "it is cleaned"
        )
        shiva.worker("worker-2")
        shiva.until(lambda document: "worker-2" in document.workers, "the late worker is known")
        first.kill()
        for name in names:
            shiva.running(name, worker="worker-2")
        wait_until(lambda: shiva.starts("worker-2") == 3, "all run on the late worker")
        assert shiva.starts("worker-1") == 3

    @pytest.mark.rule("SH-1", "SH-15")
    def test_a_part_that_is_cleaned_away_while_a_worker_begins_is_found_further_on(
        self, shiva: ShivaCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The leader has written it once more behind where the log ended when the worker looked."""
        shiva.leader().says("took over")
        archive = pack(shiva.application("late")).archive
        part, start = publish(shiva, "t/c/late", archive)
        shiva.until(lambda document: document.consumed >= start, "it is known")
        begin = KafkaWorker.begin

        def begin_late(worker: KafkaWorker) -> None:
            append(shiva, part, archive)
            delete_before(shiva, start)
            begin(worker)

        monkeypatch.setattr(KafkaWorker, "begin", begin_late)
        worker = shiva.cluster.run_worker("worker-1", shiva.data("worker-1"), WorkerOptions())
        try:
            shiva.running("t/c/late", worker="worker-1")
        finally:
            worker.stop()
            worker.wait(PATIENCE_S)

    @pytest.mark.rule("SH-15", "SH-16")
    def test_an_archive_beyond_the_budget_is_refused_with_the_numbers_before_anything_is_sent(
        self, shiva: ShivaCluster, tmp_path: Path
    ) -> None:
        big = tmp_path / "big.zip"
        with zipfile.ZipFile(big, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("shiva.json", json.dumps({"command": ["true"]}))
            for number in range(4):
                archive.writestr(f"part-{number}", bytes(50_000_000))
        with pytest.raises(RequestTooLarge, match=r"200,\d{3},\d{3} bytes.*40,000,000.*nothing was sent"):
            shiva.start(source=big)
        with LogReader(connection_of(shiva), f"{shiva.name}-command", "earliest") as reader:
            assert reader.end_offset(PATIENCE_S) == 0

    @pytest.mark.rule("SH-14")
    def test_what_is_exclusive_and_does_not_fit_the_rounds_is_refused_before_anything_is_sent(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.leader()
        shiva.workers("worker-1")
        assert shiva.known.round_s == ROUND_S
        with pytest.raises(InvalidSettings, match=r"t/c/web: .* two rounds take 1 s: .* nothing was sent"):
            shiva.start(mode=Mode.EXCLUSIVE)
        shiva.start("t/c/other")
        shiva.running("t/c/other")
        assert [str(name) for name in shiva.known.applications] == ["t/c/other"]

    @pytest.mark.rule("SH-4", "SH-16")
    def test_an_archive_larger_than_a_message_arrives_in_parts(self, shiva: ShivaCluster) -> None:
        make_topic(shiva, "command", {"max.message.bytes": "300000"})
        shiva.daemon()
        noise = os.urandom(5_000_000)
        script = 'sha256sum noise >> "$JOURNAL"; exec sleep 1000'
        folder = shiva.application("web", script)
        (folder / "noise").write_bytes(noise)
        shiva.start(source=folder)
        assert shiva.running().archive.parts >= 17
        digest = hashlib.sha256(noise).hexdigest()
        wait_until(lambda: shiva.journal.exists() and digest in shiva.journal.read_text(), "it has arrived")


class TestSlowDisk:
    @pytest.mark.rule("SH-5", "SH-6")
    def test_files_that_take_for_ever_hold_up_neither_other_applications_nor_their_stop(
        self, shiva: ShivaCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_end = threading.Event()
        unpack = DataFolder.unpack

        def hang(
            data: DataFolder, application: ApplicationId, archive: bytes, sha256: str, *limits: Any
        ) -> Manifest:
            if application.application == "slow":
                may_end.wait(PATIENCE_S)
            return unpack(data, application, archive, sha256, *limits)

        monkeypatch.setattr(DataFolder, "unpack", hang)
        shiva.leader().says("took over")
        worker = shiva.cluster.run_worker("worker-1", shiva.data("worker-1"), WorkerOptions())
        try:
            shiva.start("t/c/slow", source=shiva.application("slow", RUNS))
            shiva.start("t/c/web", source=shiva.application("web", RUNS))
            shiva.running("t/c/web")
            shiva.cluster.stop(ApplicationId.parse("t/c/web"))
            shiva.gone("t/c/web")
            slow = shiva.known.applications[ApplicationId.parse("t/c/slow")]
            assert slow.state is ApplicationState.ASSIGNED
            may_end.set()
            shiva.running("t/c/slow")
        finally:
            may_end.set()
            worker.stop()
            worker.wait(PATIENCE_S)

    @pytest.mark.rule("SH-8")
    def test_a_worker_that_answers_and_reads_no_more_is_gone_until_it_reads_again(
        self, shiva: ShivaCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has_room = threading.Event()
        has_room.set()
        held: list[Callable[[], None]] = []

        def hold(_threads: FileThreads, action: Callable[[], None]) -> None:
            if has_room.is_set():
                action()
            else:
                held.append(action)

        monkeypatch.setattr(FileThreads, "when_room", hold)
        options = LeaderOptions(round_s=0.5, session_timeout_s=1.5, stalled_s=1.0)
        running = [
            shiva.cluster.run_leader("leader-1", options),
            shiva.cluster.run_worker("worker-1", shiva.data("worker-1"), WorkerOptions()),
        ]
        try:
            shiva.start()
            shiva.running(worker="worker-1")
            has_room.clear()
            shiva.worker("worker-2")
            shiva.running(worker="worker-2")
            assert "worker-1" not in shiva.known.workers
            has_room.set()
            for action in held:
                action()
            shiva.until(lambda document: "worker-1" in document.workers, "it follows again")
        finally:
            for each in reversed(running):
                each.stop()
                each.wait(PATIENCE_S)


class TestPoison:
    @pytest.mark.rule("SH-16")
    def test_records_of_anybody_are_set_aside_with_key_offset_and_reason_and_all_go_on(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.leader()
        worker = shiva.worker()
        shiva.start()
        shiva.running()
        part = f"part:t/c/web:{'0' * 64}:0".encode()
        poison = [
            (b"cmd:t/c/bad", b"{no json"),
            (b"unknown:t/c/bad", b"{}"),
            (b"cmd:t/c/bad", json.dumps({"kind": "start", "format": 99, "record": {}}).encode()),
            (b"part:nobody:1", b"bad part"),
            (b"cmd:../x/y", b"\x00\xff"),
            (b"assignement", b"[]"),
        ]
        offsets = []
        with LogWriter(connection_of(shiva)) as writer:
            for key, value in poison:
                offsets.append(
                    writer.append_and_wait(f"{shiva.name}-command", key, value, timeout_s=PATIENCE_S)
                )
            writer.append_and_wait(f"{shiva.name}-command", part, b"unused", timeout_s=PATIENCE_S)
            # Kafka itself refuses a record without a key, for the topic is compacted.
            with pytest.raises(RegistryRefused, match="INVALID_RECORD"):
                writer.append_and_wait(f"{shiva.name}-command", None, b"no key", timeout_s=PATIENCE_S)
            writer.append_and_wait(f"{shiva.name}-control", b"pong:x", b"poison", timeout_s=PATIENCE_S)
            writer.append_and_wait(f"{shiva.name}-control", b"ping", b"{}", timeout_s=PATIENCE_S)
        keys: set[str] = set()

        def are_shown(document: AssignmentDocument) -> bool:
            """What is not repeated on CONTROL leaves the documents soon."""
            keys.update(each.key for each in document.set_aside)
            return {each.offset for each in document.set_aside} >= set(offsets) and keys >= {"pong:x", "ping"}

        shiva.until(are_shown, "all are shown")
        shown = {(each.offset, each.key): each.reason for each in shiva.known.set_aside}
        for offset, (key, _) in zip(offsets, poison, strict=True):
            assert shown[offset, key.decode()]
        assert "format 99" in shown[offsets[2], "cmd:t/c/bad"]
        worker.says("record set aside")
        shiva.start("t/c/after")
        shiva.running("t/c/after")
        assert shiva.starts() == 2


def zip_of(*entries: zipfile.ZipInfo | str, content: bytes = b"x", command: str = "command") -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("shiva.json", json.dumps({command: ["true"]}))
        for entry in entries:
            archive.writestr(entry, content)
    return packed.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = 0o120777 << 16
    return info


def bomb() -> bytes:
    """Four entries that say that they unpack to 2.5 GB each."""
    packed = bytearray(zip_of("a", "b", "c", "d"))
    place = packed.find(b"PK\x01\x02")
    place = packed.find(b"PK\x01\x02", place + 1)
    while place >= 0:
        struct.pack_into("<L", packed, place + 24, 2_500_000_000)
        place = packed.find(b"PK\x01\x02", place + 1)
    return bytes(packed)


EVIL: dict[str, tuple[Callable[[], bytes], str]] = {
    "parent": (lambda: zip_of("../escaped"), r"'\.\.'"),
    "absolute": (lambda: zip_of("/tmp/escaped"), "absolute"),
    "link": (lambda: zip_of(link("link"), content=b"/etc/passwd"), "link"),
    "case": (lambda: zip_of("Name", "name"), "collides"),
    "bomb": (bomb, "2,500,000,000 bytes"),
    "nonsense": (lambda: b"no zip at all", "not a zip"),
    "manifest": (lambda: zip_of(command="commond"), "commond"),
}


class TestEvilArchives:
    @pytest.mark.rule("SH-16")
    @pytest.mark.parametrize("kind", EVIL)
    def test_the_client_refuses_it_and_sends_nothing(
        self, shiva: ShivaCluster, tmp_path: Path, kind: str
    ) -> None:
        make, reason = EVIL[kind]
        archive = tmp_path / "evil.zip"
        archive.write_bytes(make())
        with pytest.raises(Exception, match=reason) as refused:
            shiva.start(source=archive)
        assert type(refused.value).__name__ in {"InvalidArchive", "InvalidManifest"}
        assert not describe(connection_of(shiva), [f"{shiva.name}-command"], PATIENCE_S)

    @pytest.mark.rule("SH-16")
    def test_a_worker_refuses_each_with_the_reason_and_goes_on(self, shiva: ShivaCluster) -> None:
        shiva.daemon().says("daemon-1 runs")
        for kind, (make, _) in EVIL.items():
            publish(shiva, f"evil/c/{kind}", make())
        shiva.start()
        shiva.running()
        for kind, (_, reason) in EVIL.items():
            failed = shiva.entry_when(
                lambda entry: entry.state is ApplicationState.FAILED, "has failed", f"evil/c/{kind}"
            )
            with pytest.raises(AssertionError, match=reason):
                raise AssertionError(failed.failed_on["daemon-1"])
        assert not (shiva.data("daemon-1").parent / "escaped").exists()
        shiva.start("t/c/after")
        shiva.running("t/c/after")

    @pytest.mark.rule("SH-16")
    def test_a_start_whose_parts_are_missing_is_refused_and_shown(self, shiva: ShivaCluster) -> None:
        shiva.daemon().says("daemon-1 runs")
        archive = Archive("0" * 64, 10, 2)
        start = StartCommand(ApplicationId("t", "c", "half"), "1", archive, Mode.AVAILABLE)
        with LogWriter(connection_of(shiva)) as writer:
            writer.append_and_wait(
                f"{shiva.name}-command", key_of(start).encode(), encode(start), timeout_s=PATIENCE_S
            )
        refused = shiva.entry_when(
            lambda entry: entry.state is ApplicationState.REFUSED, "is refused", "t/c/half"
        )
        assert "2 of the 2 parts of its archive are not on COMMAND" in refused.reason

    @pytest.mark.rule("SH-16")
    @pytest.mark.parametrize("name", ["../x/y/z", "../x/y", "t/../a", "t/c/.a", "t/c", "/t/c/a", "t/c/a b"])
    def test_names_that_are_paths_are_none(self, name: str) -> None:
        with pytest.raises(InvalidName):
            ApplicationId.parse(name)


class TestTopics:
    @pytest.mark.rule("SH-1")
    def test_the_topics_are_made_as_the_rule_says(self, shiva: ShivaCluster) -> None:
        leader = shiva.cluster.run_leader("leader-1", LeaderOptions(round_s=0.5, session_timeout_s=1.5))
        try:
            kinds = ("command", "control", "assignement")
            found = describe(connection_of(shiva), [f"{shiva.name}-{kind}" for kind in kinds], PATIENCE_S)
        finally:
            leader.stop()
            assert leader.wait(PATIENCE_S)
        day_ms = 86_400_000
        wanted = {
            "command": (15 * day_ms, 10**8),
            "control": (day_ms, 10**8),
            "assignement": (1095 * day_ms, 2 * 10**7),
        }
        for kind, (retention_ms, retention_bytes) in wanted.items():
            topic = found[f"{shiva.name}-{kind}"]
            assert topic.partitions == 1
            assert set(topic.settings["cleanup.policy"].split(",")) == {"compact", "delete"}
            assert int(topic.settings["retention.ms"]) == retention_ms
            assert int(topic.settings["retention.bytes"]) == retention_bytes

    @pytest.mark.rule("SH-1")
    def test_a_topic_of_several_partitions_is_an_error_that_says_what_to_do(
        self, shiva: ShivaCluster
    ) -> None:
        make_topic(shiva, "command", {}, partitions=3)
        said = shiva.run("shiva", "leader")
        assert said.code == 3
        assert f"{shiva.name}-command: partitions is 3, wanted 1" in said.err
        assert "choose another name" in said.err
        with pytest.raises(InvalidSettings, match="partitions is 3"):
            shiva.start()

    @pytest.mark.rule("SH-1")
    def test_another_retention_is_told_and_taken_into_account(self, shiva: ShivaCluster) -> None:
        make_topic(shiva, "command", {"retention.bytes": "3000000", "cleanup.policy": "compact,delete"})
        shiva.daemon().says("retention.bytes=100000000")
        folder = shiva.application()
        (folder / "noise").write_bytes(os.urandom(2_000_000))
        with pytest.raises(RequestTooLarge, match="1,200,000 of the 3,000,000 bytes"):
            shiva.start(source=folder)

    @pytest.mark.rule("SH-18")
    def test_asking_a_cluster_that_is_not_there_is_one_clear_line_and_makes_nothing(
        self, shiva: ShivaCluster
    ) -> None:
        for arguments in (("status",), ("list",), ("stop", "t/c/web"), ("status", "--watch")):
            said = shiva.run("shiva", *arguments)
            assert said.code == 3
            assert said.err.count("\n") == 1
            assert f"there is no cluster {shiva.name}" in said.err
        kinds = ("command", "control", "assignement")
        assert not describe(connection_of(shiva), [f"{shiva.name}-{kind}" for kind in kinds], PATIENCE_S)

    @pytest.mark.rule("SH-1")
    @pytest.mark.parametrize("session_timeout_s", ["100000", "3000"])
    def test_a_session_that_client_or_broker_does_not_allow_is_told(
        self, shiva: ShivaCluster, session_timeout_s: str
    ) -> None:
        said = shiva.run("shiva", "leader", "--session-timeout", session_timeout_s)
        assert said.code == 3
        assert "session" in said.err.lower().splitlines()[-1]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A broker that makes topics as soon as a client asks for them, as brokers do by default."""
    settings = {"auto.create.topics.enable": "true"}
    with KafkaCluster(1, data_folder=tmp_path_factory.mktemp("ready"), settings=settings) as cluster:
        yield cluster


def topics_of(cluster: KafkaCluster) -> set[str]:
    """The topics that there are, without the brokers' own."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    return {topic for topic in admin.list_topics(timeout=PATIENCE_S).topics if not topic.startswith("__")}


@pytest.mark.rule("SH-18")
@pytest.mark.parametrize(
    "words",
    [
        "shiva list --registry URL",
        "shiva status --registry URL",
        "shiva status --watch --registry URL",
        "shiva logs a/b/c --registry URL",
        "shiva logs a/b/c --worker w --registry URL",
        "shiva logs a/b/c --worker w --follow --registry URL",
        "shiva stop a/b/c --registry URL",
        "shiva restart a --yes --registry URL",
        "shiva retry --registry URL",
        "shiva drain w --registry URL",
        "groups --registry URL",
        "status g --registry URL",
        "watch g --registry URL",
        "check g --registry URL",
        "resources list g --registry URL",
        "resources remove g r --registry URL",
        "node list g --registry URL",
        "node drain g n --registry URL",
        "feed g --from URL --to memory://none",
        "history tail URL",
        "history stats URL",
        "neli status TOPIC g --roles a --kafka KAFKA",
    ],
)
def test_a_command_that_reads_makes_no_topic(
    ready: KafkaCluster, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ready.url(f"none-{uuid.uuid4().hex}")
    named = {"TOPIC": url.rpartition("/")[2], "URL": url, "KAFKA": ready.bootstrap}
    main([named.get(word, word) for word in words.split()])
    said = capsys.readouterr().err
    assert topics_of(ready) == set()
    if words.startswith("shiva"):
        assert "there is no cluster none-" in said


@pytest.mark.rule("SH-18")
def test_no_command_is_sent_to_a_topic_that_is_not_there(ready: KafkaCluster) -> None:
    """Kafka would make it, with settings that are not Shiva's."""
    url = ready.url(f"part-{uuid.uuid4().hex}")
    connection = Connection.from_url(parse_url(url), PATIENCE_S)
    names = TopicNames().of(connection.cluster)
    shiva_topics.ensure(connection, names, PATIENCE_S)
    web = ApplicationId("t", "c", "web")
    entry = ApplicationEntry("a", ApplicationState.RUNNING, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
    worker = WorkerEntry(Incarnation("folder", 1))
    document = AssignmentDocument(Epoch(1, 1), "l", 0, 1.0, workers={"w": worker}, applications={web: entry})
    with LogWriter(connection) as writer:
        key = ASSIGNEMENT_KEY.encode()
        writer.append_and_wait(names.assignement, key, encode(document), timeout_s=PATIENCE_S)
    admin = AdminClient({"bootstrap.servers": ready.bootstrap, "log_level": 0})
    admin.delete_topics([names.command])[names.command].result(PATIENCE_S)
    with closing(open_cluster(url, PATIENCE_S)) as cluster:
        for act in (
            lambda: cluster.stop(web),
            lambda: cluster.restart(web),
            lambda: cluster.cordon("w", None),
            lambda: cluster.output(web, 1, PATIENCE_S, "w"),
        ):
            with pytest.raises(RegistryRefused, match="there is no cluster"):
                act()
    assert topics_of(ready) == {names.control, names.assignement}
    admin.delete_topics([names.control, names.assignement])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A broker that wants an account and has an authorizer; what has no rules is open to everybody.

    Ann may look at the topics of one cluster, and has all rights on those of another, whose lag she may not
    commit; she may make no other topics.
    """
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # the broker itself, on its internal listener
        "allow.everyone.if.no.acl.found": "true",
    }
    folder = tmp_path_factory.mktemp("guarded")
    with KafkaCluster(1, data_folder=folder, sasl=("ann", "open-sesame"), settings=settings) as cluster:
        admin = AdminClient({**cluster.client_settings})
        for made in admin.create_acls(
            [
                rule(ResourceType.TOPIC, "cluster-", AclOperation.DESCRIBE, AclPermissionType.ALLOW),
                rule(ResourceType.TOPIC, "denied-", AclOperation.ALL, AclPermissionType.ALLOW),
                rule(ResourceType.GROUP, "denied-lag:", AclOperation.READ, AclPermissionType.DENY),
                rule(ResourceType.BROKER, "kafka-cluster", AclOperation.CREATE, AclPermissionType.DENY),
            ]
        ).values():
            made.result(PATIENCE_S)
        yield cluster


def rule(kind: ResourceType, name: str, act: AclOperation, verdict: AclPermissionType) -> AclBinding:
    """A rule for Ann about the names that begin so."""
    is_literal = kind is ResourceType.BROKER
    pattern = ResourcePatternType.LITERAL if is_literal else ResourcePatternType.PREFIXED
    return AclBinding(kind, name, pattern, "User:ann", "*", act, verdict)


@pytest.mark.rule("SH-1", "SH-18")
def test_without_the_right_to_make_topics_it_is_said_which_and_what_to_do(guarded: KafkaCluster) -> None:
    security = "security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN"
    url = f"kafka://ann:open-sesame@{guarded.bootstrap}/cluster?{security}"
    cluster = open_cluster(url, PATIENCE_S)
    try:
        with pytest.raises(AccessDenied, match=r"topic cluster-\w+ is missing and this user may not make it"):
            cluster.run_leader("leader-1", LeaderOptions())
        with pytest.raises(RegistryRefused, match="there is no cluster"):
            cluster.read(PATIENCE_S)
    finally:
        cluster.close()


@pytest.mark.rule("SH-29")
def test_who_may_not_commit_its_lag_works_all_the_same(
    guarded: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower, "COMMIT_S", 0.1)
    url = f"kafka://ann:open-sesame@{guarded.bootstrap}/denied?security.protocol=SASL_PLAINTEXT"

    def told() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return sorted(re.findall(r"committing to group (\S+) failed", "\n".join(lines)))

    with closing(open_cluster(f"{url}&sasl.mechanism=PLAIN", PATIENCE_S)) as cluster:
        leader = cluster.run_leader("leader-1", LeaderOptions(round_s=ROUND_S))
        worker = cluster.run_worker("worker-1", tmp_path / "data", WorkerOptions())
        groups = ["denied-lag:leader", "denied-lag:worker:worker-1"]
        wait_until(lambda: told() == groups, "both say so")
        for document in cluster.documents(PATIENCE_S):
            if "worker-1" in document.workers:
                break
        else:
            pytest.fail("the worker takes no part")
        for running in (worker, leader):
            running.stop()
            assert running.wait(PATIENCE_S)
    assert told() == groups, "once each"
