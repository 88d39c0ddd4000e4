"""Progress of Spark on standard error: a bar on a terminal, else a line for each step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

LOOK_EVERY_S: Final = 0.25


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
