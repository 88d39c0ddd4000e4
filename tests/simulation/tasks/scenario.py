"""Scenario of a world, as drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from rebalanser.core.tasks.retention import Retention

TTL_S = 2.0
"""Seconds that claims last."""
DRIFT_RATIO = 0.02
"""Maximum ratio by which monotonic clocks drift from true time."""
BUFFER_S = 0.15
"""Seconds added to a claim's time: more than two such clocks drift apart in that time."""
SKEW_S = 5 * 3600.0
"""Maximum seconds by which wall clocks are off."""
SLOT_LEASE_S = 1.0
"""Seconds that the slots of a worker last that is killed or can't reach the engine."""
MAX_CONTENT_BYTES = 64
"""The engine's limit of an update or a result."""
RETENTION = Retention(completed_s=0.5, dead_s=3.0, cancelled_s=2.0)
"""Times for which closed tasks are kept: complete ones shorter than a request or an outbox may be late."""


class Fault(StrEnum):
    """Faults of an actor, a request or the engine."""

    KILL = "a process is killed, and another starts"
    PAUSE_SHORT = "a process is stopped for less than a claim"
    PAUSE_LONG = "a process is stopped past its claims"
    CUT = "a process can't reach the engine"
    DEPOSE = "a partition gets another owner"
    DEPOSE_UNSEEN = "a partition gets another owner, the old one is not told"
    REQUEST_LOST = "a request is lost"
    REPLY_LOST = "a reply is lost"
    REPLY_SLOW = "a reply comes slowly"
    REQUEST_LATE = "a request takes effect after its sender gave up"
    REQUEST_DOUBLED = "a request takes effect twice"
    WATCH_LOST = "a watch loses changes"
    WATCH_LATE = "a watch tells something again, late"
    ENGINE_DOWN = "the engine is away"
    FULL = "the disk is full"
    READ_ONLY = "the store is read-only"
    LOCKED = "the store is locked"
    TOO_LARGE = "a write is over the limit"
    CANCEL = "an operator cancels a task"
    REQUEUE = "an operator requeues a task"
    BUG = "a call fails as nobody foresaw"
    STOP = "a worker is asked to stop"
    PAUSE_QUEUE = "an operator pauses the queue, and resumes it later"
    PAUSE_SCHEDULE = "an operator pauses a schedule, and resumes it later"
    TOGETHER = "a producer enqueues several tasks at once, some of which exist"
    COLLECT = "what is closed is deleted once its time is over"


