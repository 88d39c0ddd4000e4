"""Applications as real processes: none is left behind, none runs twice, and what they print is kept."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import pytest

from rebalanser.core.shiva.messages import HealthChecked, ProcessExited, ProcessStarted
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.errors import UnusableFolder
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.supervisor_shim import SupervisedCommand, SupervisorShim, _Waiting
from rebalanser.runtime.supervisor_shim import now as shim_now
from rebalanser.shiva import processes as module
from rebalanser.shiva.data_folder import DataFolder, _holders, output_file
from rebalanser.shiva.manifest import HealthCheck, Limits, Manifest
from rebalanser.shiva.outputs import tail
from rebalanser.shiva.processes import ApplicationProcesses, ProcessEvent
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

APP: Final = ApplicationId("tenant", "channel", "app")
OTHER: Final = ApplicationId("tenant", "channel", "other")
FAMILY: Final = "sleep 2001 & sleep 2002"
"""A command with a descendant in its process group."""
STUBBORN: Final = "trap '' TERM; (trap '' TERM; sleep 2003; sleep 2004) & while :; do sleep 1; done"
ENDED_WITHIN_S: Final = 3.0
"""Most between a deadline and the end of a process, its stop timeout and the shim's included."""
TALKER: Final = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.02; done"


def members(group: int) -> list[int]:
    """The processes of a process group that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in "ZX":
            found.append(int(folder.name))
    return found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def holders(folder: Path, name: str) -> list[int]:
    """The processes with this in their command line that hold a lock of the folder."""
    found = []
    for pid in _holders(folder / "locks"):
        with suppress(OSError):
            found += [pid] if runs_program(pid, name) else []
    return found


def runs_program(pid: int, name: str) -> bool:
    return name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


def manifest(script: str, stop_timeout_s: float = 5.0, limits: Limits | None = None) -> Manifest:
    return Manifest(command=("sh", "-c", script), stop_timeout_s=stop_timeout_s, limits=limits or Limits())


class Bench:
    """A worker's processes within this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = DataFolder.open(folder)
        self.events: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
        self.processes = ApplicationProcesses(self.data, "worker-1", self._hear)
        self.pids: dict[tuple[ApplicationId, int], int] = {}

    def _hear(self, event: ProcessEvent) -> None:
        if isinstance(event, ProcessStarted):
            self.pids.update(self.processes.running)
        self.events.put(event)

    def start(
        self,
        run: int,
        made: Manifest,
        application: ApplicationId = APP,
        deadline: float | None = None,
    ) -> None:
        self.processes.start(application, run, self.folder, made, 7, deadline)

    def next(self, timeout_s: float = PATIENCE_S) -> ProcessEvent:
        return self.events.get(timeout=timeout_s)

    def started(self, run: int, application: ApplicationId = APP) -> int:
        """Wait for the start of a run; its process group."""
        assert self.next() == ProcessStarted(application, run)
        return self.pids[application, run]

    def exited(self, run: int, application: ApplicationId = APP) -> ProcessExited:
        """The exit that comes next, without its time, which is not to come."""
        event = self.next()
        assert isinstance(event, ProcessExited)
        assert (event.application, event.run) == (application, run)
        assert event.at is None or event.at <= shim_now()
        return replace(event, at=None)

    def output(self, application: ApplicationId = APP, lines: int = 1_000_000) -> list[str]:
        return list(tail(self.folder, application, lines))

    @property
    def shim(self) -> int:
        found = [pid for pid in children(os.getpid()) if runs_program(pid, "supervisor_shim.py")]
        assert len(found) == 1
        return found[0]

    def close(self) -> None:
        self.processes.close()
        self.data.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "data")
    try:
        yield made
    finally:
        made.close()


