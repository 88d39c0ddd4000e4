"""The queues that are compared, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """One queue with one choice of settings."""

    name: str
    module: str
    """The module of this package that opens it."""
    package: str
    """What must be installed."""
    settings: str
    """In words, for the table."""
    server: str = ""
    """``redis``, ``postgres``, ``etcd`` or none."""
    variant: str = ""
    """What ``place.variant()`` tells the module."""
    is_default: bool = False
    """Whether these are the settings that it comes with; it is not measured then, only killed."""


REDIS = "Redis appendfsync always"
PEERS = (
    Peer("skuld-sqlite", "on_skuld", "rebalanser", "claim 10 s, lease 10 s, buffer 1 s"),
    Peer("skuld-etcd", "on_skuld", "rebalanser", "claim 10 s, lease 10 s, buffer 1 s, one member", "etcd"),
    Peer("huey", "on_huey", "huey", "SQLite with fsync"),
    Peer("rq", "on_rq", "rq", f"{REDIS}, its defaults", "redis", "default", is_default=True),
    Peer(
        "rq-retry", "on_rq", "rq", f"{REDIS}, Retry(3), worker_ttl 25 s, maintenance_interval 10 s", "redis",
    ),
    Peer("celery", "on_celery", "celery", f"{REDIS}, its defaults", "redis", "default", is_default=True),
    Peer(
        "celery-late", "on_celery", "celery", f"{REDIS}, acks_late, reject_on_worker_lost", "redis", "late",
        is_default=True,
    ),
    Peer(
        "celery-10s", "on_celery", "celery",
        f"{REDIS}, acks_late, reject_on_worker_lost, visibility_timeout 10 s", "redis",
    ),
    Peer(
        "dramatiq", "on_dramatiq", "dramatiq", f"{REDIS}, its defaults", "redis", "default", is_default=True,
    ),
    Peer(
        "dramatiq-10s", "on_dramatiq", "dramatiq",
        f"{REDIS}, heartbeat_timeout 10 s, maintenance_chance 10 %", "redis",
    ),
    Peer(
        "procrastinate", "on_procrastinate", "procrastinate", "PostgreSQL, its defaults", "postgres",
        "default", is_default=True,
    ),
    Peer(
        "procrastinate-retry", "on_procrastinate", "procrastinate",
        "PostgreSQL, stalled jobs retried by a task every 10 s, heartbeat 10 s", "postgres",
    ),
)  # fmt: skip