OF_REQUESTS = (
    Fault.REQUEST_LOST,
    Fault.REPLY_LOST,
    Fault.REPLY_SLOW,
    Fault.REQUEST_LATE,
    Fault.REQUEST_DOUBLED,
)
OF_POOLS = (Fault.BUG, Fault.STOP)
OF_OPERATORS = (Fault.PAUSE_QUEUE, Fault.PAUSE_SCHEDULE, Fault.TOGETHER)
OF_CLAIMS = (
    Fault.KILL,
    Fault.PAUSE_SHORT,
    Fault.PAUSE_LONG,
    Fault.REQUEST_LOST,
    Fault.REQUEST_LATE,
    Fault.REPLY_LOST,
    Fault.REPLY_SLOW,
    Fault.ENGINE_DOWN,
    Fault.FULL,
    Fault.READ_ONLY,
    Fault.LOCKED,
    Fault.TOO_LARGE,
    Fault.WATCH_LOST,
    Fault.WATCH_LATE,
    Fault.CANCEL,
    Fault.REQUEUE,
    Fault.PAUSE_QUEUE,
    Fault.STOP,
    Fault.BUG,
)
"""Faults of processes that claim, and of their requests."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world: its numbers of actors, and its faults."""

    partitions: int
    hosts: int
    owners: int
    workers: int
    producers: int
    tasks: int
    """Number of tasks that each producer makes during the chaos."""
    faults: tuple[Fault, ...]
    request_fault_ratio: float
    strikes_per_s: float
    dependent_ratio: float
    """Ratio of tasks that depend on others."""
    is_collecting: bool
    pools: int = 0
    """Number of workers that run the product's loops."""
    servers: int = 0
    """Number of servers that hand out claims over HTTP."""
    clients: int = 0
    has_index: bool = False
    """True if the engine hands out claims itself, and no partition has an owner."""
    chaos_s: float = 8.0
    latency_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Profile:
    """Bounds of the scenarios that a seed may draw."""

    name: str
    faults: tuple[Fault, ...] = tuple(fault for fault in Fault if fault not in (*OF_POOLS, *OF_OPERATORS))
    strikes_per_s: float = 2.0
    is_collecting: bool = False
    chaos_s: float = 8.0
    max_partitions: int = 2
    max_tasks: int = 14
    dependent_ratio: float = 0.5
    has_pools: bool = False
    has_index: bool = False
    has_servers: bool = False
    """True for servers and clients, in some worlds with an index, in others with owners of partitions."""

    def draw(self, random: Random) -> Scenario:
        """Return the scenario of a seed."""
        has_request_faults = any(fault in self.faults for fault in OF_REQUESTS)
        has_index = self.has_index or (self.has_servers and random.random() < 0.5)
        return Scenario(
            partitions=random.randint(1, self.max_partitions),
            hosts=random.randint(1, 3),
            owners=0 if has_index else random.randint(2, 3),
            workers=self._workers(random),
            producers=random.randint(1, 2),
            tasks=random.randint(self.max_tasks // 2, self.max_tasks),
            faults=self.faults,
            request_fault_ratio=random.choice((0.0, 0.03, 0.1)) if has_request_faults else 0.0,
            strikes_per_s=self.strikes_per_s * random.uniform(0.5, 1.5),
            dependent_ratio=self.dependent_ratio,
            is_collecting=self.is_collecting or (Fault.COLLECT in self.faults and random.random() < 0.3),
            pools=random.randint(1, 3) if self.has_pools else 0,
            chaos_s=self.chaos_s,
            has_index=has_index,
            servers=random.randint(1, 2) if self.has_servers else 0,
            clients=random.randint(2, 4) if self.has_servers else 0,
        )

    def _workers(self, random: Random) -> int:
        """Return the number of workers that request claims from owners, one by one."""
        if self.has_index or self.has_servers:
            return 0
        return 1 if self.has_pools else random.randint(2, 3)


ANYTHING = Profile("anything")
_PROFILES = (
    ANYTHING,
    Profile(
        "zombies",
        (Fault.DEPOSE_UNSEEN, Fault.PAUSE_SHORT, Fault.PAUSE_LONG, Fault.CUT, Fault.DEPOSE),
        3.0,
        max_partitions=1,
    ),
    Profile("lost requests", OF_REQUESTS),
    Profile(
        "refused writes",
        (
            Fault.FULL,
            Fault.READ_ONLY,
            Fault.LOCKED,
            Fault.TOO_LARGE,
            Fault.ENGINE_DOWN,
            Fault.REPLY_LOST,
            Fault.REQUEST_LATE,
        ),
        5.0,
    ),
    Profile("stale workers", (Fault.PAUSE_LONG, Fault.KILL, Fault.CUT, Fault.REPLY_SLOW)),
    Profile(
        "collection",
        (*OF_REQUESTS, Fault.COLLECT, Fault.KILL, Fault.ENGINE_DOWN),
        0.3,
        is_collecting=True,
        chaos_s=30.0,
        max_tasks=40,
        dependent_ratio=0.2,
    ),
    Profile(
        "outboxes",
        (
            Fault.REPLY_LOST,
            Fault.REQUEST_LATE,
            Fault.REQUEST_DOUBLED,
            Fault.ENGINE_DOWN,
            Fault.KILL,
            Fault.CUT,
            Fault.COLLECT,
        ),
        1.0,
        is_collecting=True,
        chaos_s=20.0,
        max_tasks=24,
        dependent_ratio=0.0,
    ),
    Profile(
        "workers",
        tuple(fault for fault in Fault if fault not in (Fault.COLLECT, *OF_OPERATORS)),
        3.0,
        max_tasks=40,
        dependent_ratio=0.2,
        has_pools=True,
    ),
    Profile(
        "busy workers",
        (
            Fault.CANCEL,
            Fault.STOP,
            Fault.PAUSE_SHORT,
            Fault.WATCH_LATE,
            Fault.LOCKED,
            Fault.CUT,
            Fault.REQUEST_LOST,
        ),
        12.0,
        max_partitions=1,
        max_tasks=120,
        dependent_ratio=0.0,
        has_pools=True,
    ),
    Profile(
        "claims from an index",
        OF_CLAIMS,
        4.0,
        max_tasks=40,
        dependent_ratio=0.2,
        has_pools=True,
        has_index=True,
    ),
    Profile(
        "servers",
        tuple(fault for fault in OF_CLAIMS if fault not in (Fault.WATCH_LATE, Fault.REQUEUE)),
        3.0,
        max_tasks=40,
        dependent_ratio=0.1,
        has_servers=True,
    ),
    Profile(
        "ticks",
        (
            Fault.PAUSE_SCHEDULE,
            Fault.KILL,
            Fault.PAUSE_SHORT,
            Fault.PAUSE_LONG,
            Fault.CUT,
            Fault.DEPOSE,
            Fault.DEPOSE_UNSEEN,
            Fault.FULL,
            Fault.ENGINE_DOWN,
            *OF_REQUESTS,
        ),
    ),
    Profile(
        "tasks together",
        (Fault.TOGETHER, *OF_REQUESTS, Fault.FULL, Fault.LOCKED, Fault.ENGINE_DOWN),
        4.0,
    ),
    Profile(
        "pauses",
        (
            Fault.PAUSE_QUEUE,
            Fault.KILL,
            Fault.DEPOSE_UNSEEN,
            Fault.WATCH_LOST,
            Fault.ENGINE_DOWN,
            Fault.REQUEST_LOST,
            Fault.REQUEST_LATE,
            Fault.REPLY_LOST,
        ),
        4.0,
        max_tasks=40,
        dependent_ratio=0.0,
        has_pools=True,
    ),
)
PROFILES = {profile.name: profile for profile in _PROFILES}
