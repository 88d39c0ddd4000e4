"""What a client that waits for its command makes of the documents that it reads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.shiva.changes import DocumentChain
from rebalanser.core.shiva.records import AssignmentDocument, StartCommand, StopCommand
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Cordon,
    Epoch,
    Incarnation,
    Leaving,
    Mode,
    SetAside,
    WorkerEntry,
)
from rebalanser.errors import (
    ApplicationFailed,
    NotSettled,
    RegistryRefused,
    Superseded,
    UnknownApplication,
)
from rebalanser.registry.urls import parse_url
from rebalanser.shiva import TopicNames
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka import connection as kafka_connection
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.log import LogWriter, NewRecord
from rebalanser_kafka.shiva import cluster as cluster_module
from rebalanser_kafka.shiva import topics as shiva_topics
from rebalanser_kafka.shiva.cluster import MAX_REMEMBERED, KafkaShivaCluster
from rebalanser_kafka.shiva.effect import CommandProgress, Effects, not_cordoned_yet, reasons_of
from rebalanser_kafka.shiva.wire import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

WEB = ApplicationId("t", "c", "web")
OFFSET = 7


@pytest.fixture(autouse=True)
def topics_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shiva_topics, "exists", lambda *_: True)


def document(
    state: ApplicationState | None = None,
    *,
    command: str = "mine",
    consumed: int = OFFSET,
    set_aside: tuple[SetAside, ...] = (),
) -> AssignmentDocument:
    """A document that has the application in this state, or does not have it."""
    entries = {}
    if state is not None:
        entries[WEB] = ApplicationEntry(
            command=command,
            state=state,
            mode=Mode.AVAILABLE,
            archive=Archive("0" * 64, 1, 1),
            reason="why",
            failed_on=MappingProxyType({"w1": "exit code 3"} if state is ApplicationState.FAILED else {}),
        )
    return AssignmentDocument(
        Epoch(1, 1), "l", consumed, 3.0, applications=MappingProxyType(entries), set_aside=set_aside
    )


def effect() -> CommandProgress:
    return CommandProgress(WEB, "mine", OFFSET)


def has_come(of: CommandProgress, read: AssignmentDocument) -> bool:
    return of.has_come(read, reasons_of(read))


@pytest.mark.rule("SH-18")
@pytest.mark.parametrize(
    ("read", "come"),
    [
        (document(ApplicationState.RUNNING), True),
        (document(ApplicationState.FINISHED), True),
        (document(ApplicationState.WAITING), False),
        (document(ApplicationState.RUNNING, consumed=OFFSET - 1), False),
        (document(consumed=OFFSET - 1), False),
        (document(), True),
        (document(ApplicationState.STOPPING, command="earlier"), False),
    ],
)
def test_the_effect_has_come_once_a_document_that_read_the_command_shows_it(
    read: AssignmentDocument, come: bool
) -> None:
    assert has_come(effect(), read) is come


@pytest.mark.rule("SH-18")
def test_a_stop_that_lasts_names_the_worker_that_has_to_stop_it() -> None:
    stopping = document(ApplicationState.STOPPING, command="earlier")
    left = Leaving("w1", Incarnation("folder", 1), Epoch(1, 1))
    entry = replace(stopping.applications[WEB], leaving=left, reason="")
    stop = effect()
    assert not has_come(stop, replace(stopping, applications={WEB: entry}))
    assert stop.summary == "t/c/web is stopping on w1, which has not reported yet that it stopped it"


@pytest.mark.rule("SH-18")
def test_what_failed_everywhere_is_told_with_the_reason_of_each_worker() -> None:
    with pytest.raises(ApplicationFailed, match="t/c/web is failed: why; w1: exit code 3"):
        has_come(effect(), document(ApplicationState.FAILED))


@pytest.mark.rule("SH-18")
def test_a_later_command_is_told() -> None:
    with pytest.raises(Superseded, match="another command for t/c/web came later"):
        has_come(effect(), document(ApplicationState.RUNNING, command="later"))


@pytest.mark.rule("SH-18")
@pytest.mark.parametrize("later", ["", "mine", "another"])
def test_a_start_that_a_later_command_stopped_has_not_come(later: str) -> None:
    start = CommandProgress(WEB, "mine", OFFSET, starts=True)
    stopped = document(ApplicationState.STOPPING if later else None, command=later)
    assert not has_come(start, replace(stopped, consumed=OFFSET - 1))
    with pytest.raises(Superseded, match="a later command has stopped t/c/web"):
        has_come(start, stopped)


@pytest.mark.rule("SH-16", "SH-18")
def test_a_command_that_was_set_aside_has_failed() -> None:
    aside = SetAside(OFFSET, "cmd:t/c/web", "its parts are missing")
    with pytest.raises(ApplicationFailed, match="its parts are missing"):
        has_come(effect(), document(set_aside=(aside,)))


@pytest.mark.rule("SH-16", "SH-18")
def test_a_record_of_another_topic_or_application_at_the_same_offset_means_nothing() -> None:
    others = (SetAside(OFFSET, "pong:w1", "poison"), SetAside(OFFSET, "cmd:t/c/other", "no"))
    assert has_come(effect(), document(ApplicationState.RUNNING, set_aside=others))


@pytest.mark.rule("SH-18", "SH-26")
class TestCordons:
    def with_entry(self, cordon: Cordon | None, **fields: object) -> AssignmentDocument:
        known = document(ApplicationState.RUNNING)
        entry = replace(known.applications[WEB], **fields)  # type: ignore[arg-type]
        return replace(known, applications={WEB: entry}, cordons={} if cordon is None else {"w1": cordon})

    def test_a_command_that_no_leader_has_taken_up_has_no_effect_yet(self) -> None:
        told = not_cordoned_yet(self.with_entry(None), "w1", Cordon.DRAINED)
        assert told == "no leader has taken up the command for w1 yet"
        assert not_cordoned_yet(self.with_entry(Cordon.DRAINED), "w1", None) == told

    def test_an_uncordon_that_no_leader_has_read_is_not_the_end_of_an_earlier_drain(self) -> None:
        behind = replace(self.with_entry(None), consumed=OFFSET - 1)
        told = not_cordoned_yet(behind, "w1", None, OFFSET)
        assert told == "no leader has taken up the command for w1 yet"
        assert not not_cordoned_yet(self.with_entry(None), "w1", None, OFFSET)

    def test_a_drained_worker_is_empty_once_it_has_stopped_what_it_had(self) -> None:
        named = self.with_entry(Cordon.DRAINED, worker="w1")
        left = Leaving("w1", Incarnation("folder", 1), Epoch(1, 1))
        for still_there in (named, self.with_entry(Cordon.DRAINED, worker=None, leaving=left)):
            assert not_cordoned_yet(still_there, "w1", Cordon.DRAINED) == "w1 still has t/c/web"
        assert not not_cordoned_yet(self.with_entry(Cordon.DRAINED, worker="w2"), "w1", Cordon.DRAINED)

    def test_a_cordoned_worker_keeps_what_it_has(self) -> None:
        assert not not_cordoned_yet(self.with_entry(Cordon.CORDONED, worker="w1"), "w1", Cordon.CORDONED)
        assert not not_cordoned_yet(self.with_entry(None, worker="w1"), "w1", None)


@pytest.mark.rule("SH-18", "SH-26")
def test_a_cluster_knows_its_own_commands_until_a_leader_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is sent: the appends and the documents are given."""
    connection = Connection.from_url(parse_url("kafka://127.0.0.1:1/c"), 1.0)
    cluster = KafkaShivaCluster(connection, 1.0, TopicNames(), "kafka")
    read = [document(ApplicationState.RUNNING, command="earlier", consumed=OFFSET - 1), document()]
    known = replace(read[0], workers={"w1": WorkerEntry(Incarnation("folder", 1))})
    monkeypatch.setattr(cluster, "read", lambda _timeout_s: known)
    monkeypatch.setattr(cluster, "documents", lambda _timeout_s: iter(read))
    monkeypatch.setattr(LogWriter, "append_all", lambda _writer, records, **_: [OFFSET for _ in records])
    with closing(cluster):
        stopped = cluster.stop(WEB)
        assert cluster.wait(WEB, stopped, 1.0) is None
        monkeypatch.setattr(cluster, "_last_commanded", lambda *_: {})
        restarted = cluster.restart(WEB)
        with pytest.raises(Superseded):
            cluster.wait(WEB, restarted, 1.0)
        uncordoned = cluster.cordon("w1", None)
        cluster.wait_cordoned("w1", None, 1.0, command=uncordoned)
        del read[1]
        with pytest.raises(NotSettled, match="no leader has taken up"):
            cluster.wait_cordoned("w1", None, 1.0, command=uncordoned)