class Worker:
    """A worker in a process of its own, with what it has told."""

    def __init__(self, folder: Path) -> None:
        program = Path(__file__).with_name("application_worker.py")
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._more = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._more:
                    self._events.append(json.loads(line))
                    self._more.notify_all()

    def events(self, kind: str) -> list[dict[str, Any]]:
        with self._more:
            return [event for event in self._events if event["event"] == kind]

    def wait_for(self, count: int, kind: str) -> list[dict[str, Any]]:
        with self._more:
            enough = self._more.wait_for(lambda: len(self.events(kind)) >= count, PATIENCE_S)
            assert enough, f"{count} x {kind} expected: {self._events}"
        return self.events(kind)

    def start(
        self,
        run: int,
        script: str,
        application: ApplicationId = APP,
        stop_timeout_s: float = 5.0,
        lasts_s: float | None = None,
        check: HealthCheck | None = None,
    ) -> None:
        assert self.process.stdin is not None
        made = manifest(script, stop_timeout_s).model_copy(update={"health_check": check})
        written = json.loads(made.model_dump_json())
        order = {"run": run, "application": str(application), "manifest": written, "lasts_s": lasts_s}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    @property
    def shim(self) -> int:
        (child,) = children(self.process.pid)
        return child

    @property
    def logger(self) -> int:
        def found() -> list[int]:
            return [pid for pid in children(self.shim) if runs_program(pid, "output_logger.py")]

        (logger,) = wait_until(found, "the logger runs")
        return logger

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill it; nothing that it started writes to its output any more when this returns."""
        self.kill()
        self._reader.join()
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextmanager
def working(folder: Path) -> Iterator[Worker]:
    worker = Worker(folder)
    try:
        yield worker
    finally:
        worker.end()


@pytest.mark.rule("SH-17")
def test_a_killed_worker_leaves_nothing_behind_and_the_last_words_are_kept(tmp_path: Path) -> None:
    with working(tmp_path) as worker:
        worker.start(1, "trap 'echo bye; exit 0' TERM; echo ready; sleep 2005 & while :; do sleep 0.05; done")
        worker.start(1, FAMILY, OTHER)
        groups = [event["pid"] for event in worker.wait_for(2, "started")]
        wait_until(lambda: all(len(members(group)) >= 2 for group in groups), "both have descendants")
        wait_until(lambda: list(tail(tmp_path, APP)) == ["ready"], "it is ready")
        worker.kill()
        wait_until(lambda: not any(map(members, groups)), "no process and no child of one")
    wait_until(lambda: list(tail(tmp_path, APP))[-1] == "bye", "the last words")


@pytest.mark.rule("SH-17", "SH-13")
def test_the_next_worker_of_a_folder_begins_once_the_processes_of_the_last_one_have_ended_as_they_may(
    tmp_path: Path,
) -> None:
    with working(tmp_path) as worker:
        (first,) = worker.wait_for(1, "opened")
        worker.start(
            1, "trap 'sleep 1.5; echo in peace; exit 0' TERM; sleep 2008 & while :; do sleep 0.05; done"
        )
        (started,) = worker.wait_for(1, "started")
        wait_until(lambda: len(members(started["pid"])) >= 2, "it runs with its descendant")
        worker.kill()
        with working(tmp_path) as again:
            wait_until(lambda: again.events("opened") or not members(started["pid"]), "one or the other")
            assert not again.events("opened"), "the folder was opened while a process of it still ran"
            (second,) = again.wait_for(1, "opened")
            assert (second["lineage"], second["number"]) == (first["lineage"], first["number"] + 1)
            assert list(tail(tmp_path, APP))[-1] == "in peace"


@pytest.mark.rule("SH-17", "SH-13")
@pytest.mark.parametrize("script", ["sleep 2011 & exec sleep 2012", "setsid sleep 2011 & exec sleep 2012"])
def test_a_silent_descendant_does_not_outlive_a_worker_and_its_shim_that_are_killed_at_once(
    tmp_path: Path, script: str
) -> None:
    with working(tmp_path) as worker:
        worker.start(1, script)
        (started,) = worker.wait_for(1, "started")
        wait_until(lambda: holders(tmp_path, "2011"), "its descendant runs")
        wait_until(lambda: runs_program(started["pid"], "2012"), "it runs")
        assert worker.logger
        os.kill(worker.process.pid, signal.SIGSTOP)
        os.kill(worker.shim, signal.SIGKILL)
        worker.kill()
        wait_until(lambda: not holders(tmp_path, "2011"), "its descendant is gone")
        assert not members(started["pid"])


@pytest.mark.rule("SH-17", "SH-23")
def test_a_silent_child_of_a_check_does_not_outlive_a_worker_and_its_shim_that_are_killed_at_once(
    tmp_path: Path,
) -> None:
    sign = tmp_path / "group"
    script = f"sleep 2013 & echo $$ > {sign}.new; mv {sign}.new {sign}; exec sleep 2014"
    check = HealthCheck(exec=("sh", "-c", script), timeout_s=PATIENCE_S)
    with working(tmp_path) as worker:
        worker.start(1, "exec sleep 2000", check=check)
        worker.wait_for(1, "started")
        wait_until(sign.exists, "a check is under way")
        group = int(sign.read_text())
        wait_until(lambda: runs_program(group, "2014"), "it runs")
        assert worker.logger
        os.kill(worker.process.pid, signal.SIGSTOP)
        os.kill(worker.shim, signal.SIGKILL)
        worker.kill()
        wait_until(lambda: not members(group), "its child is gone")


@pytest.mark.rule("SH-17", "SH-13")
def test_what_outlives_a_worker_and_its_shim_is_killed_before_the_folder_is_opened_again(
    tmp_path: Path,
) -> None:
    with working(tmp_path) as worker:
        worker.start(1, STUBBORN)
        (started,) = worker.wait_for(1, "started")
        wait_until(lambda: len(members(started["pid"])) >= 3, "it runs with its descendants")
        os.kill(worker.process.pid, signal.SIGSTOP)
        shim, logger = worker.shim, worker.logger
        os.kill(shim, signal.SIGSTOP)
        for pid in (logger, shim):
            os.kill(pid, signal.SIGKILL)
        worker.kill()
    assert members(started["pid"])
    with DataFolder.open(tmp_path):
        assert not members(started["pid"])


@pytest.mark.rule("SH-17")
def test_two_workers_never_share_a_folder(bench: Bench) -> None:
    with pytest.raises(UnusableFolder, match="give each worker a folder of its own"):
        DataFolder.open(bench.folder, timeout_s=0.2)


@pytest.mark.rule("SH-14")
def test_a_stopped_worker_loses_what_is_exclusive_at_its_deadline_and_the_rest_runs_on(
    tmp_path: Path,
) -> None:
    with working(tmp_path) as worker:
        worker.start(1, STUBBORN, APP, stop_timeout_s=0.5, lasts_s=2.0)
        worker.start(1, TALKER, OTHER, stop_timeout_s=0.5)
        pids = {event["application"]: event["pid"] for event in worker.wait_for(2, "started")}
        exclusive, available = pids[str(APP)], pids[str(OTHER)]
        wait_until(lambda: len(members(exclusive)) >= 3, "the exclusive one runs with its descendants")
        os.kill(worker.process.pid, signal.SIGSTOP)
        wait_until(lambda: not members(exclusive), "the shim ends it", ENDED_WITHIN_S)
        said = len(list(tail(tmp_path, OTHER, 10_000)))
        wait_until(lambda: len(list(tail(tmp_path, OTHER, 10_000))) > said + 10, "its output is kept on")
        assert members(available)
        os.kill(worker.process.pid, signal.SIGCONT)
        (exited,) = worker.wait_for(1, "exited")
        assert (exited["application"], exited["code"]) == (str(APP), -signal.SIGKILL)


@pytest.mark.rule("SH-14")
def test_a_deadline_counts_for_its_own_process_only_and_nothing_starts_after_it(bench: Bench) -> None:
    now = SystemClock().now()
    bench.start(1, manifest(FAMILY, 0.1), OTHER, deadline=now + 600)
    other = bench.started(1, OTHER)
    bench.start(1, manifest(FAMILY, 0.1), APP, deadline=SystemClock().now() + 1.5)
    bench.started(1)
    assert bench.exited(1).code == -signal.SIGTERM
    assert members(other)
    bench.start(2, manifest(FAMILY), APP, deadline=now)
    assert bench.exited(2) == ProcessExited(APP, 2, None, "access ended")


@pytest.mark.rule("SH-14")
def test_a_deadline_that_is_extended_is_not_kept_before(bench: Bench) -> None:
    began = SystemClock().now()
    bench.start(1, manifest(STUBBORN, 0.2), deadline=began + 2.0)
    group = bench.started(1)
    bench.processes.extend(APP, 1, began + 3.0)
    bench.processes.extend(APP, 1, began + 2.5)
    wait_until(lambda: len(members(group)) >= 3, "it ignores SIGTERM by now")
    assert bench.exited(1).code == -signal.SIGKILL
    assert SystemClock().now() - began >= 3.0


@pytest.mark.rule("SH-14")
@pytest.mark.parametrize("passed", [True, False])
def test_a_deadline_that_has_passed_is_not_extended_any_more(passed: bool) -> None:
    """As after a freeze of the whole host, when the order is read before anything was killed."""
    frozen = object.__new__(SupervisorShim)
    waiting = _Waiting(1, SupervisedCommand(("true",), 1.0), [], shim_now() + (-0.1 if passed else 60.0), 0.0)
    frozen._waiting, frozen._children = [waiting], {}
    before, later = waiting.deadline, shim_now() + 120.0
    frozen._obey({"do": "extend", "number": None, "deadline": later}, [])
    assert waiting.deadline == (before if passed else later)


@pytest.mark.rule("SH-17")
def test_a_process_that_ignores_sigterm_is_killed_after_its_stop_timeout(bench: Bench) -> None:
    bench.start(1, manifest(STUBBORN, stop_timeout_s=0.5))
    group = bench.started(1)
    wait_until(lambda: len(members(group)) >= 3, "it runs with its descendants")
    began = time.monotonic()
    bench.processes.stop(APP, 1)
    assert bench.exited(1).code == -signal.SIGKILL
    assert time.monotonic() - began >= 0.5
    assert not members(group)


def checked(script: str, interval_s: float = 0.05, **check: Any) -> Manifest:
    health = HealthCheck(**{"interval_s": interval_s, "timeout_s": PATIENCE_S, **check})
    return manifest(script).model_copy(update={"health_check": health})


def error_of_check(bench: Bench) -> str:
    event = bench.next()
    assert isinstance(event, HealthChecked)
    return event.error


@pytest.mark.rule("SH-23")
def test_a_command_checks_a_process_in_its_folder_and_environment(bench: Bench, tmp_path: Path) -> None:
    script = '[ "$SHIVA_TOKEN" = 7 ] && [ $PWD = "$0" ] && [ -e "$1" ] || exit 3'
    sign = tmp_path / "healthy"
    bench.start(1, checked("sleep 2000", exec=("sh", "-c", script, str(bench.folder), str(sign))))
    bench.started(1)
    assert error_of_check(bench) == "exit code 3"
    sign.touch()
    wait_until(lambda: error_of_check(bench) == "", "a check passes")
    sign.unlink()
    wait_until(lambda: error_of_check(bench) == "exit code 3", "a check fails")


@pytest.mark.rule("SH-23")
@pytest.mark.parametrize(
    ("command", "timeout_s", "error"),
    [(("sleep", "2000"), 0.2, "no answer within 0.2 s"), (("/none",), PATIENCE_S, "could not be started: ")],
)
def test_a_check_that_takes_too_long_or_cannot_run_fails(
    bench: Bench, command: tuple[str, ...], timeout_s: float, error: str
) -> None:
    bench.start(1, checked("sleep 2000", exec=command, timeout_s=timeout_s))
    bench.started(1)
    assert error_of_check(bench).startswith(error)


@pytest.mark.rule("SH-23")
@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("setsid sh -c '{tell}; sleep 2015' & exec sleep 2000", "no answer within 2 s"),
        ("setsid sh -c 'setsid sh -c \"{tell}; sleep 2015 & sleep 2015\" & sleep 2015' & {wait}", ""),
    ],
)
def test_what_a_check_leaves_in_another_session_ends_with_it(
    bench: Bench, tmp_path: Path, command: str, error: str
) -> None:
    sign = tmp_path / "session"
    tell, wait = f"cut -d\\  -f5 /proc/self/stat > {sign}", f"until [ -s {sign} ]; do sleep 0.02; done"
    script = f"[ -e {sign} ] && exit 4; {command.format(tell=tell, wait=wait)}"
    outside = "setsid sh -c 'echo $$; exec sleep 2016' & exec sleep 2000"
    bench.start(1, checked(outside, exec=("sh", "-c", script), timeout_s=2.0 if error else PATIENCE_S))
    bench.started(1)
    assert error_of_check(bench) == error
    assert not members(int(sign.read_text()))
    wait_until(bench.output, "what has left the process itself runs on")
    (escaped,) = map(int, bench.output())
    assert runs_program(escaped, "2016")
    os.kill(escaped, signal.SIGKILL)


@pytest.mark.rule("SH-17", "SH-23")
def test_at_the_limit_of_threads_a_process_that_cannot_be_checked_ends_and_nothing_else_does(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in {"rebalanser-health", "rebalanser-last-resort"}:
            raise RuntimeError("can't start new thread")
        start(thread)

    bench.start(1, manifest("sleep 2000"), OTHER)
    bench.started(1, OTHER)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench.start(1, checked("sleep 2000", tcp="127.0.0.1:1"))
    bench.started(1)
    assert bench.exited(1).code == -signal.SIGTERM
    bench.processes.stop(OTHER, 1)
    assert bench.exited(1, OTHER).code == -signal.SIGTERM


@pytest.mark.rule("SH-13", "SH-23")
@pytest.mark.parametrize("by_itself", [True, False])
def test_a_process_has_ended_once_its_check_has(bench: Bench, tmp_path: Path, by_itself: bool) -> None:
    sign = tmp_path / "group"
    check = ("sh", "-c", f'trap "" TERM; echo $$ > {sign}.new; mv {sign}.new {sign}; sleep 2000; sleep 2000')
    bench.start(1, checked("sleep 2000", exec=check))
    group = bench.started(1)
    wait_until(sign.exists, "a check is under way")
    if by_itself:
        os.killpg(group, signal.SIGKILL)
    else:
        bench.processes.stop(APP, 1)
    bench.exited(1)
    assert not members(int(sign.read_text()))
    assert bench.events.empty()


@pytest.mark.rule("SH-23")
def test_closing_ends_a_check_that_is_under_way(bench: Bench, tmp_path: Path) -> None:
    sign = tmp_path / "group"
    bench.start(1, checked("sleep 2000", exec=("sh", "-c", f"echo $$ > {sign}; sleep 2000")))
    bench.started(1)
    wait_until(lambda: sign.exists() and sign.read_text(), "a check is under way")
    bench.processes.close()
    assert not members(int(sign.read_text()))
    wait_until(
        lambda: "rebalanser-health" not in {thread.name for thread in threading.enumerate()},
        "its thread ends",
    )


@contextmanager
def answering(*parts: bytes) -> Iterator[int]:
    """A server on a port of its own that answers so, and leaves the answer open if the last part is empty."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                held.append(connection)
                if parts:
                    connection.recv(4096)
                for part in parts:
                    connection.sendall(part)
                if parts and parts[-1]:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        for connection in held:
            connection.close()


