"""What a run is made of, drawn from its seed: hosts, resources, timings, and which faults are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Any

from rebalanser.core.group.types import Mode, Policy, Resource, ResourceSpec, SpreadOver, Timings
from rebalanser.registry.contract import Capabilities
from rebalanser.testing.memory import MEMORY_CAPABILITIES
from simulation.group.faults import FaultKind

TIMINGS = Timings(
    lease_ttl_s=3.0,
    heartbeat_interval_s=0.6,
    stop_timeout_s=0.8,
    start_timeout_s=0.8,
    safety_margin_s=0.2,
    clock_drift_ratio=0.02,
    settle_time_s=0.02,
    min_rebalance_interval_s=0.1,
    retry_initial_s=0.05,
    retry_max_s=0.4,
    rejoin_initial_s=0.1,
    rejoin_max_s=0.8,
)
REQUEST_TIMEOUT_S = 0.5
LATE_S = (0.55, 2.5)
_TAGS = ("gpu", "ssd")


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What runs on a host."""

    label: str
    mode: Mode = Mode.COOPERATIVE
    start_in_batches: bool = True
    may_lead: bool = True
    kills: bool = False
    """True if a dead man's switch kills the process (``on_overrun="kill"``)."""
    capacity: float | None = None
    tags: frozenset[str] = frozenset()
    zone: str = ""
    rejoin_grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run's setting."""

    hosts: tuple[HostPlan, ...]
    resources: int
    faults: Mapping[FaultKind, float] = field(default_factory=lambda: MappingProxyType({}))
    """The faults that are about, with their weights."""
    timings: Timings = TIMINGS
    request_timeout_s: float = REQUEST_TIMEOUT_S
    late_s: tuple[float, float] = LATE_S
    """Minimum and maximum seconds after which a late request takes effect."""
    max_operations: int = MEMORY_CAPABILITIES.max_operations
    max_request_bytes: int = MEMORY_CAPABILITIES.max_request_bytes
    proves_renewals: bool = False
    """True if the registry renews a lease and proves it in one step, False in two."""
    operators: int = 0
    """Operators that send requests through the network; with none, what is asked for happens at once."""
    turn_s: float = 0.0
    """Maximum seconds that a node's loop takes for one event."""
    live_within_s: float | None = None
    """Seconds within which a node works on what it is given, even while the rest of the group changes."""
    neighbour: Scenario | None = None
    """Another group in the same registry."""
    prompt_within_s: float | None = None
    """Seconds within which a watch must have told of a change and a node have acted on it."""
    chaos_s: float = 8.0
    mean_between_faults_s: float = 0.5
    burst: float = 0.3
    """Probability that an important event triggers a fault."""
    writes: float = 0.3
    """How probable a fenced write is, at each moment where one may be."""
    placement: bool = False
    """True if resources have weights, needs and spreads, and the group a policy."""

    def draw_spec(self, resource: Resource, random: Random, pin: str | None = None) -> ResourceSpec:
        """A resource as an operator adds it."""
        if not self.placement:
            return ResourceSpec(resource, pin=pin)
        return ResourceSpec(
            resource,
            weight=random.choice((0.5, 1.0, 1.0, 2.0, 3.0, 5.0)),
            pin=pin,
            needs=frozenset(random.sample(_TAGS, random.choice((0, 0, 0, 0, 0, 1, 1, 2)))),
            spread=random.choice((None, None, None, None, "one", "two", "three")),
        )

    @staticmethod
    def draw_policy(random: Random) -> Policy:
        """A policy as an operator sets it."""
        return Policy(
            spread_over=random.choice(tuple(SpreadOver)),
            imbalance_band=random.choice((0.0, 0.0, 0.1, 0.5)),
            max_moves=random.choice((None, 0, 1, 2, 3)),
            move_interval_s=random.choice((0.0, 0.4, 1.5)),
            cooldown_s=random.choice((0.0, 0.6, 2.5)),
        )

    @property
    def capabilities(self) -> Capabilities:
        """The limits of the registry."""
        return Capabilities(
            max_operations=self.max_operations,
            max_request_bytes=self.max_request_bytes,
            min_lease_ttl_s=MEMORY_CAPABILITIES.min_lease_ttl_s,
            lease_detection_s=0.5,
            survives_process=True,
            shared_between_hosts=True,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """What scenarios are drawn from."""

    name: str
    faults: Mapping[FaultKind, float]
    share: float = 1.0
    """Seeds in a soak of all profiles, relative to the others; less for runs that take long."""
    kinds: tuple[int, int] = (3, 9)
    """How many kinds of fault a run has, at least and at most."""
    hosts: tuple[int, int] = (1, 7)
    resources: tuple[int, int] = (1, 24)
    max_operations: tuple[int, ...] = (128, 128, 16)
    max_request_bytes: int = MEMORY_CAPABILITIES.max_request_bytes
    late_s: tuple[float, float] = LATE_S
    operators: int = 0
    turn_s: float = 0.0
    live_within_s: float | None = None
    neighbour: bool = False
    """True if a second group is drawn, in the same registry."""
    equal_labels: float = 0.0
    """Probability that a host has the label of the first one."""
    eager: float = 0.2
    may_not_lead: float = 0.15
    kills: float = 0.25
    prompt_within_s: float | None = None
    chaos_s: tuple[float, float] = (5.0, 10.0)
    mean_between_faults_s: tuple[float, float] = (0.2, 1.0)
    burst: tuple[float, float] = (0.1, 0.5)
    placement: bool = False
    """True if nodes have capacities, tags and zones, resources weights, needs and spreads, and a policy."""
    graces_s: tuple[float, ...] = ()
    """The graces of which each label has one (RB-39)."""

    def draw(self, random: Random) -> Scenario:
        """A scenario."""
        neighbour = replace(self, neighbour=False).draw(random) if self.neighbour else None
        kinds = random.randint(*self.kinds)
        return Scenario(
            hosts=tuple(self._host(index, random) for index in range(self._hosts(random))),
            resources=random.randint(*self.resources),
            faults=MappingProxyType(self._faults(kinds, random)),
            timings=self._timings(random),
            max_operations=random.choice(self.max_operations),
            max_request_bytes=self.max_request_bytes,
            late_s=self.late_s,
            operators=self.operators,
            turn_s=self.turn_s,
            live_within_s=self.live_within_s,
            neighbour=neighbour,
            prompt_within_s=self.prompt_within_s,
            chaos_s=random.uniform(*self.chaos_s),
            mean_between_faults_s=random.uniform(*self.mean_between_faults_s),
            burst=random.uniform(*self.burst),
            writes=random.choice((0.1, 0.5)),
            proves_renewals=random.random() < 0.5,
            placement=self.placement,
        )

    def _hosts(self, random: Random) -> int:
        low, high = self.hosts
        return min(random.randint(low, high), random.randint(min(high, max(low, 2)), high))

    def _host(self, index: int, random: Random) -> HostPlan:
        alike = self.equal_labels > 0 and random.random() < self.equal_labels
        plan = HostPlan(
            label=f"host-{0 if alike else index}",
            mode=Mode.EAGER if random.random() < self.eager else Mode.COOPERATIVE,
            start_in_batches=random.random() < 0.7,
            may_lead=index == 0 or random.random() >= self.may_not_lead,
            kills=random.random() < self.kills,
        )
        if self.graces_s:
            plan = replace(plan, rejoin_grace_s=random.choice(self.graces_s))
        if not self.placement:
            return plan
        return replace(
            plan,
            capacity=random.choice((None, None, 8.0, 16.0, 32.0)),
            tags=frozenset(random.sample(_TAGS, random.choice((0, 1, 2, 2)))),
            zone=random.choice(("", "a", "b")),
        )

    def _faults(self, kinds: int, random: Random) -> dict[FaultKind, float]:
        left = dict(self.faults)
        chosen: dict[FaultKind, float] = {}
        while left and len(chosen) < kinds:
            kind = random.choices(list(left), list(left.values()))[0]
            chosen[kind] = left.pop(kind)
        return chosen

    def _timings(self, random: Random) -> Timings:
        if random.random() < 0.7:
            return TIMINGS
        return Timings(
            lease_ttl_s=3.0,
            heartbeat_interval_s=random.choice((0.3, 0.6, 0.9)),
            stop_timeout_s=random.choice((0.3, 0.8, 1.2)),
            start_timeout_s=random.choice((0.3, 0.8, 2.0)),
            safety_margin_s=0.2,
            clock_drift_ratio=0.02,
            settle_time_s=random.choice((0.0, 0.02, 0.3)),
            min_rebalance_interval_s=random.choice((0.0, 0.1, 1.0)),
            retry_initial_s=random.choice((0.02, 0.05)),
            retry_max_s=0.4,
            rejoin_initial_s=0.1,
            rejoin_max_s=0.8,
        )


ANYTHING = Profile(
    "anything",
    MappingProxyType(
        {
            FaultKind.REQUEST_LOST: 3,
            FaultKind.REPLY_LOST: 4,
            FaultKind.REQUEST_LATE: 4,
            FaultKind.REQUEST_DOUBLED: 3,
            FaultKind.REQUEST_REFUSED: 2,
            FaultKind.REPLY_SLOW: 3,
            FaultKind.WATCH_LOST: 2,
            FaultKind.WATCH_SLOW: 2,
            FaultKind.WATCH_SILENT: 2,
            FaultKind.PARTITION: 3,
            FaultKind.OUTAGE: 2,
            FaultKind.CRASH: 3,
            FaultKind.PAUSE_SHORT: 2,
            FaultKind.PAUSE_LONG: 3,
            FaultKind.PAUSE_AT_ENTRY: 2,
            FaultKind.DRIFT_WITHIN: 2,
            FaultKind.DRIFT_BEYOND: 2,
            FaultKind.REGISTRY_RESTART: 2,
            FaultKind.COMPACTION: 2,
            FaultKind.LEASES_LATE: 2,
            FaultKind.RESOURCES_ADDED: 3,
            FaultKind.RESOURCES_REMOVED: 3,
            FaultKind.RESOURCES_READDED: 3,
            FaultKind.DRAIN: 2,
            FaultKind.UNDRAIN: 2,
            FaultKind.PIN: 2,
            FaultKind.GRACEFUL_STOP: 3,
            FaultKind.HANDLER_SLOW: 3,
            FaultKind.HANDLER_OVERRUN: 2,
            FaultKind.HANDLER_HUNG: 3,
            FaultKind.START_RAISES: 2,
            FaultKind.STOP_RAISES: 2,
        }
    ),
)

_CHANGES: Mapping[FaultKind, float] = MappingProxyType(
    {
        FaultKind.RESOURCES_ADDED: 2,
        FaultKind.RESOURCES_REMOVED: 2,
        FaultKind.RESOURCES_READDED: 2,
        FaultKind.DRAIN: 1,
        FaultKind.UNDRAIN: 1,
        FaultKind.PIN: 2,
        FaultKind.GRACEFUL_STOP: 2,
    }
)


def _closer(name: str, faults: Mapping[FaultKind, float], **settings: Any) -> Profile:
    """A profile of a busy group of a few hosts that meets these faults often, and little else."""
    usual: dict[str, Any] = {
        "hosts": (2, 4),
        "resources": (2, 10),
        "max_operations": (128,),
        "mean_between_faults_s": (0.1, 0.3),
        "burst": (0.3, 0.6),
    }
    return Profile(
        name, MappingProxyType(dict(faults)), kinds=(len(faults), len(faults)), **{**usual, **settings}
    )


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            ANYTHING,
            _closer("operator", {**_CHANGES, FaultKind.REPLY_SLOW: 8}),
            _closer(
                "given-up plans",
                {
                    FaultKind.RESOURCES_READDED: 4,
                    FaultKind.DRAIN: 1,
                    FaultKind.UNDRAIN: 1,
                    FaultKind.REQUEST_LATE: 6,
                },
            ),
            _closer(
                "late requests",
                {
                    **_CHANGES,
                    FaultKind.REQUEST_LATE: 10,
                    FaultKind.REPLY_LOST: 4,
                    FaultKind.REQUEST_DOUBLED: 6,
                    FaultKind.REQUEST_LOST: 2,
                },
                max_operations=(8, 10, 128),
            ),
            _closer(
                "later than the lease",
                {
                    **_CHANGES,
                    FaultKind.REQUEST_LATE: 10,
                    FaultKind.REQUEST_DOUBLED: 8,
                    FaultKind.CRASH: 2,
                    FaultKind.PARTITION: 3,
                    FaultKind.PAUSE_LONG: 2,
                },
                late_s=(3.0, 9.0),
            ),
            _closer(
                "vain renewals",
                {
                    **_CHANGES,
                    FaultKind.RENEWED_IN_VAIN: 8,
                    FaultKind.NOT_RENEWED: 4,
                    FaultKind.PARTITION: 1,
                },
            ),
            _closer("silent watches", {**_CHANGES, FaultKind.WATCH_SILENT: 8, FaultKind.CRASH: 2}),
            _closer(
                "slow network",
                {**_CHANGES, FaultKind.REPLY_SLOW: 8, FaultKind.REQUEST_LATE: 3, FaultKind.PARTITION: 3},
            ),
            _closer(
                "leaders",
                {
                    **_CHANGES,
                    FaultKind.PAUSE_LONG: 3,
                    FaultKind.CRASH: 3,
                    FaultKind.REQUEST_LATE: 8,
                    FaultKind.PARTITION: 2,
                },
            ),
            _closer(
                "isolation",
                {
                    **_CHANGES,
                    FaultKind.PARTITION: 5,
                    FaultKind.PAUSE_LONG: 5,
                    FaultKind.HANDLER_SLOW: 6,
                    FaultKind.CRASH: 1,
                },
            ),
            _closer(
                "short lives",
                {
                    FaultKind.GRACEFUL_STOP: 6,
                    FaultKind.CRASH: 2,
                    FaultKind.START_RAISES: 2,
                    FaultKind.STOP_RAISES: 4,
                    FaultKind.PARTITION: 2,
                    FaultKind.REQUEST_LATE: 3,
                    FaultKind.REPLY_SLOW: 3,
                    FaultKind.STOPPED_UNBEGUN: 1,
                },
            ),
            _closer(
                "stuck leaders",
                {
                    **_CHANGES,
                    FaultKind.LEADING_REFUSED: 8,
                    FaultKind.PLAN_OVERTAKEN: 4,
                    FaultKind.CRASH: 1,
                },
            ),
            _closer(
                "lost leases",
                {
                    **_CHANGES,
                    FaultKind.LEASE_REVOKED: 6,
                    FaultKind.DRIFT_BEYOND: 6,
                    FaultKind.PARTITION: 6,
                    FaultKind.REPLY_SLOW: 4,
                    FaultKind.STOP_RAISES: 4,
                },
            ),
            _closer(
                "whole network",
                {
                    **_CHANGES,
                    FaultKind.CRASH: 1,
                    FaultKind.WATCH_LOST: 2,
                    FaultKind.COMPACTION: 1,
                    FaultKind.REGISTRY_RESTART: 1,
                },
                prompt_within_s=0.15,
            ),
            _closer(
                "releases",
                {
                    **_CHANGES,
                    FaultKind.RELEASE: 12,
                    FaultKind.CRASH: 1,
                    FaultKind.PARTITION: 2,
                    FaultKind.PAUSE_LONG: 1,
                    FaultKind.DRIFT_BEYOND: 3,
                    FaultKind.REQUEST_LATE: 5,
                    FaultKind.REPLY_LOST: 3,
                    FaultKind.REQUEST_DOUBLED: 3,
                    FaultKind.WATCH_LOST: 1,
                },
                equal_labels=0.25,
            ),
            _closer(
                "prompt releases",
                {**_CHANGES, FaultKind.RELEASE: 12, FaultKind.CRASH: 1, FaultKind.WATCH_LOST: 2},
                prompt_within_s=0.15,
            ),
            _closer(
                "silent releases",
                {
                    FaultKind.WATCH_SILENT: 6,
                    FaultKind.RELEASE: 8,
                    FaultKind.GRACEFUL_STOP: 4,
                    FaultKind.CRASH: 1,
                },
            ),
            _closer(
                "overruns",
                {**_CHANGES, FaultKind.HANDLER_OVERRUN: 6, FaultKind.HANDLER_SLOW: 3},
            ),
            _closer(
                "operators",
                {
                    **_CHANGES,
                    FaultKind.RESOURCES_WEIGHED: 3,
                    FaultKind.DRAIN: 4,
                    FaultKind.UNDRAIN: 4,
                    FaultKind.REQUEST_LATE: 6,
                    FaultKind.REQUEST_DOUBLED: 4,
                    FaultKind.REPLY_LOST: 4,
                    FaultKind.REQUEST_LOST: 2,
                    FaultKind.REPLY_SLOW: 4,
                },
                operators=3,
                max_operations=(8, 128),
            ),
            _closer(
                "two groups",
                {
                    **_CHANGES,
                    FaultKind.CRASH: 2,
                    FaultKind.PARTITION: 2,
                    FaultKind.REQUEST_LATE: 3,
                    FaultKind.REGISTRY_RESTART: 1,
                    FaultKind.COMPACTION: 1,
                },
                neighbour=True,
                equal_labels=0.2,
            ),
            _closer(
                "equal labels",
                {**_CHANGES, FaultKind.DRAIN: 4, FaultKind.UNDRAIN: 4, FaultKind.PIN: 6, FaultKind.CRASH: 2},
                equal_labels=0.5,
                hosts=(2, 5),
            ),
            _closer(
                "slow loops",
                {
                    **_CHANGES,
                    FaultKind.PARTITION: 5,
                    FaultKind.HANDLER_SLOW: 5,
                    FaultKind.REPLY_SLOW: 4,
                    FaultKind.CRASH: 1,
                },
                turn_s=0.05,
            ),
            _closer(
                "many resources",
                {
                    **_CHANGES,
                    FaultKind.CRASH: 1,
                    FaultKind.PARTITION: 1,
                    FaultKind.REQUEST_LATE: 6,
                    FaultKind.REPLY_LOST: 4,
                    FaultKind.REQUEST_DOUBLED: 3,
                },
                resources=(100, 2000),
                max_operations=(24, 64),
                max_request_bytes=4_500,
                chaos_s=(4.0, 6.0),
                mean_between_faults_s=(0.2, 0.6),
                share=0.1,
            ),
            _closer(
                "churn",
                {**_CHANGES, FaultKind.CRASH: 1},
                hosts=(3, 5),
                resources=(60, 120),
                max_operations=(8,),
                live_within_s=6.0,
                chaos_s=(12.0, 16.0),
                mean_between_faults_s=(0.05, 0.15),
                share=0.2,
            ),
            _closer(
                "placement",
                {
                    **_CHANGES,
                    FaultKind.RESOURCES_ADDED: 3,
                    FaultKind.RESOURCES_DESCRIBED: 5,
                    FaultKind.RESOURCES_WEIGHED: 8,
                    FaultKind.POLICY: 4,
                    FaultKind.CRASH: 2,
                    FaultKind.PAUSE_LONG: 1,
                    FaultKind.PARTITION: 1,
                    FaultKind.WATCH_SILENT: 1,
                    FaultKind.REQUEST_LATE: 3,
                    FaultKind.REPLY_LOST: 2,
                },
                hosts=(3, 6),
                resources=(4, 24),
                operators=2,
                equal_labels=0.1,
                chaos_s=(8.0, 16.0),
                mean_between_faults_s=(0.3, 0.8),
                burst=(0.05, 0.3),
                placement=True,
            ),
            _closer(
                "static membership",
                {
                    **_CHANGES,
                    FaultKind.GRACEFUL_STOP: 12,
                    FaultKind.CRASH: 6,
                    FaultKind.PAUSE_LONG: 2,
                    FaultKind.PARTITION: 2,
                    FaultKind.REQUEST_LATE: 2,
                    FaultKind.REPLY_LOST: 2,
                    FaultKind.WATCH_SILENT: 1,
                },
                hosts=(3, 6),
                resources=(4, 16),
                max_operations=(8, 128),
                equal_labels=0.3,
                graces_s=(0.0, 1.0, 3.0, 3.0, 6.0),
                chaos_s=(8.0, 14.0),
                mean_between_faults_s=(0.3, 0.9),
            ),
        )
    }
)
"""By name. The first draws from all faults; each of the others looks closer at one kind of trouble."""