@pytest.mark.rule("SH-18")
@pytest.mark.parametrize("known_to_brokers", [True, False])
def test_a_topic_that_was_just_made_is_waited_for_and_one_that_is_not_there_is_told(
    known_to_brokers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = Connection.from_url(parse_url("kafka://127.0.0.1:1/c"), 1.0)
    tries = []

    def read(*_: object) -> tuple[DocumentChain, int]:
        tries.append(1)
        if len(tries) < 3:
            raise RegistryRefused("Unknown partition")
        chain = DocumentChain()
        chain.take(document())
        return chain, 0

    monkeypatch.setattr(cluster_module, "last_document", read)
    monkeypatch.setattr(shiva_topics, "exists", lambda *_: known_to_brokers)
    monkeypatch.setattr(kafka_connection, "_PAUSE_S", 0.0)
    with closing(KafkaShivaCluster(connection, 1.0, TopicNames(), "kafka")) as cluster:
        if known_to_brokers:
            assert cluster.read(PATIENCE_S) == document()
        else:
            with pytest.raises(RegistryRefused, match="there is no cluster c: topic c-assignement does not"):
                cluster.read(PATIENCE_S)
    assert len(tries) == (3 if known_to_brokers else 1)


@pytest.mark.rule("SH-18", "SH-25")
class TestMany:
    NAMES = tuple(ApplicationId("t", "c", name) for name in "abc")

    def effects(self) -> Effects:
        return Effects({name: CommandProgress(name, "mine", OFFSET, starts=True) for name in self.NAMES})

    def of(self, *states: ApplicationState) -> AssignmentDocument:
        entries = {
            name: document(state).applications[WEB] for name, state in zip(self.NAMES, states, strict=True)
        }
        return replace(document(), applications=entries)

    def test_all_are_waited_for_and_each_is_looked_at_until_it_has_its_effect(self) -> None:
        effects = self.effects()
        running, assigned = ApplicationState.RUNNING, ApplicationState.ASSIGNED
        assert not effects.have_come(self.of(running, assigned, assigned))
        assert effects.summary.startswith("2 of 3 applications are not settled; t/c/b is assigned")
        assert not effects.have_come(self.of(assigned, running, assigned))
        assert effects.have_come(self.of(assigned, assigned, running))
        assert list(effects.entries) == list(self.NAMES)

    def test_more_commands_than_are_remembered_of_earlier_calls_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [ApplicationId("t", "c", f"a{number}") for number in range(MAX_REMEMBERED + 5_000)]
        archive = Archive("1" * 64, 1, 1)
        starts = {name: StartCommand(name, "theirs", archive, Mode.AVAILABLE) for name in names}
        connection = Connection.from_url(parse_url("kafka://127.0.0.1:1/c"), 1.0)
        cluster = KafkaShivaCluster(connection, 1.0, TopicNames(), "kafka")
        monkeypatch.setattr(cluster, "read", lambda _timeout_s: document())
        monkeypatch.setattr(cluster, "_last_commanded", lambda *_: starts)
        monkeypatch.setattr(
            LogWriter, "append_all", lambda _writer, records, **_: [OFFSET + n for n, _ in enumerate(records)]
        )
        entry = document(ApplicationState.RUNNING).applications[WEB]
        with closing(cluster):
            commands = cluster.restart_all(names).commands
            running = {name: replace(entry, command=commands[name]) for name in names}
            read = [
                document(consumed=OFFSET - 1),
                replace(document(consumed=OFFSET + len(names)), applications=running),
            ]
            monkeypatch.setattr(cluster, "documents", lambda _timeout_s: iter(read))
            assert cluster.wait_all(commands, 1.0) == running, "what no leader has read has no effect yet"
            for _ in range(3):
                cluster.restart_all(names[:1])
            assert len(cluster._sent) == MAX_REMEMBERED + 1

    def test_what_fails_is_told_once_the_others_have_their_effect(self) -> None:
        effects = self.effects()
        running, failed, assigned = (
            ApplicationState.RUNNING,
            ApplicationState.FAILED,
            ApplicationState.ASSIGNED,
        )
        assert not effects.have_come(self.of(failed, assigned, failed))
        told = r"2 of 3 applications: t/c/a is failed.*; t/c/c is failed"
        with pytest.raises(ApplicationFailed, match=told):
            effects.have_come(self.of(running, running, running))

    def test_many_commands_are_sent_and_read_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        connection = Connection.from_url(parse_url("kafka://127.0.0.1:1/c"), 1.0)
        cluster = KafkaShivaCluster(connection, 1.0, TopicNames(), "kafka")
        reads: list[float] = []
        sent: list[NewRecord] = []

        def read(timeout_s: float) -> AssignmentDocument:
            reads.append(timeout_s)
            return self.of(*[ApplicationState.RUNNING] * 3)

        def append(_writer: LogWriter, records: list[NewRecord], **_: float) -> list[int]:
            sent.extend(records)
            return [OFFSET for _ in records]

        monkeypatch.setattr(cluster, "read", read)
        monkeypatch.setattr(cluster, "_last_commanded", lambda *_: {})
        monkeypatch.setattr(LogWriter, "append_all", append)
        with closing(cluster):
            stops = cluster.stop_all([*self.NAMES, self.NAMES[0]], keep_data=True)
            restarts = cluster.restart_all(self.NAMES)
        assert len({*stops.commands.values(), *restarts.commands.values()}) == 6
        assert (list(stops.commands), stops.left_out) == (list(self.NAMES), {})
        assert [record.key for record in sent] == [f"cmd:{name}".encode() for name in self.NAMES] * 2
        assert len(reads) == 2, "one document for each call"


@pytest.mark.rule("SH-18", "SH-25")
class TestOnTheLog:
    """Commands that are on COMMAND and that no document has taken into account."""

    STATES = MappingProxyType(
        {
            "runs": ApplicationState.RUNNING,
            "stops": ApplicationState.STOPPING,
            "stopped": ApplicationState.RUNNING,
            "refused": ApplicationState.REFUSED,
            "mended": ApplicationState.REFUSED,
        }
    )

    def name(self, name: str) -> ApplicationId:
        return ApplicationId("t", "c", name)

    def start(self, name: str) -> StartCommand:
        return StartCommand(self.name(name), "theirs", Archive("1" * 64, 1, 1), Mode.EXCLUSIVE)

    @pytest.fixture
    def sent(self) -> list[NewRecord]:
        return []

    @pytest.fixture
    def cluster(self, monkeypatch: pytest.MonkeyPatch, sent: list[NewRecord]) -> Iterator[KafkaShivaCluster]:
        """Nothing is sent: ``new`` and ``mended`` were just started, ``stopped`` and ``brief`` stopped."""
        connection = Connection.from_url(parse_url("kafka://127.0.0.1:1/c"), 1.0)
        cluster = KafkaShivaCluster(connection, 1.0, TopicNames(), "kafka")
        entry = document(ApplicationState.RUNNING).applications[WEB]
        known = {self.name(name): replace(entry, state=state) for name, state in self.STATES.items()}
        on_log: list[StartCommand | StopCommand] = [
            *map(self.start, ("new", "mended")),
            *(StopCommand(self.name(name), "theirs") for name in ("stopped", "brief")),
        ]

        def append(_writer: LogWriter, records: list[NewRecord], **_: float) -> list[int]:
            sent.extend(records)
            return list(range(len(records)))

        monkeypatch.setattr(cluster, "read", lambda _timeout_s: replace(document(), applications=known))
        monkeypatch.setattr(
            cluster, "_last_commanded", lambda *_: {each.application: each for each in on_log}
        )
        monkeypatch.setattr(LogWriter, "append_all", append)
        with closing(cluster):
            yield cluster

    def test_what_was_just_started_is_an_application_and_what_was_just_stopped_stops(
        self, cluster: KafkaShivaCluster
    ) -> None:
        states = {each.application: str(state) for each, state in cluster.applications(1.0).items()}
        assert states == {
            "runs": "running",
            "stops": "stopping",
            "stopped": "stopping",
            "refused": "refused",
            "mended": "waiting",
            "new": "waiting",
        }

    def test_a_stop_leaves_out_what_has_vanished(
        self, cluster: KafkaShivaCluster, sent: list[NewRecord]
    ) -> None:
        stopped = cluster.stop_all(list(map(self.name, ("runs", "brief", "new", "none", "stops"))))
        assert [each.application for each in stopped.commands] == ["runs", "new", "stops"]
        assert [record.key for record in sent] == [b"cmd:t/c/runs", b"cmd:t/c/new", b"cmd:t/c/stops"]
        assert [each.application for each in stopped.left_out] == ["brief", "none"]
        for name in ("brief", "none"):
            with pytest.raises(UnknownApplication, match=f"knows no application t/c/{name}; it knows t/c/m"):
                stopped.of(self.name(name))
        with pytest.raises(UnknownApplication, match="t/c/none"):
            cluster.stop(self.name("none"))
        assert len(sent) == 3

    def test_a_restart_leaves_out_what_has_vanished_or_was_refused(
        self, cluster: KafkaShivaCluster, sent: list[NewRecord]
    ) -> None:
        wanted = ("runs", "refused", "stopped", "mended", "none", "stops", "new")
        restarted = cluster.restart_all(list(map(self.name, wanted)))
        assert [each.application for each in restarted.commands] == ["runs", "mended", "new"]
        again = [decode(record.key, record.value or b"") for record in sent]
        modes = [each.mode for each in again if isinstance(each, StartCommand)]
        assert modes == [Mode.AVAILABLE, Mode.EXCLUSIVE, Mode.EXCLUSIVE]
        told = {each.application: type(error) for each, error in restarted.left_out.items()}
        assert told == {
            "refused": ApplicationFailed,
            "none": UnknownApplication,
            "stopped": UnknownApplication,
            "stops": UnknownApplication,
        }
        with pytest.raises(ApplicationFailed, match="t/c/refused was refused"):
            cluster.restart(self.name("refused"))
        assert len(sent) == 3


@pytest.mark.rule("SH-18", "SH-28")
class TestReplicas:
    """A command has had its effect once all replicas have."""

    @staticmethod
    def document(*states: ApplicationState, replicas: int | None = None) -> AssignmentDocument:
        (entry,) = document(ApplicationState.RUNNING).applications.values()
        entries = {
            WEB.numbered(number): replace(entry, state=state, replicas=replicas or len(states))
            for number, state in enumerate(states)
        }
        return replace(document(), applications=MappingProxyType(entries))

    def test_a_start_waits_for_all_of_them(self) -> None:
        effects = Effects({WEB: CommandProgress(WEB, "mine", OFFSET, starts=True)})
        running = ApplicationState.RUNNING
        assert not effects.have_come(self.document(running, ApplicationState.WAITING))
        assert effects.summary == "t/c/web#1 is waiting: why"
        assert not effects.have_come(self.document(running, running, ApplicationState.STOPPING, replicas=2))
        assert effects.have_come(self.document(running, ApplicationState.FINISHED))

    def test_one_that_has_failed_is_told(self) -> None:
        effects = Effects({WEB: CommandProgress(WEB, "mine", OFFSET, starts=True)})
        with pytest.raises(ApplicationFailed, match="t/c/web#1 is failed"):
            effects.have_come(self.document(ApplicationState.RUNNING, ApplicationState.FAILED))

    def test_a_stop_waits_until_all_are_gone(self) -> None:
        effects = Effects({WEB: effect()})
        last = self.document(ApplicationState.STOPPING, ApplicationState.STOPPING).applications[
            WEB.numbered(1)
        ]
        left = replace(document(), applications=MappingProxyType({WEB.numbered(1): last}))
        assert not effects.have_come(left)
        assert effects.have_come(document())

    def test_another_number_waits_for_that_number(self) -> None:
        running = ApplicationState.RUNNING
        scaled = Effects({WEB: CommandProgress(WEB, "scale", OFFSET, replicas=2)})
        assert not scaled.have_come(replace(self.document(running), consumed=OFFSET - 1))
        assert not scaled.have_come(self.document(running, running, ApplicationState.STOPPING, replicas=2))
        assert scaled.have_come(self.document(running, running))
        with pytest.raises(Superseded, match="is to have 1 replicas"):
            Effects({WEB: CommandProgress(WEB, "scale", OFFSET, replicas=2)}).have_come(
                self.document(running)
            )
        with pytest.raises(Superseded, match="has stopped"):
            Effects({WEB: CommandProgress(WEB, "scale", OFFSET, replicas=2)}).have_come(document())
        aside = replace(document(), set_aside=(SetAside(OFFSET, f"scale:{WEB}", "not there"),))
        with pytest.raises(ApplicationFailed, match="not there"):
            Effects({WEB: CommandProgress(WEB, "scale", OFFSET, replicas=2)}).have_come(aside)
