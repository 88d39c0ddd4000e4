"""``make demo``: workers share a real stream, come, go, crash and fall asleep, and not a line is lost.

Three workers, a fourth joins; then the leader is killed with ``kill -9``, the next leader is stopped with
SIGSTOP past its lease and resumed with a batch in its hands, and the leader after that leaves gracefully. At
the end the output is compared with a direct count by a single process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Self

from comparison import Comparison, compare
from consumer_group_sharding import GROUP, SCHEMA
from demo_view import Scene, View
from rich.console import Console
from rich.table import Table
from stdlib_stream import Stream

import rebalanser
from rebalanser.core.allocation import minimum_moves, moves
from rebalanser.history import Record, read_records
from rebalanser.runtime.clock import SystemClock
from rebalanser.state import GroupState, NodeState
from rebalanser.testing.etcd_server import EtcdCluster
from rebalanser.testing.kafka_server import KafkaCluster
from rebalanser.testing.pausing import can_be_written
from rebalanser.testing.servers import ServerFailed, ServerMissing
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser.testing.witness import Witness, WitnessVerdict

HERE = Path(__file__).resolve().parent
LEASE_TTL_S = 3.0
LOOK_EVERY_S = 0.05
BREATH_S = 1.5
"""How long the workers work in peace between two acts."""

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoFailed(Exception):
    """Something did not happen that had to."""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """What one change did to the group."""

    cause: str
    moved: int
    """Partitions that a living worker had and another one has now."""
    minimum: int
    """The fewest with which the group could have been balanced."""
    taken_over: int
    """Partitions whose owner is gone, or that never had one."""
    began_at: float
    balanced_at: float
    newcomer: str | None = None
    """The node whose registration was the cause; its process needs a moment until then."""


class Worker:
    """A worker process."""

    def __init__(self, label: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.label = label
        self.process = process
        self.log = log
        self.doing = "running"

    def signal(self, number: signal.Signals, doing: str) -> None:
        """Send a signal, after which the process does something else."""
        self.process.send_signal(number)
        self.doing = doing

    def check(self) -> None:
        """See that it has not ended by itself."""
        if self.doing in {"running", "stopped"} and self.process.poll() is not None:
            self.fail(f"ended by itself with {self.process.returncode}")

    def fail(self, why: str) -> NoReturn:
        """Raise, with the end of what the worker said."""
        last_words = self.log.read_text(errors="replace").splitlines()[-15:]
        raise DemoFailed("\n".join([f"worker {self.label} {why}; the end of what it said:", *last_words]))


class Demo:
    """The acts, on a registry and in a folder of their own."""

    def __init__(self, url: str, folder: Path, history: Path, view: View, *, fenced: bool) -> None:
        self.stream = Stream(folder)
        self.sink_path = folder / "sink.db"
        self.witness = Witness(folder / "witness.jsonl")
        self.rebalances: list[Rebalance] = []
        self.stopped: Worker | None = None
        self._url = url
        self._folder = folder
        self._view = view
        self._fenced = fenced
        self._clock = SystemClock()
        self._workers: dict[str, Worker] = {}
        self._environment = {
            **os.environ,
            "REBALANSER_LEASE_TTL_S": f"{LEASE_TTL_S:g}",
            "REBALANSER_HISTORY_DIR": str(history),
            "REBALANSER_FENCED": str(fenced).lower(),
        }
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._sink = stack.enter_context(
                contextlib.closing(sqlite3.connect(self.sink_path, timeout=PATIENCE_S))
            )
            self._sink.executescript(SCHEMA)
            self._admin = stack.enter_context(rebalanser.Admin(GROUP, self._url))
            self._admin.add(self.stream.partitions)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """All acts.

        Raises:
            DemoFailed: something did not happen that had to; the message says what.
        """
        producer = self._spawn("producer", "consumer_group_sharding.py", "produce")
        for label in "abc":
            self._join(label)
        self._work_in_peace()
        self._join("d")
        self._work_in_peace()
        self._kill(self._leader())
        self._work_in_peace()
        self._stop_past_its_lease(self._leader())
        self._work_in_peace()
        self._leave(self._leader())
        self._work_in_peace()
        self._finish(producer)

    def _join(self, label: str) -> None:
        def start() -> None:
            fence = [] if self._fenced else ["--without-fence"]
            process, log = self._spawn(label, "demo_worker.py", "--node", label, *fence)
            self._workers[label] = Worker(label, process, log)

        self._rebalance(f"{label} joins", start, lambda state: _node(state, label) is not None)
        newcomer = self._node(label).node
        self.rebalances[-1] = replace(self.rebalances[-1], newcomer=newcomer)

    def _kill(self, worker: Worker) -> None:
        def kill() -> None:
            worker.signal(signal.SIGKILL, "killed")
            worker.process.wait()
            self.witness.died(worker.process.pid)

        node = self._node(worker.label).node
        self._rebalance(f"kill -9 of {worker.label}, the leader", kill, lambda state: _is_gone(state, node))

    def _stop_past_its_lease(self, worker: Worker) -> None:
        """SIGSTOP between reading and writing; others take over; SIGCONT, and the write is attempted."""
        self.stopped = worker
        node = self._node(worker.label).node
        before = {r.resource: r.token or 0 for r in self._admin.state().resources if r.held_by == node}
        self._rebalance(
            f"SIGSTOP of {worker.label}, the leader",
            lambda: self._stop_before_a_write(worker),
            lambda state: _is_gone(state, node),
        )
        self._until(lambda _: self._fence_is_above(before), "the new owners put up their fences")
        self._view.tell(f"all that {worker.label} had is fenced; now it wakes up with a batch in its hands")
        self._rebalance(
            f"{worker.label} resumes and joins again",
            lambda: worker.signal(signal.SIGCONT, "running"),
            lambda state: _node(state, worker.label) is not None,
        )

    def _stop_before_a_write(self, worker: Worker) -> None:
        for _ in range(5):
            worker.process.send_signal(signal.SIGUSR1)
            self._until(lambda _: _is_stopped(worker.process.pid), f"{worker.label} stops before a write")
            worker.doing = "stopped"
            if can_be_written(self._url):
                return
            # It was stopped just while another of its threads held the lock of the registry's file. SQLite's
            # locks do not end, so that nobody else could go on.
            worker.signal(signal.SIGCONT, "running")
        raise DemoFailed(f"{worker.label} could not be stopped without holding the registry's lock")

    def _fence_is_above(self, tokens: dict[str, int]) -> bool:
        now = dict(self._sink.execute("SELECT partition, token FROM fence"))
        return all(now.get(partition, 0) > token for partition, token in tokens.items())

    def _leave(self, worker: Worker) -> None:
        node = self._node(worker.label).node
        self._rebalance(
            f"{worker.label}, the leader, leaves",
            lambda: worker.signal(signal.SIGTERM, "left"),
            lambda state: _is_gone(state, node),
        )
        self._expect_clean_exit(worker)

    def _finish(self, producer: tuple[subprocess.Popen[bytes], Path]) -> None:
        """End the stream, let the workers catch up, and have all of them leave."""
        process, log = producer
        process.terminate()
        self._until(lambda _: process.poll() is not None, "the producer ends")
        if process.returncode:
            raise DemoFailed(f"the producer ended with {process.returncode}: {log.read_text()}")
        self._view.tell("the stream has ended; the workers catch up")
        self._until(lambda _: self._behind_bytes() == 0, "the workers catch up")
        remaining = [worker for worker in self._workers.values() if worker.doing == "running"]
        for worker in remaining:
            worker.signal(signal.SIGTERM, "left")
        for worker in remaining:
            self._expect_clean_exit(worker)

    def _expect_clean_exit(self, worker: Worker) -> None:
        try:
            code = worker.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            worker.fail("did not leave")
        if code:
            worker.fail(f"left with {code}")

    def _rebalance(self, cause: str, act: Callable[[], None], reached: Callable[[GroupState], bool]) -> None:
        """Do something to the group, and note what it did until it was balanced again."""
        before = self._admin.state()
        self._view.tell(cause)
        began_at = self._clock.now()
        act()
        after = self._until(lambda state: state.balanced and reached(state), f"balanced after: {cause}")
        balanced_at = self._clock.now()
        had, has = _shares(before), _shares(after)
        partitions = [r.resource for r in after.resources]
        kept_owner = {partition for node, share in had.items() if node in has for partition in share}
        self.rebalances.append(
            Rebalance(
                cause=cause,
                moved=moves(had, has),
                minimum=minimum_moves(has.keys(), partitions, had),
                taken_over=sum(partition not in kept_owner for partition in partitions),
                began_at=began_at,
                balanced_at=balanced_at,
            )
        )

    def _work_in_peace(self) -> None:
        end = self._clock.now() + BREATH_S
        self._until(lambda _: self._clock.now() >= end, "time passes")

    def _until(self, reached: Callable[[GroupState], bool], what: str) -> GroupState:
        """Look at the group, and show it, until it is as wanted."""
        deadline = self._clock.now() + PATIENCE_S
        while not reached(state := self._admin.state()):
            for worker in self._workers.values():
                worker.check()
            if self._clock.now() > deadline:
                raise DemoFailed(f"waited for {PATIENCE_S:g} s in vain: {what}")
            self._show(state)
            time.sleep(LOOK_EVERY_S)
        self._show(state)
        return state

    def _show(self, state: GroupState) -> None:
        written = self._sink.execute("SELECT writer, sum(lines) FROM accepted GROUP BY writer")
        (refused,) = self._sink.execute("SELECT count(*) FROM refused").fetchone()
        self._view.show(
            Scene(
                state=state,
                processes={worker.label: worker.doing for worker in self._workers.values()},
                written=dict(written),
                behind_bytes=self._behind_bytes(),
                refused=refused,
            )
        )

    def _behind_bytes(self) -> int:
        done = dict(self._sink.execute("SELECT partition, max(last) FROM accepted GROUP BY partition"))
        return sum(
            self.stream.size(partition) - done.get(partition, 0) for partition in self.stream.partitions
        )

    def _leader(self) -> Worker:
        state = self._until(lambda state: state.leader is not None, "a leader")
        return self._workers[state.leader or ""]

    def _node(self, label: str) -> NodeState:
        node = _node(self._admin.state(), label)
        if node is None:
            raise DemoFailed(f"{label} is no member of the group")
        return node

    def _spawn(self, name: str, program: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a process that does not outlive this one, and does not hear a Ctrl-C meant for it."""
        setpriv = shutil.which("setpriv")
        bound_to_us = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        options = ["--registry", self._url, "--folder", str(self._folder)]
        log = self._folder / f"{name}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*bound_to_us, sys.executable, str(HERE / program), *options, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._stack.callback(_end, process)
        return process, log


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _node(state: GroupState, label: str) -> NodeState | None:
    return next((node for node in state.nodes if node.label == label), None)


