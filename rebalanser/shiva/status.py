"""State of a cluster, for people and programs.

It says where applications run by the last document alone (SH-11), and which leader and workers are alive by
the last ping and the last pongs. An application is never called running if that is too old (SH-20).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pydantic import BaseModel

from rebalanser.core.allocation import Capacity
from rebalanser.core.shiva.records import AssignmentDocument, Ping, Pong, RunReport
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationPattern,
    ApplicationState,
    Cordon,
    Mode,
    RunState,
    WorkerEntry,
    WorkerId,
)

UNKNOWN: Final = "unknown"
"""State of an application whose worker was last heard too long ago."""
STALE_ROUNDS: Final = 2
STALE_EXTRA_S: Final = 10.0
"""Seconds beyond ``STALE_ROUNDS`` rounds after which a ping or pong is stale: a change of the leader takes
about as long by default."""
DEFAULT_ROUND_S: Final = 30.0
"""Seconds taken for a round where no document says how long it is."""


@dataclass(frozen=True, slots=True)
class LastHeard:
    """The last ping and the last pong of each worker, with their ages in seconds.

    Ages compare this host's time of day with the broker's, by which records are dated.
    """

    ping: tuple[Ping, float] | None = None
    pongs: Mapping[WorkerId, tuple[Pong, float]] = field(default_factory=lambda: MappingProxyType({}))


class WorkerStatus(BaseModel):
    """A worker that the leader knows."""

    worker: str
    host: str
    tags: list[str]
    incarnation: int
    """Number of times that its data folder was opened."""
    applications: int
    """Number of applications assigned to it."""
    pong_age_s: float | None = None
    """Seconds since its last pong; None if none of this incarnation was found, or none was looked for."""
    follows: str | None = None
    """The epoch of the document that it follows, as its last pong says."""
    stale: bool = False
    """True if its last pong is too old, or it has left: what it runs is not known."""
    cordon: Cordon | None = None
    """Cordoned or drained by an operator (SH-26)."""
    requested_cpu: float = 0.0
    """Processors that these applications request together (SH-27)."""
    requested_memory_mb: int = 0
    cpu: float | None = None
    """Processors that they may request together; None for no limit."""
    memory_mb: int | None = None


class ApplicationStatus(BaseModel):
    """An application that the leader knows."""

    application: str
    state: str
    """A value of ``ApplicationState``, or ``unknown`` (SH-20).

    What its worker is starting again is ``assigned``, by the last pong.
    """
    worker: str | None
    """The worker that is to run it."""
    leaving: str | None
    """The worker that may still run it and is to stop it first."""
    reason: str
    """Reason why it is not running; empty if no reason is known."""
    mode: Mode
    tags: list[str]
    command: str
    """The id of the start command that it runs by."""
    size_bytes: int
    restarts: int
    """Restarts of its process, from its worker's last pong."""
    failed_on: dict[str, str]
    """The workers where it failed, with the reasons."""
    cpu: float = 0.0
    """Processors that it requests of its worker (SH-27)."""
    memory_mb: int = 0
    replicas: int = 1
    """Number of replicas of its application, each with a status of its own (SH-28)."""
    running_replicas: int = 0
    """Number of those that run."""


class SetAsideStatus(BaseModel):
    """A record that was not carried out."""

    offset: int
    key: str
    reason: str


class ClusterStatus(BaseModel):
    """All of a cluster."""

    cluster: str
    leader: str | None
    """Leader that wrote the last document; None before the first."""
    active_leader: str | None = None
    """Leader that sent the last ping; None if no ping was found, or none was read."""
    ping_age_s: float | None = None
    """Seconds since the last ping."""
    stale: bool = False
    """True if no leader was heard lately: what the last document says may have changed since."""
    epoch: str | None
    workers: list[WorkerStatus]
    applications: list[ApplicationStatus]
    set_aside: list[SetAsideStatus]
    cordons: dict[str, Cordon] = {}
    """The workers that are cordoned or drained, also those that are not there."""

    @property
    def settled(self) -> bool:
        """True if all that was started runs, or has finished, and all that was stopped is gone."""
        done = {ApplicationState.RUNNING, ApplicationState.FINISHED}
        return not self.stale and all(each.state in done for each in self.applications)

    def only(self, pattern: ApplicationPattern) -> ClusterStatus:
        """Return the status with the applications of a tenant or a channel alone (SH-25)."""
        chosen = [
            each for each in self.applications if pattern.matches(ApplicationId.parse(each.application))
        ]
        return self.model_copy(update={"applications": chosen})