@pytest.mark.rule("SH-23")
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((b"HTTP/1.1 200 OK\r\n\r\n",), ""),
        ((b"HTTP/1.0 3", b"02 Found\r\nLocation: /\r\n\r\n", b""), ""),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), "HTTP status 503"),
        ((b"+OK ready\r\n",), "the answer is not HTTP"),
        ((b"H" * 5000,), "the answer is not HTTP"),
        ((b"HTTP/1.1 20", b""), "no answer within 0.2 s"),
    ],
)
def test_an_http_check_goes_by_the_status(bench: Bench, answer: tuple[bytes, ...], error: str) -> None:
    with answering(*answer) as port:
        check = HealthCheck(
            http=f"http://127.0.0.1:{port}/health?deep=1", timeout_s=0.2 if "0.2" in error else 60.0
        )
        assert bench.processes._failure_of((APP, 1), mock.Mock(), check) == error


@pytest.mark.rule("SH-23")
def test_a_tcp_check_goes_by_the_connection(bench: Bench) -> None:
    with answering() as port:
        check = HealthCheck(tcp=f"127.0.0.1:{port}")
        assert bench.processes._failure_of((APP, 1), mock.Mock(), check) == ""
    assert "refused" in bench.processes._failure_of((APP, 1), mock.Mock(), check)


