"""``rebalanser shiva leader``, ``worker`` and ``daemon``, which run until a signal."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.cli.options import ParticipantOptions
from rebalanser.cli.output import Face
from rebalanser.cli.shiva_options import ClusterOptions, TagOption, cluster_name
from rebalanser.core.allocation import MAX_AMOUNT, Capacity, thousandths
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.records import CHANGE_KEYS
from rebalanser.core.shiva.types import RestartPolicy, check_part
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.errors import InvalidSettings
from rebalanser.history import HistorySink, open_sinks
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.participant import stopping_on_signals
from rebalanser.settings import Settings
from rebalanser.shiva.cluster import Running

LOOK_S: Final = 0.2
"""Seconds between looks for a leader or worker that has ended."""
HISTORY_CLOSE_S: Final = 2.0
"""Maximum seconds for the last records of a history."""

IdOption = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="ID",
        show_default="the host's name",
        help="The id of this process within the cluster.",
    ),
]
DataOption = Annotated[
    Path,
    typer.Option("--data", metavar="FOLDER", show_default=False, help="The folder for the worker's files."),
]
RoundOption = Annotated[
    float,
    typer.Option("--round", min=0.1, metavar="SECONDS", help="Seconds between two pings of the leader."),
]
MissedOption = Annotated[
    int,
    typer.Option(
        "--missed-rounds", min=1, metavar="N", help="Number of missed rounds after which a worker is removed."
    ),
]
GraceOption = Annotated[
    float,
    typer.Option(
        "--away-grace",
        min=0.0,
        metavar="SECONDS",
        help="How long the applications of a missing worker wait for it before they move.",
    ),
]
CpuOption = Annotated[
    float | None,
    typer.Option(
        "--cpu",
        min=0.0,
        max=MAX_AMOUNT / 1000,
        metavar="N",
        show_default="no limit",
        help="Processors that the applications of this worker may request together.",
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory-mb",
        min=0,
        max=MAX_AMOUNT,
        metavar="MB",
        show_default="no limit",
        help="Megabytes of memory that the applications of this worker may request together.",
    ),
]
KeepFilesOption = Annotated[
    float,
    typer.Option(
        "--keep-files",
        min=0.0,
        metavar="SECONDS",
        help="How long the unpacked files of an application stay after it has moved to another worker.",
    ),
]
SessionOption = Annotated[
    float,
    typer.Option(
        "--session-timeout",
        min=0.1,
        metavar="SECONDS",
        help="Time of silence after which Kafka lets another leader take over.",
    ),
]
StalledOption = Annotated[
    float,
    typer.Option(
        "--stalled",
        min=0.1,
        metavar="SECONDS",
        help="Time after which a worker that answers pings but adopts no assignment is removed.",
    ),
]
SnapshotOption = Annotated[
    int,
    typer.Option(
        "--snapshot-changes",
        min=0,
        max=CHANGE_KEYS - 1,
        metavar="N",
        help="Maximum number of changes published between whole assignments; 0 for whole ones only.",
    ),
]
RetryInitialOption = Annotated[
    float,
    typer.Option(
        "--retry-initial",
        min=0.1,
        metavar="SECONDS",
        help="Time after which an application that has failed is tried again; it doubles each time.",
    ),
]
RetryMaxOption = Annotated[
    float, typer.Option("--retry-max", min=0.1, metavar="SECONDS", help="Maximum time between two tries.")
]


@dataclass(frozen=True, slots=True)
class LeadOptions:
    """The options of a process with a leader."""

    round: RoundOption = 30.0
    missed_rounds: MissedOption = 1
    session_timeout: SessionOption = 10.0
    stalled: StalledOption = 120.0
    retry_initial: RetryInitialOption = 30.0
    retry_max: RetryMaxOption = 300.0
    away_grace: GraceOption = 0.0
    snapshot_changes: SnapshotOption = CHANGE_KEYS - 1

    def checked(self) -> LeaderOptions:
        """Return the leader's options.

        Raises:
            InvalidSettings: two of them contradict each other.
        """
        options = LeaderOptions(
            round_s=self.round,
            missed_rounds=self.missed_rounds,
            session_timeout_s=self.session_timeout,
            stalled_s=self.stalled,
            retry_initial_s=self.retry_initial,
            retry_max_s=self.retry_max,
            away_grace_s=self.away_grace,
            snapshot_changes=self.snapshot_changes,
        )
        options.check()
        return options


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """The options of a process with a worker."""

    tag: TagOption = None
    cpu: CpuOption = None
    memory_mb: MemoryOption = None
    keep_files: KeepFilesOption = 3600.0

    def checked(self) -> WorkerOptions:
        """Return the worker's options.

        Raises:
            InvalidName: a tag is invalid.
            InvalidSettings: the number of processors is invalid.
        """
        wanted = frozenset(check_part(tag, "tag") for tag in self.tag or ())
        limited = self.cpu is not None or self.memory_mb is not None
        try:
            cpu_milli = None if self.cpu is None else thousandths(self.cpu)
        except ValueError as error:
            raise InvalidSettings(f"--{error}") from None
        capacity = Capacity(cpu_milli, self.memory_mb) if limited else None
        return WorkerOptions(tags=wanted, capacity=capacity, keep_files_s=self.keep_files)


def _default_id(given: str | None) -> str:
    return check_part(socket.gethostname() if given is None else given, "id")


@contextlib.contextmanager
def _recorded(folder: Path | None, topic: str | None, group: str, label: str) -> Iterator[HistorySink | None]:
    """Open the history sink for ``label`` of ``group``, and close it at the end; None without a target.

    Raises:
        InvalidUrl: ``topic`` is not a URL.
        UnknownScheme: no installed package has topics of that scheme.
    """
    if folder is None and topic is None:
        yield None
        return
    settings = Settings()
    sink = open_sinks(folder, topic, group, label, settings.history_max_bytes, settings.history_file_mode)
    try:
        yield sink
    finally:
        sink.close(HISTORY_CLOSE_S)


def _recorder(
    process: ParticipantOptions, face: Face, name: str
) -> Callable[[str], contextlib.AbstractContextManager[HistorySink | None]]:
    """Return a function that opens the history of a role: leader and worker each have their own."""
    folder, topic, cluster = process.history, process.history_topic, cluster_name(face.url)
    return lambda role: _recorded(folder, topic, cluster, f"{role}-{name}")


def _run_until_signal(face: Face, running: Sequence[Running], what: str) -> None:
    """Wait for SIGINT, SIGTERM or SIGHUP, or until a participant ends by itself; then stop one after another.

    Raises:
        RebalanserError: the error of the participant that ended; the others were stopped first.
    """
    asked = threading.Event()
    with stopping_on_signals(asked.set), contextlib.ExitStack() as ending:
        for each in reversed(running):
            ending.callback(each.wait)
            ending.callback(each.stop)
        face.answer({"running": what}, f"{what} runs; Ctrl-C stops it")
        sys.stdout.flush()
        while not asked.wait(LOOK_S) and not any(each.wait(0) for each in running):
            continue


def leader(
    lead: LeadOptions,
    process: ParticipantOptions,
    on: ClusterOptions,
    id: IdOption = None,  # noqa: A002 - the option's name
) -> None:
    """Run a leader of a cluster until Ctrl-C or SIGTERM; one of its leaders is active at a time."""
    face = on.face(1 + process.verbose)
    name = _default_id(id)
    options = lead.checked()
    _warn_of_short_deadline(options, WorkerOptions())
    record = _recorder(process, face, name)
    with on.opened(face) as opened, record("leader") as leading:
        running = [opened.run_leader(name, options, leading)]
        _run_until_signal(face, running, f"leader {name}")


def worker(
    work: WorkOptions,
    process: ParticipantOptions,
    on: ClusterOptions,
    data: DataOption,
    id: IdOption = None,  # noqa: A002 - the option's name
) -> None:
    """Run the applications that a cluster's leader assigns to this worker, until Ctrl-C or SIGTERM."""
    face = on.face(1 + process.verbose)
    name = _default_id(id)
    record = _recorder(process, face, name)
    with on.opened(face) as opened, record("worker") as working:
        running = [opened.run_worker(name, data, work.checked(), working)]
        _run_until_signal(face, running, f"worker {name}")


