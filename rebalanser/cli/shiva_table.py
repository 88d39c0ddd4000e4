"""A Shiva cluster as a table for a terminal, or as plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rebalanser.applications.status import ApplicationStatus, ClusterStatus, WorkerStatus
from rebalanser.cli.lines import counted
from rebalanser.shiva.types import ApplicationState, Mode

COLOURS: Final = {
    ApplicationState.RUNNING: "green",
    ApplicationState.FINISHED: "green",
    ApplicationState.FAILED: "red",
    ApplicationState.REFUSED: "red",
}
MOST_SET_ASIDE: Final = 5
MOST_FAILURES: Final = 3
"""Maximum number of workers named with the error of an application."""


def headline(status: ClusterStatus) -> str:
    """Return the cluster in one line."""
    if status.epoch is None:
        return f"{status.cluster}: no leader has published anything yet"
    running = sum(each.state is ApplicationState.RUNNING for each in status.applications)
    return (
        f"{status.cluster}: epoch {status.epoch} by {status.leader}, "
        f"{counted(len(status.workers), 'worker')}, "
        f"{running:,} of {counted(len(status.applications), 'application')} running"
    )


def worker_line(worker: WorkerStatus) -> str:
    """Return a worker in one line."""
    tags = f", tags {' '.join(worker.tags)}" if worker.tags else ""
    return f"{worker.worker}: {counted(worker.applications, 'application')}{tags}, on {worker.host}"


def application_line(application: ApplicationStatus) -> str:
    """Return an application in one line."""
    parts = [application.state.value]
    if application.worker is not None:
        parts[0] += f" on {application.worker}"
    if application.leaving is not None:
        parts.append(f"{application.leaving} has to stop it first")
    if application.mode is Mode.EXCLUSIVE:
        parts.append(application.mode.value)
    if application.tags:
        parts.append(f"tags {' '.join(application.tags)}")
    if application.restarts:
        parts.append(counted(application.restarts, "restart"))
    if application.reason:
        parts.append(application.reason)
    parts.extend(_failures(application))
    return f"{application.application}: {', '.join(parts)}"


def _failures(application: ApplicationStatus) -> list[str]:
    """Return the errors on the first few workers."""
    failed = list(application.failed_on.items())
    shown = [f"failed on {worker}: {why}" for worker, why in failed[:MOST_FAILURES]]
    more = len(failed) - len(shown)
    return [*shown, f"and on {counted(more, 'worker')} more"] if more else shown


def _set_aside(status: ClusterStatus) -> Iterator[str]:
    for each in status.set_aside[-MOST_SET_ASIDE:]:
        yield f"set aside: record {each.offset} of {each.key!r}: {each.reason}"


def plain(status: ClusterStatus) -> list[str]:
    """Return the cluster as lines of text."""
    return [
        headline(status),
        *map(worker_line, status.workers),
        *map(application_line, status.applications),
        *_set_aside(status),
    ]


def render(status: ClusterStatus) -> RenderableType:
    """Return the cluster as tables."""
    workers = Table("worker", "host", "tags", "applications", box=ROUNDED)
    for worker in status.workers:
        workers.add_row(worker.worker, worker.host, " ".join(worker.tags), f"{worker.applications:,}")
    applications = Table("application", "state", "worker", "mode", "tags", "reason", box=ROUNDED)
    for each in status.applications:
        leaving = f"{each.leaving} (leaving)" if each.leaving else ""
        applications.add_row(
            each.application,
            Text(each.state.value, COLOURS.get(each.state, "yellow")),
            each.worker or leaving,
            each.mode.value,
            " ".join(each.tags),
            Text("\n".join(filter(None, (each.reason, *_failures(each))))),
        )
    return Group(headline(status), workers, applications, *_set_aside(status))