def _is_gone(state: GroupState, node: str) -> bool:
    return all(each.node != node for each in state.nodes)


def _shares(state: GroupState) -> dict[str, list[str]]:
    """What the allocation gives each live node."""
    shares: dict[str, list[str]] = {node.node: [] for node in state.nodes}
    for resource in state.resources:
        if resource.assigned_to in shares:
            shares[resource.assigned_to].append(resource.resource)
    return shares


def _is_stopped(pid: int) -> bool:
    """Whether a child process is stopped; one that has ended is not."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def joined_at(history: Path) -> dict[str, float]:
    """When each node began to register, by its id."""
    records = (record for record in read_records(history) if isinstance(record, Record))
    return {r.node: r.monotonic_time for r in reversed(list(records)) if r.kind == rebalanser.FactKind.JOINED}


def problems(demo: Demo, found: Comparison, verdict: WitnessVerdict) -> Iterator[str]:
    """Everything that is not as promised."""
    if found.accepted_twice:
        yield f"{found.accepted_twice:,} lines were accepted twice"
    if found.lost or found.waiting:
        yield f"{found.lost + found.waiting:,} lines were lost"
    if found.wrong_files or found.produced != found.processed:
        yield f"the output differs from the direct count in {len(found.wrong_files)} files"
    if not found.refused:
        yield "no stale write was refused"
    for rebalance in demo.rebalances:
        if rebalance.moved > rebalance.minimum:
            yield f"{rebalance.cause}: {rebalance.moved} moves where {rebalance.minimum} are enough"
    for before, after in verdict.disorders:
        yield f"the token of {after.resource} went from {before.token} to {after.token}"
    stopped_pid = demo.stopped.process.pid if demo.stopped else None
    for overlap in verdict.overlaps:
        if overlap.first.pid != stopped_pid or not overlap.fenced:
            yield f"two owners at once: {overlap}"


def report(console: Console, demo: Demo, found: Comparison, history: Path) -> None:
    """Print the rebalances, and the comparison with the direct count."""
    registered = joined_at(history)
    table = Table(title="rebalances")
    table.add_column("cause")
    for heading in ("moved", "minimum", "taken over", "balanced in s"):
        table.add_column(heading, justify="right")
    for each in demo.rebalances:
        began_at = registered.get(each.newcomer or "", each.began_at)
        took = f"{max(0.0, each.balanced_at - began_at):.2f}"
        table.add_row(each.cause, str(each.moved), str(each.minimum), str(each.taken_over), took)
    console.print(table)
    console.print("\n".join(found.lines()), highlight=False)


@contextlib.contextmanager
def registry_of(name: str, folder: Path) -> Iterator[str]:
    """The URL of a registry: a SQLite file, or servers that live as long as the context."""
    match name:
        case "etcd":
            with EtcdCluster(3, data_folder=folder / "etcd") as etcd:
                yield etcd.url("demo")
        case "kafka":
            with KafkaCluster(data_folder=folder / "kafka") as kafka:
                yield kafka.url("demo")
        case _:
            yield f"sqlite:///{folder / 'groups.db'}"


def play(console: Console, registry: str, history: Path, *, fenced: bool) -> int:
    """Set everything up, run it, compare, clean up; 0 if everything is as promised."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rebalanser-demo-")))
        url = stack.enter_context(registry_of(registry, folder))
        view = stack.enter_context(View(console))
        demo = stack.enter_context(Demo(url, folder, history, view, fenced=fenced))
        demo.run()
        view.tell("a single process counts the same lines directly")
        found = compare(demo.stream, demo.sink_path)
        wrong = list(problems(demo, found, demo.witness.check()))
    report(console, demo, found, history)
    for problem in wrong:
        console.print(f"NOT AS PROMISED: {problem}", highlight=False, soft_wrap=True, style="red")
    if not wrong:
        console.print("Every line was counted exactly once.", style="green")
    return 1 if wrong else 0


