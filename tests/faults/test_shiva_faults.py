"""Shiva's processes on a real Kafka: killed, stopped, cut off and lied to."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.types import ApplicationId, ApplicationState, Mode
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import ApplicationFailed
from rebalanser.shiva import Start
from rebalanser.shiva.data_folder import folder_name
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_kafka.connection import Connection
from rebalanser_kafka.log import LogWriter, TransactionalWriter
from rebalanser_kafka.shiva import candidate as leader_module
from rebalanser_kafka.shiva import cluster as cluster_module
from rebalanser_kafka.shiva.wire import encode, key_of
from support.shiva_cluster import BEATS, CRASHES, SESSION_TIMEOUT_S, ShivaCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rebalanser.core.shiva.records import AssignmentDocument
    from rebalanser_kafka.shiva.candidate import LeaderCandidate

PROGRAM = str(Path(__file__).with_name("shiva_process.py"))
TERM = "rebalanser_kafka.shiva.leader:LeaderTerm"
WRITER = "rebalanser_kafka.transactions:TransactionalWriter"
CLIENT = "rebalanser_kafka.shiva.commands:Publication"
WORKER = "rebalanser_kafka.shiva.worker:KafkaWorker"
FOLDER = "rebalanser.shiva.data_folder:DataFolder"
PROCESSES = "rebalanser.shiva.processes:ApplicationProcesses"


@pytest.fixture
def shiva(kafka_address: str, tmp_path: Path) -> Iterator[ShivaCluster]:
    with ShivaCluster(kafka_address, tmp_path) as cluster:
        yield cluster


def dying(place: str, when: str, number: int, blow: str = "SIGKILL") -> tuple[str, ...]:
    """The program that kills, or stops, itself at the N-th call of a method."""
    return (PROGRAM, place, when, str(number), blow)


class TestKilled:
    @pytest.mark.rule("SH-4", "SH-9", "SH-13")
    @pytest.mark.parametrize(
        ("place", "when", "number"),
        [
            pytest.param(f"{WRITER}._commit", "before", 1, id="announcing"),
            pytest.param(f"{TERM}._write_consumed", "after", 1, id="between announcement and document"),
            pytest.param(f"{WRITER}._commit", "before", 4, id="in the middle of a transaction"),
            pytest.param(f"{TERM}._publish", "after", 1, id="after its first document"),
        ],
    )
    def test_a_leader_killed_at_a_step_is_followed_by_another_and_nothing_starts_twice(
        self, shiva: ShivaCluster, place: str, when: str, number: int
    ) -> None:
        shiva.worker()
        shiva.start()
        doomed = shiva.leader("doomed", program=dying(place, when, number))
        assert doomed.wait() == -signal.SIGKILL
        shiva.leader("heir")
        assert shiva.running().worker == "worker-1"
        shiva.until(lambda document: document.leader == "heir", "the heir leads")
        wait_until(lambda: shiva.starts() == 1, "it has started")
        assert shiva.starts() == 1

    @pytest.mark.rule("SH-4", "SH-16")
    @pytest.mark.parametrize(
        ("place", "when", "number", "commanded"),
        [
            pytest.param(f"{CLIENT}._tell", "after", 1, False, id="between the parts"),
            pytest.param(f"{CLIENT}._append", "before", 2, False, id="between parts and command"),
            pytest.param(f"{CLIENT}._append", "after", 2, True, id="after the command"),
        ],
    )
    def test_a_client_killed_at_a_step_has_commanded_all_or_nothing(
        self, shiva: ShivaCluster, place: str, when: str, number: int, commanded: bool
    ) -> None:
        shiva.daemon()
        folder = shiva.application()
        (folder / "noise").write_bytes(os.urandom(1_500_000))
        client = shiva.launch(
            "client", "shiva", "start", "t/c/web", str(folder), program=dying(place, when, number)
        )
        assert client.wait() == -signal.SIGKILL
        shiva.start("t/c/other")
        shiva.running("t/c/other")
        if commanded:
            shiva.running()
        else:
            assert [str(name) for name in shiva.known.applications] == ["t/c/other"]
            shiva.start(source=folder)
            shiva.running()

    @pytest.mark.rule("SH-10", "SH-13", "SH-17")
    @pytest.mark.parametrize(
        ("place", "when"),
        [
            pytest.param(f"{FOLDER}.unpack", "before", id="before its files are stored"),
            pytest.param(f"{FOLDER}.unpack", "after", id="after its files are stored"),
            pytest.param(f"{WORKER}._start", "after", id="right after a start"),
        ],
    )
    def test_a_worker_killed_at_a_step_goes_on_when_it_is_started_again(
        self, shiva: ShivaCluster, place: str, when: str
    ) -> None:
        shiva.leader()
        doomed = shiva.worker("worker-1", program=dying(place, when, 1))
        shiva.start()
        assert doomed.wait() == -signal.SIGKILL
        shiva.worker("worker-1")
        shiva.running()
        wait_until(lambda: len(shiva.processes_of("worker-1")) == 1, "one process of it runs")

    @pytest.mark.rule("SH-5", "SH-17")
    def test_a_worker_killed_while_it_stops_an_application_leaves_nothing_behind(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.leader()
        doomed = shiva.worker("worker-1", program=dying(f"{PROCESSES}.stop", "after", 1))
        shiva.start()
        shiva.running()
        shiva.run("shiva", "stop", "t/c/web")
        assert doomed.wait() == -signal.SIGKILL
        wait_until(lambda: not shiva.processes_of("worker-1"), "no process is left")
        shiva.worker("worker-1")
        shiva.gone()

    @pytest.mark.rule("SH-8", "SH-13", "SH-17")
    def test_what_a_killed_worker_ran_runs_elsewhere_and_nothing_of_it_is_left(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.leader()
        workers = shiva.workers("worker-1", "worker-2")
        shiva.start()
        first = shiva.running().worker or ""
        [other] = workers.keys() - {first}
        workers[first].kill()
        wait_until(lambda: not shiva.processes_of(first), "no process is left")
        shiva.running(worker=other)
        assert shiva.started == {first: 1, other: 1}


class TestStopped:
    """A worker that is only missed is removed after a round: here that is an hour."""

    @pytest.fixture
    def shiva(self, kafka_address: str, tmp_path: Path) -> Iterator[ShivaCluster]:
        with ShivaCluster(kafka_address, tmp_path, round_s=3600.0) as cluster:
            yield cluster

    @pytest.mark.rule("SH-22", "SH-13")
    def test_what_the_leading_daemon_ran_moves_at_once(self, shiva: ShivaCluster) -> None:
        first = shiva.daemon("a")
        first.says("daemon a runs")
        shiva.until(lambda document: document.leader == "a" and "a" in document.workers, "a leads")
        shiva.daemon("b")
        shiva.until(lambda document: document.workers.keys() == {"a", "b"}, "both are known")
        for application in ("t/c/web", "t/c/api"):
            shiva.start(application, mode=Mode.EXCLUSIVE)
            shiva.running(application)
        assert first.terminate() == 0
        for application in ("t/c/web", "t/c/api"):
            shiva.running(application, worker="b")

    @pytest.mark.rule("SH-22", "SH-13")
    def test_what_left_while_nobody_led_moves_when_somebody_leads(self, shiva: ShivaCluster) -> None:
        doomed = shiva.leader("doomed")
        workers = shiva.workers("worker-1", "worker-2")
        shiva.start(mode=Mode.EXCLUSIVE)
        left = shiva.running().worker or ""
        [other] = workers.keys() - {left}
        doomed.kill()
        assert workers[left].terminate() == 0
        shiva.leader("heir")
        shiva.running(worker=other)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class TestLeaders:
    @pytest.mark.rule("SH-7")
    def test_a_term_that_was_fenced_leaves_no_thread_connection_or_object_behind(
        self, shiva: ShivaCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even until the next garbage collection: a process that only waits seldom has one."""
        monkeypatch.setattr(leader_module, "RETRY_S", 0.0)
        connection = Connection.from_url(shiva.url)
        options = LeaderOptions(round_s=0.2, session_timeout_s=SESSION_TIMEOUT_S)
        gc.collect()
        gc.disable()
        leader = cast("LeaderCandidate", shiva.cluster.run_leader("leader-1", options))
        try:
            after: list[int] = []
            terms: list[weakref.ref[object]] = []
            for term in range(4):
                wait_until(lambda: leader.leads, "it leads")
                after.append(descriptors())
                terms.append(weakref.ref(leader._term))
                with TransactionalWriter(connection, f"{shiva.name}-leader", PATIENCE_S) as writer:
                    writer.init()
                wait_until(lambda: not leader.leads, f"term {term} ended")
            wait_until(lambda: leader.leads, "it leads")
            # A client opens and closes connections as it needs; one left by each term has three or more.
            least = min(after)
            wait_until(
                lambda: descriptors() < least + 2 * len(terms),
                lambda: f"no descriptors are left over: {after}, now {descriptors()}",
            )
            wait_until(lambda: not any(term() for term in terms), "nor is what a term knew")
        finally:
            gc.enable()
            leader.stop()
            leader.wait()

    @pytest.mark.rule("SH-7", "SH-9")
    def test_a_leader_stopped_until_another_leads_writes_nothing_when_it_goes_on(
        self, shiva: ShivaCluster
    ) -> None:
        stuck = shiva.leader("stuck")
        shiva.worker()
        shiva.start()
        shiva.running()
        stuck.pause()
        shiva.leader("heir").says("took over")
        shiva.start("t/c/between")
        shiva.running("t/c/between")
        term = shiva.known.epoch.term
        stuck.resume()
        stuck.says("stepped down")
        shiva.start("t/c/other")
        shiva.running("t/c/other")
        assert (shiva.known.leader, shiva.known.epoch.term) == ("heir", term)
        assert shiva.starts() == 3

    @pytest.mark.rule("SH-7", "SH-11")
    def test_a_late_document_of_a_deposed_leader_is_refused_by_workers_and_readers(
        self, shiva: ShivaCluster
    ) -> None:
        first = shiva.leader("first")
        worker = shiva.worker()
        shiva.start()
        shiva.running()
        late = shiva.known
        first.kill()
        shiva.leader("heir").says("took over")
        shiva.start("t/c/other")
        shiva.running("t/c/other")
        heirs = shiva.known
        forged = replace(late, epoch=replace(late.epoch, number=1_000_000), applications={})
        with LogWriter(Connection.from_url(shiva.url)) as writer:
            for topic in (f"{shiva.name}-command", f"{shiva.name}-assignement"):
                key = key_of(forged).encode()
                writer.append_and_wait(topic, key, encode(forged), timeout_s=PATIENCE_S)
        worker.says("document refused")
        assert shiva.known.epoch == heirs.epoch
        assert next(iter(shiva.cluster.documents(PATIENCE_S))).epoch == heirs.epoch
        assert len(shiva.processes_of("worker-1")) == 2
        shiva.start("t/c/third")
        shiva.running("t/c/third")
        assert shiva.starts() == 3

    @pytest.mark.rule("SH-3", "SH-9")
    def test_a_candidate_that_joins_costs_the_leader_neither_its_term_nor_an_application_a_start(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.leader("first")
        shiva.worker()
        shiva.start()
        shiva.running()
        term = shiva.known.epoch.term
        for number in range(3):
            shiva.leader(f"candidate-{number}")
            shiva.start(f"t/c/app-{number}")
            shiva.running(f"t/c/app-{number}")
        document = shiva.known
        assert (document.leader, document.epoch.term) == ("first", term)
        assert shiva.starts() == 4

    @pytest.mark.rule("SH-5")
    def test_a_stop_can_keep_data_also_on_a_worker_that_is_away(self, shiva: ShivaCluster) -> None:
        leader = shiva.cluster.run_leader("leader-1", LeaderOptions(round_s=0.5, session_timeout_s=1.5))
        data = shiva.data("worker-1")
        worker = shiva.cluster.run_worker("worker-1", data, WorkerOptions())
        writes = 'echo "$SHIVA_APPLICATION" > "$SHIVA_DATA/own"; exec sleep 1000'
        names = ("t/c/here", "t/c/away", "t/c/gone")
        for name in names:
            shiva.start(name, shiva.application(name[4:], writes))
        for name in names:
            shiva.running(name)
        wait_until(lambda: len(list(data.glob("applications/*/data/own"))) == 3, "all have written")
        shiva.cluster.stop(ApplicationId.parse("t/c/here"), keep_data=True)
        shiva.gone("t/c/here")
        worker.stop()
        assert worker.wait(PATIENCE_S)
        shiva.cluster.stop(ApplicationId.parse("t/c/away"), keep_data=True)
        shiva.cluster.stop(ApplicationId.parse("t/c/gone"))
        shiva.gone("t/c/away")
        again = shiva.cluster.run_worker("worker-1", data, WorkerOptions())

        def has_no_files() -> bool:
            with suppress(FileNotFoundError):  # a folder is being removed
                return not list(data.glob("applications/*/files-*"))
            return False

        def kept() -> set[str]:
            with suppress(FileNotFoundError):
                return {file.read_text().strip() for file in data.glob("applications/*/data/own")}
            return set()

        wait_until(has_no_files, "no files of theirs are left")
        wait_until(lambda: "gone" not in kept(), "the data of the one that was to go is gone")
        assert kept() == {"here", "away"}
        for running in (again, leader):
            running.stop()
            assert running.wait(PATIENCE_S)

    @pytest.mark.rule("SH-9")
    def test_what_was_commanded_while_nobody_led_is_done_in_order_and_once(self, shiva: ShivaCluster) -> None:
        leader = shiva.leader("first")
        shiva.worker()
        shiva.start("t/c/steady")
        shiva.running("t/c/steady")
        leader.kill()
        for _ in range(3):
            shiva.start("t/c/web")
            shiva.cluster.stop(ApplicationId.parse("t/c/web"))
        last = shiva.start("t/c/web")
        shiva.leader("second")
        assert shiva.running("t/c/web").command == last
        assert shiva.starts() == 2

    @pytest.mark.rule("SH-3")
    def test_a_daemon_leads_and_works_under_one_id_and_a_second_one_of_it_is_refused(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.daemon("same")
        shiva.start()
        shiva.running(worker="same")
        twin = shiva.launch(
            "twin",
            *("shiva", "daemon", "--id", "same", "--data", str(shiva.data("twin"))),
        )
        twin.says("worker refused")
        document = shiva.until(lambda document: document.set_aside, "the twin is shown")
        assert document.set_aside[-1].key == "pong:same"
        assert "answers to this id" in document.set_aside[-1].reason
        shiva.running(worker="same")
        assert shiva.starts() == 1


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaCluster]:
    """A broker of the test's own, to be stopped and killed."""
    with KafkaCluster(1, data_folder=tmp_path / "kafka") as cluster:
        yield cluster


class TestBroker:
    @pytest.mark.rule("SH-10", "SH-13", "SH-14")
    def test_a_broker_away_for_twenty_seconds_stops_what_is_exclusive_and_nothing_else(
        self, broker: KafkaCluster, tmp_path: Path
    ) -> None:
        with ShivaCluster(broker.bootstrap, tmp_path, round_s=3.0) as shiva:
            shiva.leader()
            workers = shiva.workers("worker-1", "worker-2")
            shiva.start()
            journal = tmp_path / "exclusive"
            beating = shiva.application(
                "beating", BEATS, stop_timeout_s=0.2, environment={"JOURNAL": str(journal)}
            )
            shiva.start("t/c/beating", beating, mode=Mode.EXCLUSIVE)
            shiva.running()
            shiva.running("t/c/beating")
            broker.stop_broker(0)
            gone_at = time.monotonic()

            def count() -> int:
                return sum(len(shiva.processes_of(name)) for name in workers)

            wait_until(lambda: count() == 1, "what is exclusive has ended, what is available runs on")
            wait_until(lambda: time.monotonic() - gone_at >= 20.0, "the broker has been away for 20 s")
            assert count() == 1
            broker.restart(0)
            size = journal.stat().st_size
            wait_until(lambda: journal.stat().st_size > size, "what is exclusive is back")
            shiva.start("t/c/other")
            shiva.running("t/c/other")
            assert shiva.starts() == 2
            beats = [line.split() for line in journal.read_text().splitlines()]
            spans = [
                [float(at) for _, name, at in (beat for beat in beats if len(beat) == 3) if name == worker]
                for worker in workers
            ]
            first, second = sorted((span for span in spans if span), key=min) if all(spans) else ([], [])
            assert not second or max(first) < min(second)

    @pytest.mark.rule("SH-4", "SH-7", "SH-9")
    def test_a_broker_killed_in_the_middle_of_a_transaction_leaves_all_of_it_or_nothing(
        self, broker: KafkaCluster, tmp_path: Path
    ) -> None:
        with ShivaCluster(broker.bootstrap, tmp_path) as shiva:
            shiva.worker()
            shiva.start()
            stopped = shiva.leader(program=dying(f"{WRITER}._commit", "before", 4, "SIGSTOP"))
            wait_until(lambda: is_stopped(stopped.pid), "it stands in the middle of a transaction")
            broker.kill(0)
            broker.restart(0)
            stopped.resume()
            shiva.running()
            wait_until(lambda: shiva.starts(), "it has started")
            assert shiva.starts() == 1

    @pytest.mark.rule("SH-17")
    def test_leaders_workers_and_daemons_stop_in_time_without_a_broker(
        self, broker: KafkaCluster, tmp_path: Path
    ) -> None:
        with ShivaCluster(broker.bootstrap, tmp_path) as shiva:
            running = [shiva.leader(), shiva.worker(), shiva.daemon()]
            for process, name in zip(running, ("leader-1", "worker-1", "daemon-1"), strict=True):
                process.says(f"{name} runs")
            shiva.start()
            shiva.running()
            broker.kill(0)
            began = time.monotonic()
            for process in running:
                os.kill(process.pid, signal.SIGTERM)
            assert [process.wait() for process in running] == [0, 0, 0]
            assert time.monotonic() - began < 40.0 * patience_ratio()
            assert not [*shiva.processes_of("worker-1"), *shiva.processes_of("daemon-1")]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class TestApplications:
    @pytest.mark.rule("SH-4", "SH-18")
    def test_many_are_started_in_one_call_and_a_worker_has_the_files_of_its_own(
        self, shiva: ShivaCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shiva.leader()
        shiva.workers("worker-1")
        folder = shiva.application()
        names = [ApplicationId("t", "c", f"a{number:02}") for number in range(40)]
        starts = [Start(name, folder, tags=["gpu"] if name > names[1] else ()) for name in names]
        reads: list[float] = []
        read = cluster_module.KafkaShivaCluster.read

        def count(cluster: cluster_module.KafkaShivaCluster, timeout_s: float) -> AssignmentDocument | None:
            reads.append(timeout_s)
            return read(cluster, timeout_s)

        told: list[tuple[int, int]] = []
        with monkeypatch.context() as patching:
            patching.setattr(cluster_module.KafkaShivaCluster, "read", count)
            commands = shiva.cluster.start_all(starts, lambda done, total: told.append((done, total)))
        assert len(set(commands)) == 40
        assert len(reads) == 1, "one document is read for all"
        assert told[-1][0] == told[-1][1]
        for name in names[:2]:
            shiva.running(str(name))
        shiva.until(lambda document: document.applications.keys() == set(names), "all are known")
        stored = {each.parent.name for each in shiva.data("worker-1").glob("applications/*/files-*")}
        assert stored == {folder_name(str(name)) for name in names[:2]}

    @pytest.mark.rule("SH-23")
    def test_what_fails_its_health_check_is_started_again(self, shiva: ShivaCluster, tmp_path: Path) -> None:
        shiva.daemon()
        sign = tmp_path / "healthy"
        check = {"exec": ["test", "-e", str(sign)], "interval_s": 0.2, "grace_period_s": 0}
        restart = {"backoff_initial_s": 0.2, "max_restarts": 1000}
        shiva.start(source=shiva.application("web", health_check=check, restart=restart))
        failed = "its health check failed 3 times in a row: exit code 1"
        shiva.entry_when(lambda entry: failed in entry.reason, "was restarted")
        sign.touch()
        shiva.running()

    @pytest.mark.rule("SH-12")
    def test_an_application_waits_with_the_reason_until_a_worker_has_its_tags(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.daemon("plain")
        shiva.start(tags=["gpu"])
        waiting = shiva.entry_when(lambda entry: "gpu" in entry.reason, "waits for the tag")
        assert waiting.state is ApplicationState.WAITING
        shiva.worker("special", "--tag", "gpu", "--tag", "ssd")
        shiva.running(worker="special")

    @pytest.mark.rule("SH-27")
    def test_an_application_waits_with_the_reason_until_a_worker_has_room(self, shiva: ShivaCluster) -> None:
        shiva.daemon("small", "--cpu", "1")
        requests = {"cpu": 0.6, "memory_mb": 64}
        shiva.start(source=shiva.application("web", requests=requests))
        shiva.running()
        shiva.start("t/c/jobs", source=shiva.application("jobs", requests=requests))
        waiting = shiva.entry_when(lambda entry: bool(entry.reason), "waits for room", "t/c/jobs")
        assert waiting.state is ApplicationState.WAITING
        assert waiting.reason == "no worker has 0.6 cpu free: small, the largest, has 1 cpu"
        status = shiva.run("shiva", "status").out
        assert "small: 1 application (0.6 of 1 cpu, 64 MB), on " in status
        assert "t/c/jobs: waiting, 0.6 cpu, 64 MB, no worker has 0.6 cpu free" in status
        command = shiva.cluster.restart(ApplicationId.parse("t/c/web"))
        shiva.cluster.wait(ApplicationId.parse("t/c/web"), command, PATIENCE_S)
        assert shiva.known.applications[ApplicationId.parse("t/c/jobs")].state is ApplicationState.WAITING
        shiva.cluster.stop(ApplicationId.parse("t/c/web"))
        shiva.running("t/c/jobs", worker="small")

    @pytest.mark.rule("SH-28", "SH-13")
    def test_replicas_run_on_distinct_workers_and_move_and_scale_alone(self, shiva: ShivaCluster) -> None:
        shiva.leader()
        workers = shiva.workers("worker-1", "worker-2", "worker-3")
        web = ApplicationId.parse("t/c/web")
        script = (
            'mark="$SHIVA_WORKER-$SHIVA_REPLICA-$SHIVA_REPLICAS"; echo "says $mark"; '
            'echo "start $mark" >> "$JOURNAL"; exec sleep 1000'
        )
        source = shiva.application("web", script, replicas=3)
        assert shiva.run("shiva", "start", str(web), str(source), "--wait").code == 0
        places = {name: entry.worker or "" for name, entry in shiva.known.applications.items()}
        assert places.keys() == {web, web.numbered(1), web.numbered(2)}
        assert set(places.values()) == workers.keys()
        first = {f"{worker}-{name.replica}-3" for name, worker in places.items()}
        assert shiva.started.keys() == first
        shown = shiva.run("shiva", "list", "t/c/web").out.splitlines()
        assert shown[0] == f"t/c/web: running on {places[web]}, 3 of 3 replicas running"
        assert shown[1] == f"t/c/web#1: running on {places[web.numbered(1)]}"

        lost = places[web.numbered(1)]
        workers[lost].kill()
        reason = "3 replicas on 2 workers that may take them"
        shiva.entry_when(lambda entry: entry.reason == reason, "waits", "t/c/web#1")
        shiva.workers("worker-4")
        shiva.running("t/c/web#1", worker="worker-4")
        assert shiva.started.keys() - first == {"worker-4-1-3"}
        wait_until(
            lambda: shiva.run("shiva", "logs", "t/c/web#1").out == "says worker-4-1-3\n",
            "its output is shown",
        )

        done = shiva.run("shiva", "scale", "t/c/web", "1", "--wait")
        assert done.out == "t/c/web has 1 replica, and all run or have finished\n", done.err
        assert shiva.known.applications.keys() == {web}
        assert shiva.known.applications[web].worker == places[web]
        assert shiva.run("shiva", "scale", "t/c/web", "2", "--wait").code == 0
        assert shiva.starts() == 5, "only what is new was started"
        assert shiva.run("shiva", "stop", "t/c/web", "--wait").code == 0
        assert not shiva.known.applications
        assert not [pid for worker in (*workers, "worker-4") for pid in shiva.processes_of(worker)]

    @pytest.mark.rule("SH-17")
    def test_what_fails_on_every_worker_has_failed_with_the_reason(self, shiva: ShivaCluster) -> None:
        shiva.leader().says("leader-1 runs")
        shiva.workers("worker-1", "worker-2")
        restart = {"max_restarts": 1, "backoff_initial_s": 0.05}
        shiva.start(source=shiva.application("web", CRASHES, restart=restart))
        failed = shiva.entry_when(lambda entry: entry.state is ApplicationState.FAILED, "has failed")
        assert failed.reason.startswith(
            "failed on every worker: worker-1, worker-2; retry 1 comes 30 s after"
        )
        assert set(failed.failed_on) == {"worker-1", "worker-2"}
        assert "exit code 7, after 1 restart" in failed.failed_on["worker-1"]
        with pytest.raises(ApplicationFailed, match="worker-2: exit code 7, after 1 restart"):
            shiva.cluster.wait(ApplicationId.parse("t/c/web"), failed.command, PATIENCE_S)
        assert set(shiva.started) == {"worker-1", "worker-2"}
        assert min(shiva.started.values()) >= 2

    @pytest.mark.rule("SH-13", "SH-14")
    def test_an_exclusive_application_of_a_stuck_worker_ends_before_another_begins_it(
        self, kafka_address: str, tmp_path: Path
    ) -> None:
        with ShivaCluster(kafka_address, tmp_path, round_s=2.0) as shiva:
            shiva.leader()
            workers = shiva.workers("worker-1", "worker-2")
            beating = shiva.application("web", BEATS, stop_timeout_s=0.2)
            shiva.start(source=beating, mode=Mode.EXCLUSIVE)
            first = shiva.running().worker or ""
            [other] = workers.keys() - {first}
            wait_until(lambda: shiva.beats, "it beats")
            workers[first].pause()
            shiva.running(worker=other)
            wait_until(lambda: any(worker == other for worker, _ in shiva.beats), "it beats there")
            beats = shiva.beats
            last = max(at for worker, at in beats if worker == first)
            begun = min(at for worker, at in beats if worker == other)
            assert last < begun
            assert not shiva.processes_of(first)
            workers[first].resume()
            shiva.until(lambda document: first in document.workers, "it is back")
            assert not shiva.processes_of(first)

    @pytest.mark.rule("SH-10", "SH-14")
    def test_an_available_application_runs_on_without_any_leader(self, shiva: ShivaCluster) -> None:
        leader = shiva.leader("first")
        worker = shiva.worker()
        shiva.start()
        shiva.running()
        leader.kill()
        worker.says("leader silent")
        assert len(shiva.processes_of("worker-1")) == 1
        shiva.leader("second")
        shiva.start("t/c/other")
        shiva.running("t/c/other")
        assert shiva.starts() == 2

    @pytest.mark.rule("SH-5", "SH-10", "SH-17")
    def test_a_worker_started_again_on_its_folder_is_known_by_its_next_incarnation(
        self, shiva: ShivaCluster
    ) -> None:
        shiva.leader()
        worker = shiva.worker()
        shiva.start()
        shiva.start("t/c/stopped")
        shiva.running()
        shiva.running("t/c/stopped")
        known = shiva.known.workers["worker-1"].incarnation
        worker.kill()
        assert shiva.run("shiva", "stop", "t/c/stopped").code == 0
        shiva.worker()
        shiva.until(
            lambda document: (
                "worker-1" in document.workers and document.workers["worker-1"].incarnation.succeeds(known)
            ),
            "the next incarnation is known",
        )
        shiva.running()
        applications = shiva.data("worker-1") / "applications"
        wait_until(lambda: len(list(applications.iterdir())) == 1, "what was stopped meanwhile is removed")
        wait_until(lambda: len(shiva.processes_of("worker-1")) == 1, "it runs once")