@pytest.mark.rule("SH-17")
def test_a_stopped_shim_does_not_keep_a_process_alive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OWN_HANDS_S", 0.2)
    bench.start(1, manifest(STUBBORN, stop_timeout_s=0.2))
    group = bench.started(1)
    shim = bench.shim
    os.kill(shim, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for number in range(2_000):
            bench.processes.extend(APP, 1, float(number))
        assert time.monotonic() - began < 20.0 * patience_ratio(), "orders wait for a shim that takes none"
        bench.processes.stop(APP, 1)
        wait_until(lambda: not members(group), "the worker kills the group")
    finally:
        os.kill(shim, signal.SIGCONT)
    assert bench.exited(1).code == -signal.SIGKILL


@pytest.mark.rule("SH-17")
def test_after_the_shim_died_everything_is_gone_and_the_next_start_has_a_new_one(bench: Bench) -> None:
    bench.start(1, manifest(STUBBORN))
    group = bench.started(1)
    os.kill(bench.shim, signal.SIGKILL)
    assert bench.exited(1) == ProcessExited(APP, 1, None, "the shim of the subprocesses died")
    assert not members(group)
    wait_until(lambda: bench.processes._shim is None, "the loss is noticed")
    bench.start(2, manifest(FAMILY))
    assert members(bench.started(2))


@pytest.mark.rule("SH-13", "SH-17")
def test_a_second_process_of_an_application_waits_until_the_first_has_ended(bench: Bench) -> None:
    bench.start(1, manifest(STUBBORN, stop_timeout_s=0.5))
    group = bench.started(1)
    wait_until(lambda: len(members(group)) >= 3, "it runs with its descendants")
    bench.processes.stop(APP, 1)
    bench.start(2, manifest(FAMILY))
    assert bench.exited(1).code == -signal.SIGKILL
    assert not members(group)
    assert members(bench.started(2))


@pytest.mark.rule("SH-13", "SH-17")
def test_a_start_gives_up_while_something_of_the_application_lives_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.3)
    bench.start(1, manifest("echo $$; setsid sh -c 'echo $$; exec sleep 2006' & sleep 0.2"))
    bench.started(1)
    assert bench.exited(1).code == 0
    wait_until(lambda: len(bench.output()) == 2, "its output is kept")
    escaped = int(bench.output()[-1])
    bench.start(2, manifest("true"))
    assert bench.exited(2) == ProcessExited(APP, 2, None, "an earlier process still runs after 0.3 s")
    os.kill(escaped, signal.SIGKILL)
    bench.start(3, manifest("true"))
    bench.started(3)
    assert bench.exited(3).code == 0


