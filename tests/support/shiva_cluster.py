"""A Shiva cluster of real processes on a real Kafka, for tests: the command line, run and killed.

Every leader, worker and daemon is one ``rebalanser shiva`` process of its own, quick in its rounds. Nothing
sleeps: what is waited for is something that happens, with a generous limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from rebalanser.core.shiva.types import ApplicationEntry, ApplicationId, ApplicationState, CommandId, Mode
from rebalanser.shiva import open_cluster
from rebalanser.testing.pausing import pause
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from rebalanser.core.shiva.records import AssignmentDocument
    from rebalanser.shiva import Cluster

ROUND_S: Final = 0.5
SESSION_TIMEOUT_S: Final = 1.5

RUNS: Final = 'echo "start $SHIVA_WORKER $SHIVA_TOKEN" >> "$JOURNAL"; exec sleep 1000'
"""A shell command that notes its start in the journal, and runs on."""
BEATS: Final = 'while :; do echo "beat $SHIVA_WORKER $(date +%s.%N)" >> "$JOURNAL"; sleep 0.05; done'
"""A shell command that notes all the time that it runs, and when."""
CRASHES: Final = 'echo "start $SHIVA_WORKER $SHIVA_TOKEN" >> "$JOURNAL"; exit 7'


class Process:
    """One process of the command line, whose output goes to a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def said(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")

    def says(self, words: str) -> None:
        """Wait until it has printed these words.

        Raises:
            AssertionError: it has not in time, or has ended without; with the end of its output.
        """

        def is_over() -> bool:
            ended = self.ended  # asked first: all that it printed can be read by then
            return words in self.said or ended

        wait_until(is_over, lambda: f"{words!r} in {self.log.name}: {self.said[-3000:]}")
        if words not in self.said:
            raise AssertionError(f"it ended without {words!r} in {self.log.name}: {self.said[-3000:]}")

    def kill(self) -> None:
        """End it with SIGKILL, stopped or not, and wait until it has gone."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def terminate(self) -> int:
        """Ask it to stop with SIGTERM, and wait; its exit code."""
        self._process.terminate()
        return self.wait()

    def interrupt(self) -> None:
        """Ask it to stop as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until it has ended by itself; its exit code."""
        return self._process.wait(timeout_s)

    def pause(self) -> None:
        """Stop its clock and its threads (SIGSTOP)."""
        pause(self._process)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command that ran to its end has said."""

    code: int
    out: str
    err: str


class ShivaCluster:
    """A cluster of a name of its own. When the context ends all of its processes are killed."""

    def __init__(self, kafka: str, folder: Path, *, name: str = "", round_s: float = ROUND_S) -> None:
        self.name = name or f"shiva-{uuid.uuid4().hex[:12]}"
        self.kafka = kafka
        self.folder = folder
        self.round_s = round_s
        self.journal = folder / "journal"
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "COLUMNS"},
            "REBALANSER_KAFKA": kafka,
            "REBALANSER_CLUSTER": self.name,
        }
        self._processes: list[Process] = []
        self._open = ExitStack()
        self._cluster: Cluster | None = None

    @property
    def url(self) -> str:
        """The cluster's URL."""
        return f"kafka://{self.kafka}/{self.name}"

    @property
    def cluster(self) -> Cluster:
        """A connection of this process."""
        if self._cluster is None:
            self._cluster = open_cluster(self.url, PATIENCE_S)
            self._open.callback(self._cluster.close)
        return self._cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        self._open.close()

    def launch(self, log: str, *arguments: str, program: Sequence[str] = ("-m", "rebalanser")) -> Process:
        """Run ``rebalanser ARGUMENTS`` in the background, or another Python program with them."""
        command = [sys.executable, *program, *arguments]
        process = Process(command, self.environment, self.folder / f"{log}.log")
        self._processes.append(process)
        return process

    def leader(self, name: str = "leader-1", *options: str, program: Sequence[str] = ()) -> Process:
        """Run a leader."""
        arguments = ("shiva", "leader", "--id", name, *self._timings, *options)
        return self.launch(name, *arguments, program=program or ("-m", "rebalanser"))

    def worker(self, name: str = "worker-1", *options: str, program: Sequence[str] = ()) -> Process:
        """Run a worker on the folder of its name."""
        arguments = ("shiva", "worker", "--id", name, "--data", str(self.data(name)), *options)
        return self.launch(name, *arguments, program=program or ("-m", "rebalanser"))

    def workers(self, *names: str, options: Sequence[str] = ()) -> dict[str, Process]:
        """Run several workers, and wait until the leader knows them all.

        One that becomes known only after the first start has applications moved to it.
        """
        workers = {name: self.worker(name, *options) for name in names}
        for name, worker in workers.items():
            worker.says(f"worker {name} runs")
        self.until(lambda document: document.workers.keys() >= workers.keys(), "all workers are known")
        return workers

    def daemon(self, name: str = "daemon-1", *options: str) -> Process:
        """Run a leader and a worker in one process."""
        return self.launch(
            name,
            *("shiva", "daemon", "--id", name, "--data", str(self.data(name)), *self._timings, *options),
        )

    @property
    def _timings(self) -> tuple[str, ...]:
        return ("--round", str(self.round_s), "--session-timeout", str(SESSION_TIMEOUT_S))

    def data(self, worker: str) -> Path:
        """A worker's folder."""
        return self.folder / "data" / worker

    def run(self, *arguments: str, timeout_s: float = PATIENCE_S, **environment: str) -> Ran:
        """Run ``rebalanser ARGUMENTS`` to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "rebalanser", *arguments],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def application(self, name: str = "web", script: str = RUNS, **manifest: object) -> Path:
        """A folder with an application that is this shell command."""
        folder = self.folder / f"application-{name}"
        folder.mkdir(exist_ok=True)
        content = {
            "command": ["sh", "-c", script],
            "environment": {"JOURNAL": str(self.journal)},
            "stop_timeout_s": 2.0,
            **manifest,
        }
        (folder / "shiva.json").write_text(json.dumps(content))
        return folder

    def start(
        self,
        application: str = "t/c/web",
        source: Path | None = None,
        *,
        tags: Sequence[str] = (),
        mode: Mode = Mode.AVAILABLE,
    ) -> CommandId:
        """Command a start; the command's id."""
        name = ApplicationId.parse(application)
        folder = source or self.application(name.application)
        return self.cluster.start(name, folder, tags=tags, mode=mode)

    def starts(self, worker: str = "") -> int:
        """How many starts the applications have noted, of this worker's or of all."""
        return sum(count for name, count in self.started.items() if not worker or name == worker)

    @property
    def started(self) -> Counter[str]:
        """By worker, how many starts applications have noted."""
        return Counter(line.split()[1] for line in self._journal if line.startswith("start "))

    @property
    def beats(self) -> list[tuple[str, float]]:
        """Worker and time of each beat that was noted completely."""
        lines = (line.split() for line in self._journal if line.startswith("beat "))
        return [(worker, float(at)) for _, worker, at in (line for line in lines if len(line) == 3)]

    @property
    def _journal(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    @property
    def known(self) -> AssignmentDocument:
        """The last document.

        Raises:
            AssertionError: there is none yet.
        """
        document = self.cluster.read(PATIENCE_S)
        if document is None:
            raise AssertionError("no leader has published anything yet")
        return document

    def until(
        self, true: Callable[[AssignmentDocument], object], what: str, timeout_s: float = PATIENCE_S
    ) -> AssignmentDocument:
        """Wait for a document of which something is true.

        Raises:
            AssertionError: none came within the time; with the last one.
        """
        document: AssignmentDocument | None = None
        for document in self.cluster.documents(timeout_s):
            if true(document):
                return document
        raise AssertionError(f"not within {timeout_s:g} s: {what}; the last document: {document}")

    def entry_when(
        self, true: Callable[[ApplicationEntry], object], what: str, application: str = "t/c/web"
    ) -> ApplicationEntry:
        """Wait for a document whose entry of an application is so; the entry."""
        name = ApplicationId.parse(application)

        def so(document: AssignmentDocument) -> bool:
            entry = document.applications.get(name)
            return entry is not None and bool(true(entry))

        return self.until(so, f"{application} {what}").applications[name]

    def running(self, application: str = "t/c/web", worker: str = "") -> ApplicationEntry:
        """Wait until an application runs, on this worker or anywhere; its entry."""
        return self.entry_when(
            lambda entry: entry.state is ApplicationState.RUNNING and (not worker or entry.worker == worker),
            f"runs on {worker or 'a worker'}",
            application,
        )

    def gone(self, application: str = "t/c/web") -> None:
        """Wait until a document does not have an application any more."""
        name = ApplicationId.parse(application)
        self.until(lambda document: name not in document.applications, f"{application} is gone")

    def processes_of(self, worker: str) -> list[int]:
        """The processes of applications of a worker, whoever their parent is by now."""
        mark = f"SHIVA_DATA={self.data(worker)}/".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if any(value.startswith(mark) for value in (process / "environ").read_bytes().split(b"\0")):
                    found.append(int(process.name))
            except OSError:
                continue
        return found
