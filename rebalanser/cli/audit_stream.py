"""``rebalanser audit --stream``: findings as the history grows, until Ctrl-C; and Spark's progress."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from rebalanser.cli.output import counted, printable
from rebalanser.redaction import redact
from rebalanser.runtime.participant import run_until_stopped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

    from rebalanser.audit.streaming import Stream, Told, Totals
    from rebalanser.audit.verdict import Conclusion
    from rebalanser.cli.output import Face

LOOK_EVERY_S: Final = 0.25
"""Seconds between two looks at the progress of Spark."""
LOOK_S: Final = 0.2
"""Seconds between two looks at the stream's findings."""
PROGRESS_S: Final = 10.0
"""Seconds between two lines about the stream's progress."""
NOT_FOR_STREAMS: Final = ("since", "until", "report", "apply")
ONLY_FOR_STREAMS: Final = ("checkpoint", "delay")


class Steps:
    """Shows the current step, and how many of its tasks are done."""

    def __init__(self, bar: Progress | None, *, silent: bool) -> None:
        self._bar = bar
        self._silent = silent
        self._task: TaskID | None = None
        self._began = time.monotonic()
        self._tracker: StatusTracker | None = None

    def __call__(self, step: str) -> None:
        """Begin a step and end the previous one."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(step, total=None)
        elif not self._silent:
            typer.echo(f"{time.monotonic() - self._began:6.1f} s  {step}", err=True)

    def watch(self, spark: SparkSession) -> None:
        """Show from now on how many tasks of the step are done."""
        self._tracker = spark.sparkContext.statusTracker()

    def look(self) -> None:
        """Ask Spark once."""
        if self._bar is None or self._task is None or self._tracker is None:
            return
        stages = [self._tracker.getStageInfo(stage) for stage in self._tracker.getActiveStageIds()]
        total = sum(stage.numTasks for stage in stages if stage)
        done = sum(stage.numCompletedTasks for stage in stages if stage)
        self._bar.update(self._task, total=total or None, completed=done)


@contextmanager
def steps(*, silent: bool) -> Iterator[Steps]:
    """Return a callback for each step of a long job; ``silent`` shows nothing."""
    if silent or not sys.stderr.isatty():
        yield Steps(None, silent=silent)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console, on_terminal = Console(stderr=True), sys.stdout.isatty()
    with Progress(*columns, console=console, transient=True, redirect_stdout=on_terminal) as bar:
        shown = Steps(bar, silent=False)
        ended = threading.Event()
        looking = threading.Thread(target=_look, args=(shown, ended), name="rebalanser-steps", daemon=True)
        looking.start()
        try:
            yield shown
        finally:
            ended.set()
            looking.join()


def _look(shown: Steps, ended: threading.Event) -> None:
    while not ended.wait(LOOK_EVERY_S):
        try:
            shown.look()
        except Exception:
            return


def refuse(stream: bool, given: Mapping[str, object]) -> None:
    """Check that the options can be combined; ``given`` are those of the command by name.

    Raises:
        typer.BadParameter: they can't; the message says which.
    """
    refused = [f"--{name}" for name in (NOT_FOR_STREAMS if stream else ONLY_FOR_STREAMS) if given.get(name)]
    if refused:
        where = "can't be used with --stream, which judges all records" if stream else "need --stream"
        raise typer.BadParameter(f"{', '.join(refused)} {where}")
    missing = [f"--{name}" for name in ("checkpoint", "out") if not given.get(name)]
    if stream and missing:
        raise typer.BadParameter(f"--stream needs {' and '.join(missing)} FOLDER")


class Following:
    """Follows a history and prints findings, in the thread that waits for its end."""

    def __init__(self, face: Face, step: Steps) -> None:
        self._face = face
        self._step = step
        self._stream: Stream | None = None
        self._news: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._asked = threading.Event()
        self._told_at = 0.0

    def follow(self, stream: Stream) -> Totals:
        """Follow until SIGINT, SIGTERM or a failure, and return the total counts.

        Raises:
            pyspark.errors.PySparkException: Spark failed.
        """
        self._stream = stream
        run_until_stopped(self)
        return stream.totals()

    def on_batch(self, told: Told) -> None:
        """Callbacks for the stream."""
        self._news.put(told)

    def start(self) -> None:
        """Start the stream."""
        self._step("reading the sources")
        self._of().start()
        self._step("following; Ctrl-C stops it")

    def request_stop(self) -> None:
        """Begin to stop."""
        self._asked.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Print findings until the stream has stopped (return True) or a stop is requested (False)."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._asked.is_set() and (until is None or time.monotonic() < until):
            ended = self._of().wait(LOOK_S)
            self._tell()
            if ended:
                return True
        return self._asked.is_set()

    def stop(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 - a micro-batch takes what it takes
        """Stop after the current micro-batch."""
        self._step("finishing the current micro-batch")
        self._of().stop()
        self._tell()

    def _of(self) -> Stream:
        assert self._stream is not None
        return self._stream

    def _tell(self) -> None:
        while not self._news.empty():
            told = self._news.get()
            if told.came.findings:
                for found in self._of().findings_of(told.batch):
                    self._face.answer({"event": "finding", **found}, line(found))
                sys.stdout.flush()
            self._progress(told)

    def _progress(self, told: Told) -> None:
        now = time.monotonic()
        if now < self._told_at + PROGRESS_S:
            return
        self._told_at = now
        if self._face.json:
            document = {"event": "progress", **told.totals.model_dump(), "watermark": told.watermark}
            self._face.answer(document)
            sys.stdout.flush()
        else:
            self._step(extent(told.totals, told.watermark))


def line(found: Mapping[str, Any]) -> str:
    """Return a finding in one line, without control characters."""
    gap = f" ({found['gap']})" if found["gap"] else ""
    return f"{found['certainty']} {found['kind']} {found['id']}: {printable(str(found['sentence']))}{gap}"


def extent(totals: Totals, watermark: float | None = None) -> str:
    """Return the progress of the stream in one line."""
    from rebalanser.audit.formatting import moment  # noqa: PLC0415 - needs Spark

    parts = [counted(totals.records, "record")]
    parts += [f"up to {moment(watermark, milliseconds=False)} UTC"] if watermark is not None else []
    parts += [counted(totals.findings, "finding")]
    parts += [f"{counted(totals.missing, 'record')} missing"] if totals.missing else []
    parts += [f"{totals.late:,} too late"] if totals.late else []
    parts += [f"{totals.quarantined:,} not readable"] if totals.quarantined else []
    return ", ".join(parts)


def conclusion(totals: Totals) -> Conclusion:
    """Return the verdict so far, in the words of a batch's verdict."""
    from rebalanser.audit.verdict import Conclusion  # noqa: PLC0415 - needs Spark

    if totals.certain:
        return Conclusion.REFUTED
    if totals.possible or totals.missing or totals.late or totals.quarantined:
        return Conclusion.UNSURE
    return Conclusion.FENCED if totals.fenced else Conclusion.SOUND


def summary(totals: Totals, out: str, checkpoint: str) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the final result as a document and as lines."""
    word = conclusion(totals)
    document = {
        "event": "stopped",
        "conclusion": str(word),
        **totals.model_dump(),
        "out": redact(out),
        "checkpoint": redact(checkpoint),
    }
    certain = f" ({totals.certain:,} certain)" if totals.certain else ""
    fenced = f" ({totals.fenced:,} certain but fenced)" if totals.fenced else ""
    return document, (
        f"{word.capitalize()} so far: {extent(totals)}{certain}{fenced}.",
        f"tables: {redact(out)}",
    )
