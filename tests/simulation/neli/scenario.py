"""What a seed decides of a world before anything happens in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings, check

CLOCK_ERROR_S = 0.1


class Fault(StrEnum):
    """What can befall a process or the broker."""

    CRASH = "a process is killed"
    STOP = "a process leaves in order"
    START = "a process starts"
    PAUSE_SHORT = "a process is stopped for less than its session"
    PAUSE_LONG = "a process is stopped past its session"
    STUCK = "a process does not poll, past max.poll.interval"
    CUT_COORDINATOR = "a process can't reach the coordinator alone"
    CUT_LOG = "a process can't reach the partitions' leader alone"
    CUT_BOTH = "a process can't reach any broker"
    LATE_COMMIT = "a commit arrives seconds late"
    LATE_RECORD = "a heartbeat arrives seconds late"
    DUPLICATE_RECORD = "a heartbeat is written twice"
    HEARTBEATS_LOST = "heartbeats to the coordinator are lost while commits arrive"
    PUT_OUT = "a process is put out of the group right after a commit, and can't reach the coordinator"
    SLOW_HANDLER = "a handler overruns its limit"
    BROKER_RESTART = "the broker restarts"
    ADD_PARTITIONS = "the partition count changes"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world: how many processes, roles and partitions, and by which settings."""

    processes: int
    partitions: int
    roles: int
    settings: NeliSettings
    others: NeliSettings
    """The settings of every other process, as in a roll-out."""
    faults: tuple[Fault, ...] = tuple(Fault)
    chaos_s: float = 5.0
    latency_s: float = 0.008
    poll_s: float = 0.06
    loss_ratio: float = 0.01


@dataclass(frozen=True, slots=True)
class Profile:
    """What worlds chance may draw."""

    name: str
    modes: tuple[Mode, ...] = (Mode.FAST, Mode.FAST, Mode.EXCLUSIVE, Mode.NON_EXCLUSIVE)
    protocols: tuple[GroupProtocol, ...] = tuple(GroupProtocol)
    faults: tuple[Fault, ...] = tuple(Fault)
    mixed_ratio: float = 0.2
    """How many worlds have processes of two deadlines."""
    drift_ratio: float = 0.02
    """How far monotonic clocks run off true time."""

    def draw(self, random: Random) -> Scenario:
        """The world of a seed."""
        mode, protocol = random.choice(self.modes), random.choice(self.protocols)
        settings = settings_of(mode, protocol, drift_ratio=self.drift_ratio)
        is_mixed = mode is not Mode.NON_EXCLUSIVE and random.random() < self.mixed_ratio
        return Scenario(
            processes=random.randint(2, 3),
            partitions=random.randint(1, 3),
            roles=random.randint(1, 4),
            settings=settings,
            others=settings_of(mode, protocol, 0.6, self.drift_ratio) if is_mixed else settings,
            faults=self.faults,
            latency_s=random.choice((0.002, 0.008, 0.02)),
            loss_ratio=random.choice((0.0, 0.01, 0.05)),
        )


def settings_of(
    mode: Mode, protocol: GroupProtocol, share: float = 1.0, drift_ratio: float = 0.02
) -> NeliSettings:
    """The settings of simulated groups: a session of one second, and ``share`` of the usual deadline."""
    deadline_s = share * {Mode.NON_EXCLUSIVE: 1.4, Mode.EXCLUSIVE: 0.5, Mode.FAST: 0.33}[mode]
    settings = NeliSettings(
        mode=mode,
        session_timeout_s=1.0,
        deadline_s=deadline_s,
        publish_interval_s=deadline_s / 4,
        heartbeat_interval_s=0.15,
        max_poll_interval_s=2.0,
        lapse_limit_s=1.5,
        clock_error_s=CLOCK_ERROR_S,
        clock_drift_ratio=drift_ratio,
        protocol=protocol,
    )
    check(settings)
    return settings


ANYTHING = Profile("anything")
_CUTS = (Fault.CUT_COORDINATOR, Fault.CUT_LOG, Fault.CUT_BOTH)
_PROFILES = (
    ANYTHING,
    Profile(
        "zombies",
        (Mode.FAST, Mode.EXCLUSIVE),
        faults=(*_CUTS, Fault.PAUSE_LONG, Fault.STUCK, Fault.START, Fault.PUT_OUT),
    ),
    Profile(
        "hand-overs",
        (Mode.FAST,),
        faults=(Fault.START, Fault.STOP, Fault.SLOW_HANDLER, Fault.CRASH, Fault.HEARTBEATS_LOST),
    ),
    Profile(
        "late requests",
        (Mode.FAST,),
        (GroupProtocol.CONSUMER,),
        (Fault.LATE_COMMIT, Fault.LATE_RECORD, Fault.START, Fault.STOP, Fault.HEARTBEATS_LOST),
    ),
    Profile(
        "backlogs",
        (Mode.EXCLUSIVE,),
        faults=(Fault.PAUSE_LONG, Fault.CUT_LOG, Fault.START, Fault.PAUSE_SHORT),
    ),
    Profile(
        "growing topic",
        (Mode.FAST, Mode.EXCLUSIVE),
        faults=(Fault.ADD_PARTITIONS, Fault.START, Fault.CUT_LOG, Fault.CRASH),
    ),
    Profile(
        "roll-outs",
        (Mode.FAST, Mode.EXCLUSIVE),
        faults=(Fault.START, Fault.PUT_OUT),
        mixed_ratio=1.0,
    ),
    Profile("bad clocks", (Mode.FAST, Mode.EXCLUSIVE), faults=(Fault.PUT_OUT,), drift_ratio=0.2),
)
PROFILES = {profile.name: profile for profile in _PROFILES}
