"""Skuld, on SQLite or on the etcd whose URL is told."""

from __future__ import annotations

import os
import sys

from queues import bodies, place
from queues.skuld_actions import ACTIONS
from rebalanser import Settings
from rebalanser.tasks import Claim, Queue, Status, TaskFunction

__all__ = ["ACTIONS"]

tasks = Queue(
    "bench",
    os.environ.get(place.URL) or f"sqlite:///{place.folder() / 'tasks.db'}",
    claim_ttl_s=place.PATIENCE_S,
    settings=Settings(lease_ttl_s=place.PATIENCE_S),
    state_folder=place.folder() / "state",
)


@tasks.task()
def nothing(_claim: Claim) -> None:
    """Count."""
    bodies.nothing()


@tasks.task()
def asked(claim: Claim) -> None:
    """Count, and tell how long ago this claim was asked for: its time is counted from then."""
    bodies.asked_at(claim.deadline - place.PATIENCE_S)


@tasks.task()
def stamp(_claim: Claim) -> None:
    """Say when it was started."""
    bodies.stamp()


@tasks.task()
def slow(_claim: Claim, name: str) -> None:
    """Take a while."""
    bodies.slow(name)


@tasks.task()
def held(_claim: Claim, name: str) -> None:
    """Last until it is let end."""
    bodies.held(name)


BODIES: dict[str, TaskFunction[...]] = {each.name: each for each in (nothing, asked, stamp, slow, held)}


def prepare() -> None:
    """Its store is made as it is opened."""


def enqueue(body: str, *arguments: str) -> str:
    """Enqueue a call; a handle of it."""
    return BODIES[body].enqueue(*arguments)


def enqueue_many(body: str, count: int) -> None:
    """Enqueue so many calls in few transactions."""
    BODIES[body].enqueue_many([((), {})] * count)


def worker(concurrency: int) -> list[str]:
    """The command of a worker that runs so many tasks at a time, in threads."""
    place = ["queues.on_skuld:tasks", "--concurrency", str(concurrency)]
    return [sys.executable, "-m", "rebalanser", "tasks", "worker", *place]


def is_finished(handle: str) -> bool:
    """Whether the queue holds that the task has ended well."""
    return tasks.get(handle).state.status is Status.COMPLETED