def daemon(
    work: WorkOptions,
    lead: LeadOptions,
    process: ParticipantOptions,
    on: ClusterOptions,
    data: DataOption,
    id: IdOption = None,  # noqa: A002 - the option's name
) -> None:
    """Run a leader and a worker in one process, with the same id, until Ctrl-C or SIGTERM."""
    face = on.face(1 + process.verbose)
    name = _default_id(id)
    options = lead.checked()
    offered = work.checked()
    _warn_of_short_deadline(options, offered)
    record = _recorder(process, face, name)
    with on.opened(face) as opened, record("leader") as leading, record("worker") as working:
        ran = opened.run_worker(name, data, offered, working)
        try:
            # The worker stops first: its leader publishes at once that it has left (SH-22).
            running = [ran, opened.run_leader(name, options, leading)]
        except BaseException:
            ran.stop()
            ran.wait()
            raise
        _run_until_signal(face, running, f"daemon {name}")


def _warn_of_short_deadline(options: LeaderOptions, offered: WorkerOptions) -> None:
    """Warn if the rounds are too short for exclusive applications (SH-14)."""
    try:
        offered.check_deadline(options.permission_s, options.round_s, RestartPolicy().stop_timeout_s)
    except InvalidSettings as warning:
        get_logger("rebalanser.shiva").warning(str(warning), action="short_deadline")
