"""A cluster as its last assignment document shows it, for people and programs (SH-11)."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel

from rebalanser.shiva.records import AssignmentDocument
from rebalanser.shiva.types import ApplicationEntry, ApplicationId, ApplicationState, Mode


class WorkerStatus(BaseModel):
    """A worker that the leader knows."""

    worker: str
    host: str
    tags: list[str]
    incarnation: int
    """How often its data folder has been opened."""
    applications: int
    """How many applications name it."""


class ApplicationStatus(BaseModel):
    """An application that the leader knows."""

    application: str
    state: ApplicationState
    worker: str | None
    """The worker that is to run it."""
    leaving: str | None
    """The worker that may still run it and is to stop it first."""
    reason: str
    """Why it is not running, where that is so."""
    mode: Mode
    tags: list[str]
    command: str
    """The id of the start command that it runs by."""
    size_bytes: int
    restarts: int
    failed_on: dict[str, str]
    """The workers where it failed, with the reasons."""


class SetAsideStatus(BaseModel):
    """A record that was not carried out."""

    offset: int
    key: str
    reason: str


class ClusterStatus(BaseModel):
    """All of a cluster."""

    cluster: str
    leader: str | None
    """Who wrote the last document; None before there was any."""
    epoch: str | None
    workers: list[WorkerStatus]
    applications: list[ApplicationStatus]
    set_aside: list[SetAsideStatus]

    @property
    def settled(self) -> bool:
        """Whether all that was started runs, or has finished, and all that was stopped is gone."""
        done = {ApplicationState.RUNNING, ApplicationState.FINISHED}
        return all(each.state in done for each in self.applications)


def status_of(cluster: str, document: AssignmentDocument | None) -> ClusterStatus:
    """What the document says; without one there is nothing to say."""
    if document is None:
        return ClusterStatus(
            cluster=cluster, leader=None, epoch=None, workers=[], applications=[], set_aside=[]
        )
    named = Counter(entry.worker for entry in document.applications.values())
    return ClusterStatus(
        cluster=cluster,
        leader=document.leader,
        epoch=str(document.epoch),
        workers=[
            WorkerStatus(
                worker=worker,
                host=entry.host,
                tags=sorted(entry.tags),
                incarnation=entry.incarnation.number,
                applications=named[worker],
            )
            for worker, entry in sorted(document.workers.items())
        ],
        applications=[
            _application(application, entry) for application, entry in sorted(document.applications.items())
        ],
        set_aside=[
            SetAsideStatus(offset=each.offset, key=each.key, reason=each.reason)
            for each in document.set_aside
        ],
    )


def _application(application: ApplicationId, entry: ApplicationEntry) -> ApplicationStatus:
    return ApplicationStatus(
        application=str(application),
        state=entry.state,
        worker=entry.worker,
        leaving=entry.leaving.worker if entry.leaving else None,
        reason=entry.reason,
        mode=entry.mode,
        tags=sorted(entry.tags),
        command=entry.command,
        size_bytes=entry.archive.size_bytes,
        restarts=entry.restarts,
        failed_on=dict(sorted(entry.failed_on.items())),
    )
