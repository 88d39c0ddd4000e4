"""What a run is made of, and how chance draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Final

from rebalanser.core.allocation import Capacity, Requests
from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.types import RestartPolicy
from rebalanser.core.shiva.worker_options import WorkerOptions
from simulation.shiva.faults import Fault

DRIFT_RATIO: Final = 0.04
MARGIN_S: Final = 0.2
KEEP_FILES_S: Final = 4.0
MAX_REPLICAS: Final = 4
NEVER_S: Final = 1000.0
"""Longer than any run."""
LEADER_OPTIONS: Final = LeaderOptions(
    round_s=2.0,
    missed_rounds=1,
    stalled_s=3.0,
    retry_initial_s=NEVER_S,
    retry_max_s=2 * NEVER_S,
    deadline_s=7.0,
    settle_time_s=0.02,
    min_publish_interval_s=0.1,
    retention_s=40.0,
    retention_bytes=60_000,
    budget_ratio=0.3,
    keep_ratio=0.4,
    keep_batch_bytes=4_000,
    drop_after_s=12.0,
    max_set_aside=5,
    snapshot_changes=5,
    snapshot_s=15.0,
)
POLICY: Final = RestartPolicy(
    max_restarts=2, restart_window_s=20.0, backoff_initial_s=0.1, backoff_max_s=0.4, stop_timeout_s=0.4
)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What runs on a host: a leader, a worker, or a daemon that is both under one name."""

    name: str
    worker: str | None = None
    """The worker's id; two hosts with one id have data folders of their own."""
    leads: bool = False
    tags: frozenset[str] = frozenset()
    starts_at_s: float = 0.0
    capacities: tuple[Capacity | None, ...] = (None,)
    """Capacities of its incarnations, in turn."""

    def capacity(self, incarnation: int) -> Capacity | None:
        """The capacity of an incarnation of its worker."""
        return self.capacities[incarnation % len(self.capacities)]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run's setting."""

    hosts: tuple[HostPlan, ...]
    applications: int = 3
    faults: Mapping[Fault, float] = field(default_factory=lambda: MappingProxyType({}))
    """The faults that are about, with their weights."""
    options: LeaderOptions = LEADER_OPTIONS
    session_s: float = 1.5
    request_timeout_s: float = 0.8
    transaction_timeout_s: float = 1.2
    chaos_s: float = 25.0
    mean_between_faults_s: float = 0.7
    exclusive: float = 0.6
    """How probable it is that a start command asks for mode ``exclusive``."""
    tagged: float = 0.2
    awkward: float = 0.15
    """How probable it is that an application exits by itself, hangs or cannot be unpacked."""
    weighed: float = 0.0
    """Probability that a start command requests processors or memory."""
    replicated: float = 0.0
    """Probability that a start command is for several replicas."""

    def worker_options(self, plan: HostPlan, incarnation: int = 1) -> WorkerOptions:
        """The options of an incarnation of a host's worker."""
        return WorkerOptions(
            tags=plan.tags,
            capacity=plan.capacity(incarnation),
            clock_drift_ratio=DRIFT_RATIO,
            safety_margin_s=MARGIN_S,
            keep_files_s=KEEP_FILES_S,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """What scenarios are drawn from."""

    name: str
    faults: Mapping[Fault, float]
    kinds: tuple[int, int] = (4, 12)
    """How many kinds of fault a run has, at least and at most."""
    mean_between_faults_s: tuple[float, float] = (0.3, 1.2)
    exclusive: tuple[float, ...] = (0.0, 0.6, 1.0)
    awkward: tuple[float, ...] = (0.0, 0.2)
    daemons: int = 3
    """How many hosts, at most, are a leader and a worker under one name."""
    retry_s: float = NEVER_S
    """How long after a failure an application is tried again."""
    away_grace_s: tuple[float, ...] = (0.0,)
    """Of leaders; with several each run has one of them."""
    weighed: tuple[float, ...] = (0.0,)
    """Probabilities of requests; with several each run has one of them, and its workers have capacities."""
    replicated: float = 0.0
    """Probability that a start command is for several replicas."""

    def draw(self, random: Random) -> Scenario:
        """A scenario."""
        daemons = random.randint(0, self.daemons)
        workers = random.randint(0 if daemons > 1 else 2, 3)
        leaders = random.randint(1 if daemons < 2 else 0, 2)
        hosts = [HostPlan(f"d{n}", f"d{n}", leads=True, tags=_tags(random)) for n in range(daemons)]
        hosts += [HostPlan(f"w{n}", f"w{n}", tags=_tags(random)) for n in range(workers)]
        hosts += [HostPlan(f"l{n}", leads=True) for n in range(leaders)]
        known = [host.worker for host in hosts if host.worker]
        faults = self._faults(random)
        if Fault.IMPOSTOR in faults:
            hosts.append(HostPlan("again", random.choice(known), starts_at_s=random.uniform(3.0, 15.0)))
        if len(self.weighed) > 1:
            hosts = [replace(host, capacities=_capacities(random)) for host in hosts]
        grace_s = self.away_grace_s[0] if len(self.away_grace_s) == 1 else random.choice(self.away_grace_s)
        return Scenario(
            hosts=tuple(_with_start(host, random) for host in hosts),
            applications=random.randint(1, 6),
            faults=MappingProxyType(faults),
            options=replace(
                _options(random),
                retry_initial_s=self.retry_s,
                retry_max_s=2 * self.retry_s,
                away_grace_s=grace_s,
            ),
            chaos_s=random.uniform(15.0, 35.0),
            mean_between_faults_s=random.uniform(*self.mean_between_faults_s),
            exclusive=random.choice(self.exclusive),
            tagged=random.choice((0.0, 0.4)),
            awkward=random.choice(self.awkward),
            weighed=self.weighed[0] if len(self.weighed) == 1 else random.choice(self.weighed),
            replicated=self.replicated,
        )

    def _faults(self, random: Random) -> dict[Fault, float]:
        left = dict(self.faults)
        chosen: dict[Fault, float] = {}
        kinds = random.randint(*self.kinds)
        while left and len(chosen) < kinds:
            kind = random.choices(list(left), list(left.values()))[0]
            chosen[kind] = left.pop(kind)
        return chosen


def _tags(random: Random) -> frozenset[str]:
    return frozenset({"gpu"}) if random.random() < 0.4 else frozenset()


def _capacities(random: Random) -> tuple[Capacity | None, ...]:
    def limit() -> int | None:
        return random.choice((None, 400, 800, 800, 1200))

    return tuple(Capacity(limit(), limit()) for _ in range(random.randint(1, 2)))


def requests(random: Random) -> Requests:
    """Draw what an application requests; two of them may fill a worker, or one of them none."""
    return Requests(random.choice((0, 100, 300, 500, 900)), random.choice((0, 0, 100, 300, 500)))


def _with_start(plan: HostPlan, random: Random) -> HostPlan:
    at_s = plan.starts_at_s or random.choice((0.0, 0.0, random.random(), 12 * random.random()))
    return replace(plan, starts_at_s=at_s)


def _options(random: Random) -> LeaderOptions:
    if random.random() < 0.6:
        return LEADER_OPTIONS
    round_s = random.choice((1.0, 2.0))
    return LeaderOptions(
        round_s=round_s,
        missed_rounds=random.choice((1, 2)),
        stalled_s=3.0,
        deadline_s=random.choice((7.0, 9.0)),
        settle_time_s=random.choice((0.0, 0.02, 0.3)),
        min_publish_interval_s=random.choice((0.0, 0.1, 0.8)),
        retention_s=40.0,
        retention_bytes=60_000,
        budget_ratio=0.3,
        keep_ratio=0.4,
        keep_batch_bytes=random.choice((1, 4_000)),
        drop_after_s=12.0,
        max_set_aside=random.choice((0, 5)),
        snapshot_changes=3 if round_s == 1.0 else 999,
        snapshot_s=15.0,
    )


_COMMANDS: Final[Mapping[Fault, float]] = MappingProxyType(
    {Fault.START: 3, Fault.REPLACE: 3, Fault.STOP: 3, Fault.FLAP: 2}
)
ANYTHING: Final = Profile(
    "anything",
    MappingProxyType(
        {
            **_COMMANDS,
            Fault.UNKNOWN_STOP: 1,
            Fault.WITHOUT_PARTS: 1,
            Fault.OVERSIZE: 1,
            Fault.POISON: 1,
            Fault.BULK: 1,
            Fault.LEAVE: 3,
            Fault.CRASH: 3,
            Fault.ROLLING: 2,
            Fault.NO_LEADER: 2,
            Fault.LEADER_LEAVES: 2,
            Fault.KICK: 2,
            Fault.PAUSE_SHORT: 2,
            Fault.PAUSE_LONG: 3,
            Fault.PAUSE_LEADER: 3,
            Fault.PAUSE_AT_SPAWN: 2,
            Fault.PAUSE_AT_PONG: 2,
            Fault.CUT: 3,
            Fault.BROKER_DOWN: 2,
            Fault.REQUEST_LOST: 2,
            Fault.REQUEST_LATE: 2,
            Fault.REPLY_LOST: 2,
            Fault.DUPLICATE: 2,
            Fault.COMMIT_LOST: 2,
            Fault.LAG: 3,
            Fault.DRIFT_WITHIN: 2,
            Fault.DRIFT_BEYOND: 1,
            Fault.IMPOSTOR: 2,
            Fault.FILES_SLOW: 2,
            Fault.FILES_REFUSED: 1,
            Fault.EXIT: 2,
            Fault.HANG: 2,
            Fault.ZOMBIE_DOCUMENT: 2,
            Fault.COMPACTION: 2,
            Fault.RETENTION: 2,
        }
    ),
)


def _closer(
    name: str,
    faults: Mapping[Fault, float],
    mean_between_faults_s: tuple[float, float] = (0.3, 0.6),
    daemons: int = 3,
) -> Profile:
    """A profile of clusters that run what is exclusive, and meet these faults often and little else."""
    return Profile(
        name,
        MappingProxyType(dict(faults)),
        kinds=(len(faults), len(faults)),
        mean_between_faults_s=mean_between_faults_s,
        exclusive=(1.0,),
        awkward=(0.0,),
        daemons=daemons,
    )


PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            ANYTHING,
            _closer("commands", {**_COMMANDS, Fault.NO_LEADER: 3, Fault.KICK: 2, Fault.DUPLICATE: 2}),
            _closer("leaders", {Fault.REPLACE: 2, Fault.PAUSE_LEADER: 4, Fault.KICK: 3, Fault.REPLY_LOST: 2}),
            _closer(
                "cut off",
                {Fault.CUT: 4, Fault.PAUSE_LONG: 4, Fault.PAUSE_AT_PONG: 4, Fault.LAG: 2, Fault.KICK: 1},
                mean_between_faults_s=(1.5, 4.0),
                daemons=0,
            ),
            _closer(
                "come back",
                {Fault.CUT: 4, Fault.LAG: 4, Fault.ROLLING: 2, Fault.REQUEST_LATE: 2},
                mean_between_faults_s=(0.8, 2.0),
                daemons=0,
            ),
            _closer("twins", {Fault.IMPOSTOR: 1, Fault.ROLLING: 2, Fault.CUT: 2, Fault.LAG: 1}),
            _closer("moves", {Fault.LEAVE: 3, Fault.ROLLING: 3, Fault.HANG: 3, Fault.LAG: 3}),
            replace(
                _closer(
                    "absences",
                    {
                        Fault.CORDON: 5,
                        Fault.LEAVE: 3,
                        Fault.CRASH: 2,
                        Fault.CUT: 2,
                        Fault.PAUSE_LONG: 2,
                        Fault.START: 1,
                        Fault.STOP: 1,
                        Fault.KICK: 1,
                        Fault.LAG: 2,
                    },
                ),
                exclusive=(0.0, 1.0),
                away_grace_s=(0.0, 2.0, 6.0, 12.0),
            ),
            replace(
                _closer(
                    "weights",
                    {
                        **_COMMANDS,
                        Fault.CORDON: 1,
                        Fault.LEAVE: 3,
                        Fault.ROLLING: 3,
                        Fault.HANG: 2,
                        Fault.CUT: 1,
                        Fault.KICK: 1,
                        Fault.LAG: 1,
                    },
                    mean_between_faults_s=(0.5, 2.0),
                ),
                exclusive=(0.0, 1.0),
                away_grace_s=(0.0, 6.0),
                weighed=(0.6, 1.0),
            ),
            replace(
                _closer(
                    "replicas",
                    {
                        **_COMMANDS,
                        Fault.SCALE: 6,
                        Fault.CORDON: 1,
                        Fault.LEAVE: 3,
                        Fault.ROLLING: 3,
                        Fault.HANG: 3,
                        Fault.CUT: 3,
                        Fault.KICK: 1,
                        Fault.LAG: 2,
                        Fault.DUPLICATE: 1,
                        Fault.FILES_REFUSED: 1,
                    },
                    mean_between_faults_s=(0.4, 1.5),
                ),
                exclusive=(0.0, 1.0),
                away_grace_s=(0.0, 6.0),
                weighed=(0.0, 0.0, 0.8),
                replicated=0.8,
            ),
            replace(
                _closer(
                    "replicas cut off",
                    {Fault.CUT: 5, Fault.SCALE: 5, Fault.HANG: 3},
                    mean_between_faults_s=(0.4, 1.2),
                    daemons=0,
                ),
                exclusive=(0.0,),
                replicated=1.0,
            ),
            _closer("retention", {**_COMMANDS, Fault.BULK: 4, Fault.RETENTION: 4, Fault.COMPACTION: 4}),
            _closer(
                "kept copies",
                {Fault.START: 4, Fault.STOP: 4, Fault.LAG: 5, Fault.KICK: 3, Fault.CRASH: 1},
                daemons=0,
            ),
            replace(
                _closer(
                    "failures",
                    {Fault.FILES_REFUSED: 6, Fault.EXIT: 6, Fault.CUT: 1, Fault.KICK: 1, Fault.LAG: 1},
                ),
                retry_s=1.5,
            ),
            _closer(
                "lost changes",
                {
                    Fault.CHANGE_LOST: 6,
                    Fault.START: 2,
                    Fault.STOP: 2,
                    Fault.LEAVE: 2,
                    Fault.ROLLING: 2,
                    Fault.KICK: 1,
                },
            ),
            _closer("zombies", {**_COMMANDS, Fault.ZOMBIE_DOCUMENT: 5, Fault.KICK: 5}),
        )
    }
)
"""By name; the first is what tests and soaks run, the others look closer at one kind of trouble."""
