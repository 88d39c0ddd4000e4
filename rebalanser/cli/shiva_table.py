"""A Shiva cluster as a table for a terminal, or as plain lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rebalanser.cli.output import counted
from rebalanser.core.shiva.types import ApplicationState, Mode
from rebalanser.shiva.status import UNKNOWN, ApplicationStatus, ClusterStatus, WorkerStatus

COLOURS: Final[dict[str, str]] = {
    ApplicationState.RUNNING: "green",
    ApplicationState.FINISHED: "green",
    ApplicationState.FAILED: "red",
    ApplicationState.REFUSED: "red",
    UNKNOWN: "red",
}
MOST_SET_ASIDE: Final = 5
MOST_FAILURES: Final = 3
"""Maximum number of workers named with the error of an application."""


def headline(status: ClusterStatus) -> str:
    """Return the cluster in one line."""
    leads = _leads(status)
    if status.epoch is None:
        return f"{status.cluster}: no leader has published anything yet{f', {leads}' if status.stale else ''}"
    states: dict[str, set[str]] = defaultdict(set)
    for each in status.applications:
        states[each.application.partition("#")[0]].add(each.state)
    running = sum(of_replicas == {ApplicationState.RUNNING} for of_replicas in states.values())
    return (
        f"{status.cluster}: {f'{leads}, ' if leads else ''}epoch {status.epoch} by {status.leader}, "
        f"{counted(len(status.workers), 'worker')}, "
        f"{running:,} of {counted(len(states), 'application')} running"
    )


def _leads(status: ClusterStatus) -> str:
    """Return who leads now, and since when nobody was heard; nothing if that was not looked for."""
    if status.stale and status.ping_age_s is None:
        return "STALE: no ping from a leader"
    if status.ping_age_s is None:
        return ""
    ago = _ago(status.ping_age_s)
    if status.stale:
        return f"STALE: no ping from a leader for {ago} ({status.active_leader} was the last one)"
    return f"{status.active_leader} leads (last ping {ago} ago)"


def _ago(age_s: float) -> str:
    return f"{age_s:,.0f} s"


def worker_line(worker: WorkerStatus, status: ClusterStatus) -> str:
    """Return a worker in one line."""
    tags = f", tags {' '.join(worker.tags)}" if worker.tags else ""
    cordon = f", {worker.cordon}" if worker.cordon else ""
    text = _last_pong(worker, status)
    return (
        f"{worker.worker}: {counted(worker.applications, 'application')}{_requested_of(worker)}{tags}"
        f", on {worker.host}{cordon}{f', {text}' if text else ''}"
    )


def _requested_of(worker: WorkerStatus) -> str:
    """Return what is requested of a worker's capacity, such as ``(1.5 of 4 cpu)``; empty for nothing."""
    parts = []
    if worker.requested_cpu or worker.cpu is not None:
        parts.append(f"{worker.requested_cpu:g}{'' if worker.cpu is None else f' of {worker.cpu:g}'} cpu")
    if worker.requested_memory_mb or worker.memory_mb is not None:
        of = "" if worker.memory_mb is None else f" of {worker.memory_mb:,}"
        parts.append(f"{worker.requested_memory_mb:,}{of} MB")
    return f" ({', '.join(parts)})" if parts else ""


def _requests(application: ApplicationStatus) -> list[str]:
    """Return what an application requests of its worker, such as ``0.5 cpu``."""
    cpu = [f"{application.cpu:g} cpu"] if application.cpu else []
    return [*cpu, f"{application.memory_mb:,} MB"] if application.memory_mb else cpu


def _last_pong(worker: WorkerStatus, status: ClusterStatus) -> str:
    """Return the age of a worker's last pong, and whether it lags behind; nothing if none was looked for."""
    if worker.pong_age_s is None:
        return "STALE: no pong" if worker.stale else ""
    text = f"{'STALE: ' if worker.stale else ''}last pong {_ago(worker.pong_age_s)} ago"
    if worker.follows == status.epoch:
        return text
    return f"{text}, behind: follows {worker.follows or 'no document'}"


def _absent_and_cordoned(status: ClusterStatus) -> list[str]:
    """Return a line for each cordoned worker that is not there."""
    there = {worker.worker for worker in status.workers}
    return [f"{name}: {cordon}, not running" for name, cordon in status.cordons.items() if name not in there]


def _replicas(application: ApplicationStatus) -> list[str]:
    """Return how many of its replicas run, at the first of several: ``2 of 3 replicas running`` (SH-28)."""
    if application.replicas == 1 or "#" in application.application:
        return []
    return [f"{application.running_replicas} of {application.replicas} replicas running"]


def application_line(application: ApplicationStatus) -> str:
    """Return an application in one line."""
    parts = [str(application.state)]
    if application.worker is not None:
        parts[0] += f" on {application.worker}"
    parts += _replicas(application)
    if application.leaving is not None:
        parts.append(f"{application.leaving} has to stop it first")
    if application.mode is Mode.EXCLUSIVE:
        parts.append(application.mode.value)
    if application.tags:
        parts.append(f"tags {' '.join(application.tags)}")
    parts += _requests(application)
    if application.restarts:
        parts.append(counted(application.restarts, "restart"))
    parts.extend(_reasons(application))
    return f"{application.application}: {', '.join(parts)}"


def _reasons(application: ApplicationStatus) -> list[str]:
    """Return why an application does not run, and the errors on the first few workers; nothing twice."""
    failures = _failures(application)
    return failures if application.reason in {"", *failures} else [application.reason, *failures]


def _failures(application: ApplicationStatus) -> list[str]:
    failed = list(application.failed_on.items())
    shown = [f"failed on {worker}: {why}" for worker, why in failed[:MOST_FAILURES]]
    more = len(failed) - len(shown)
    return [*shown, f"and on {counted(more, 'worker')} more"] if more else shown


def _set_aside(status: ClusterStatus) -> Iterator[str]:
    told = {(f"cmd:{each.application}", each.reason) for each in status.applications}
    others = [each for each in status.set_aside if (each.key, each.reason) not in told]
    for each in others[-MOST_SET_ASIDE:]:
        place = f"record {each.offset} of " if each.offset >= 0 else ""
        yield f"set aside: {place}{each.key!r}: {each.reason}"


def plain(status: ClusterStatus) -> list[str]:
    """Return the cluster as lines of text."""
    return [
        headline(status),
        *(worker_line(worker, status) for worker in status.workers),
        *_absent_and_cordoned(status),
        *map(application_line, status.applications),
        *_set_aside(status),
    ]


def render(status: ClusterStatus) -> RenderableType:
    """Return the cluster as tables."""
    workers = Table("worker", "host", "tags", "applications", "last heard", box=ROUNDED)
    for worker in status.workers:
        name = f"{worker.worker} ({worker.cordon})" if worker.cordon else worker.worker
        row = (name, worker.host, " ".join(worker.tags), f"{worker.applications:,}{_requested_of(worker)}")
        workers.add_row(*row, Text(_last_pong(worker, status), "red" if worker.stale else ""))
    applications = Table("application", "state", "worker", "mode", "tags", "reason", box=ROUNDED)
    for each in status.applications:
        leaving = f"{each.leaving} (leaving)" if each.leaving else ""
        applications.add_row(
            each.application,
            Text(each.state, COLOURS.get(each.state, "yellow")),
            each.worker or leaving,
            each.mode.value,
            " ".join(each.tags),
            Text("\n".join((*_replicas(each), *_reasons(each)))),
        )
    return Group(headline(status), workers, *_absent_and_cordoned(status), applications, *_set_aside(status))