def status_of(
    cluster: str, document: AssignmentDocument | None, heard: LastHeard | None = None
) -> ClusterStatus:
    """Return what the document says, as far as it is not too old by what was ``heard`` last.

    Without ``heard`` no age is known, and nothing counts as stale.
    """
    limit_s = _stale_after_s(document)
    ping, ping_age_s = heard.ping if heard is not None and heard.ping is not None else (None, None)
    status = ClusterStatus(
        cluster=cluster,
        leader=None,
        active_leader=ping.leader if ping is not None else None,
        ping_age_s=ping_age_s,
        stale=heard is not None and (ping_age_s is None or ping_age_s > limit_s),
        epoch=None,
        workers=[],
        applications=[],
        set_aside=[],
    )
    if document is None:
        return status
    named: dict[WorkerId | None, list[ApplicationEntry]] = defaultdict(list)
    for entry in document.applications.values():
        named[entry.worker].append(entry)
    workers = {
        worker: _worker(worker, known, named[worker], document.cordons.get(worker), heard, limit_s)
        for worker, known in sorted(document.workers.items())
    }
    applications = {
        application: _application(
            application,
            entry,
            workers.get(entry.worker or ""),
            _report_of(application, entry, document, heard),
            unled=status.stale,
        )
        for application, entry in sorted(document.applications.items())
    }
    running = Counter(
        application.whole
        for application, each in applications.items()
        if each.state == ApplicationState.RUNNING
    )
    return status.model_copy(
        update={
            "leader": document.leader,
            "epoch": str(document.epoch),
            "workers": list(workers.values()),
            "applications": [
                each.model_copy(update={"running_replicas": running[application.whole]})
                for application, each in applications.items()
            ],
            "set_aside": [
                SetAsideStatus(offset=each.offset, key=each.key, reason=each.reason)
                for each in document.set_aside
            ],
            "cordons": dict(sorted(document.cordons.items())),
        }
    )


def _stale_after_s(document: AssignmentDocument | None) -> float:
    round_s = document.round_s if document is not None and document.round_s > 0 else DEFAULT_ROUND_S
    return STALE_ROUNDS * round_s + STALE_EXTRA_S


def _worker(
    worker: WorkerId,
    entry: WorkerEntry,
    applications: Sequence[ApplicationEntry],
    cordon: Cordon | None,
    heard: LastHeard | None,
    limit_s: float,
) -> WorkerStatus:
    pong, age_s = heard.pongs.get(worker, (None, None)) if heard is not None else (None, None)
    if pong is not None and pong.incarnation != entry.incarnation:
        pong = age_s = None
    left = pong is not None and pong.leaving
    requested = [each.requests for each in applications if each.requests is not None]
    capacity = entry.capacity or Capacity()
    return WorkerStatus(
        worker=worker,
        host=entry.host,
        tags=sorted(entry.tags),
        incarnation=entry.incarnation.number,
        applications=len(applications),
        pong_age_s=age_s,
        follows=str(pong.seen) if pong is not None and pong.seen is not None else None,
        stale=heard is not None and (age_s is None or age_s > limit_s or left),
        cordon=cordon,
        requested_cpu=sum(each.cpu_milli for each in requested) / 1000,
        requested_memory_mb=sum(each.memory_mb for each in requested),
        cpu=None if capacity.cpu_milli is None else capacity.cpu_milli / 1000,
        memory_mb=capacity.memory_mb,
    )


def _report_of(
    application: ApplicationId,
    entry: ApplicationEntry,
    document: AssignmentDocument,
    heard: LastHeard | None,
) -> RunReport | None:
    """Find what the last pong of its worker says of the command that the document names it for."""
    known = document.workers.get(entry.worker or "")
    pong, _ = heard.pongs.get(entry.worker or "", (None, None)) if heard is not None else (None, None)
    if known is None or pong is None or pong.incarnation != known.incarnation:
        return None
    report = pong.applications.get(application)
    return report if report is not None and report.command == entry.command else None


def _application(
    application: ApplicationId,
    entry: ApplicationEntry,
    worker: WorkerStatus | None,
    report: RunReport | None,
    *,
    unled: bool,
) -> ApplicationStatus:
    """Return what is known of an application; of its restarts only its worker's pongs tell (SH-24).

    A worker that hears no leader may have stopped it (SH-14).
    """
    silent = worker is not None and worker.stale
    unknown = entry.state is ApplicationState.RUNNING and (silent or unled)
    state, reason, restarts = entry.state, entry.reason, entry.restarts
    if report is not None:
        restarts = report.restarts
        if report.state is not RunState.RUNNING:
            state, reason = ApplicationState.ASSIGNED, report.reason or reason
    return ApplicationStatus(
        application=str(application),
        state=UNKNOWN if unknown else state,
        worker=entry.worker,
        leaving=entry.leaving.worker if entry.leaving else None,
        reason=f"it ran when {entry.worker if silent else 'a leader'} was last heard" if unknown else reason,
        mode=entry.mode,
        tags=sorted(entry.tags),
        command=entry.command,
        size_bytes=entry.archive.size_bytes,
        restarts=restarts,
        failed_on=dict(sorted(entry.failed_on.items())),
        cpu=entry.requests.cpu_milli / 1000 if entry.requests else 0.0,
        memory_mb=entry.requests.memory_mb if entry.requests else 0,
        replicas=entry.replicas,
    )