def test_a_process_that_is_stopped_before_it_began_never_begins(bench: Bench) -> None:
    bench.start(1, manifest(STUBBORN, stop_timeout_s=0.5))
    bench.started(1)
    bench.start(2, manifest(FAMILY))
    bench.processes.stop(APP, 2)
    assert bench.exited(2) == ProcessExited(APP, 2, None, "it was stopped before it began")


@pytest.mark.rule("SH-17")
def test_closing_stops_everything(bench: Bench) -> None:
    bench.start(1, manifest("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done"))
    group = bench.started(1)
    wait_until(lambda: bench.output() == ["ready"], "it is ready")
    bench.close()
    assert not members(group)
    wait_until(lambda: bench.output()[-1] == "bye", "the last words")
    bench.start(2, manifest("true"))
    assert bench.exited(2) == ProcessExited(APP, 2, None, "the worker is stopping")


@pytest.mark.rule("SH-17")
def test_many_are_started_at_once(bench: Bench) -> None:
    many = [ApplicationId("tenant", "channel", f"app{number}") for number in range(40)]
    for application in many:
        bench.start(1, manifest("sleep 2007"), application)
    assert {bench.next() for _ in many} == {ProcessStarted(application, 1) for application in many}
    bench.close()
    assert not any(members(group) for group in bench.pids.values())


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (("sh", "-c", "exit 3"), 3, ""),
        (("sh", "-c", "kill -9 $$"), -9, ""),
        (("no-such-command",), None, "[Errno 2] No such file or directory: 'no-such-command'"),
        (("./missing",), None, "[Errno 2] No such file or directory: './missing'"),
    ],
)
def test_how_it_ended_is_told(bench: Bench, command: tuple[str, ...], code: int | None, error: str) -> None:
    bench.start(1, Manifest(command=command))
    if code is not None:
        bench.started(1)
    assert bench.exited(1) == ProcessExited(APP, 1, code, error)