def keep(console: Console, history: Path, *, wanted: bool) -> None:
    """Say where the history is, if there is any; one that nobody wants is deleted."""
    if not wanted:
        shutil.rmtree(history, ignore_errors=True)
    elif any(history.glob("*")):
        console.print(f"history kept in {history}", highlight=False, soft_wrap=True)
    elif history.exists():
        history.rmdir()


def interrupt(number: int, _frame: object) -> NoReturn:
    """End the demo; cleaning up is not to be interrupted once more."""
    for each in INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    """Do what the command line says; 1 if anything is off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registry", choices=("sqlite", "etcd", "kafka"), default="sqlite")
    parser.add_argument(
        "--history", type=Path, help="where to keep the history; default: nowhere, unless something is off"
    )
    parser.add_argument("--without-fence", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for number in INTERRUPTS:
        signal.signal(number, interrupt)
    console = Console()
    history = arguments.history or Path(tempfile.mkdtemp(prefix="rebalanser-history-"))
    try:
        code = play(console, arguments.registry, history, fenced=not arguments.without_fence)
    except (DemoFailed, ServerMissing, ServerFailed) as failed:
        console.print(f"FAILED: {failed}", style="red", markup=False, highlight=False, soft_wrap=True)
        code = 1
    except SystemExit:
        console.print("interrupted; all processes have ended")
        keep(console, history, wanted=arguments.history is not None)
        raise
    keep(console, history, wanted=arguments.history is not None or code != 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