def test_a_script_that_does_not_name_its_interpreter_is_told_so(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "work.sh"
    script.write_text("echo hi\n")
    script.chmod(0o755)
    bench.start(1, Manifest(command=(str(script),)))
    why = f"'{script}' is neither a program for this machine nor a script whose first line names its "
    assert bench.exited(1) == ProcessExited(APP, 1, None, f"{why}interpreter, such as #!/bin/sh")


def test_a_process_gets_what_its_manifest_says_and_no_secret_of_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    limits = Limits(open_files=77, memory_bytes=256 * 1024 * 1024)
    script = "env; pwd; ulimit -n; ulimit -d; echo end"
    made = Manifest(command=("sh", "-c", script), environment={"GREETING": "hi"}, limits=limits)
    bench.start(1, made)
    bench.started(1)
    bench.exited(1)
    wait_until(lambda: bench.output()[-1:] == ["end"], lambda: f"all of its output: {bench.output()}")
    *environment, folder, files, data_kib, _end = bench.output()
    assert (folder, files, data_kib) == (str(bench.folder), "77", str(256 * 1024))
    told = dict(line.split("=", 1) for line in environment)
    assert "KAFKA_PASSWORD" not in told
    assert told["GREETING"] == "hi"
    own = {name: value for name, value in told.items() if name.startswith("SHIVA_")}
    assert own == {
        "SHIVA_TENANT": "tenant",
        "SHIVA_CHANNEL": "channel",
        "SHIVA_APPLICATION": "app",
        "SHIVA_REPLICA": "0",
        "SHIVA_REPLICAS": "1",
        "SHIVA_WORKER": "worker-1",
        "SHIVA_TOKEN": "7",
        "SHIVA_DATA": str(bench.data.data_of(APP)),
    }


@pytest.mark.rule("SH-17")
def test_nothing_that_is_printed_is_lost_and_the_files_do_not_grow_beyond_their_limits(bench: Bench) -> None:
    bench.start(1, manifest("seq 1 200000; printf 'no line end'"))
    bench.start(1, manifest("seq 1 200000", limits=Limits(log_bytes=65_536, log_files=3)), OTHER)
    for _ in range(4):
        bench.next()
    wait_until(lambda: bench.output(APP, 1) == ["no line end"], "all of one is written")
    wait_until(lambda: bench.output(OTHER, 1) == ["200000"], "all of the other is written")
    assert bench.output(APP) == [*map(str, range(1, 200_001)), "no line end"]
    kept = sorted(output_file(bench.folder, OTHER).parent.iterdir())
    assert [file.name for file in kept] == ["output.log", "output.log.1", "output.log.2"]
    assert all(file.stat().st_size <= 65_536 for file in kept)
    last = bench.output(OTHER)
    assert last == [*map(str, range(200_001 - len(last), 200_001))]
    assert len(last) > 10_000


@pytest.mark.rule("SH-17")
def test_a_killed_keeper_of_the_output_costs_no_process_and_is_replaced(bench: Bench) -> None:
    bench.start(1, manifest(TALKER))
    group = bench.started(1)
    wait_until(lambda: len(bench.output()) > 5, "output is kept")
    (logger,) = (pid for pid in children(bench.shim) if runs_program(pid, "output_logger.py"))
    os.kill(logger, signal.SIGKILL)
    said = len(bench.output())
    wait_until(lambda: len(bench.output()) > said + 20, "output is kept again")
    assert members(group)
    bench.processes.stop(APP, 1)
    bench.exited(1)
    numbers = [int(line.removeprefix("line ")) for line in bench.output()]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.rule("SH-17")
def test_output_that_no_disk_takes_does_not_hold_the_process_up(bench: Bench) -> None:
    in_the_way = output_file(bench.folder, APP)
    in_the_way.mkdir(parents=True)
    printed, go_on = bench.data.data_of(APP) / "printed", bench.data.data_of(APP) / "go_on"
    bench.start(
        1, manifest(f"seq 1 400000; : > {printed}; while ! [ -f {go_on} ]; do sleep 0.02; done; seq 9")
    )
    bench.started(1)
    wait_until(printed.exists, "it got rid of more than a pipe takes")
    in_the_way.rmdir()
    go_on.touch()
    assert bench.exited(1).code == 0
    wait_until(lambda: bench.output(lines=1) == ["9"], "output is kept again")
    first, *kept = bench.output()
    lost = re.fullmatch(r"\[(\d+) bytes of output were lost: they could not be written\]", first)
    assert lost is not None
    all_bytes = sum(len(f"{number}\n") for number in [*range(1, 400_001), *range(1, 10)])
    assert int(lost[1]) + sum(len(line) + 1 for line in kept) == all_bytes
