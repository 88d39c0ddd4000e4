"""Runs: chaos, healing, and the demand that every role soon has one leader, and keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from rebalanser.core.neli.messages import FactKind
from rebalanser.core.neli.settings import Mode
from simulation.kernel.reports import MIN_SEEDS_TO_JUDGE, RunReport, Violation, command_to_replay
from simulation.kernel.trace import Trace, Write
from simulation.neli.scenario import ANYTHING, PROFILES, Fault, Profile
from simulation.neli.world import World

SETTLES_WITHIN_S = 14.0
"""How long after healing every role has its leader: handlers that overrun, a rebalance timeout, a session."""
STAYS_FOR_S = 0.8
_LOOK_EVERY_S = 0.3
_OF_BROKER = (Fault.BROKER_RESTART, Fault.ADD_PARTITIONS, Fault.START)
_WEIGHTS = {Fault.BROKER_RESTART: 0.3, Fault.ADD_PARTITIONS: 0.15, Fault.STUCK: 0.6}


@dataclass
class Report(RunReport[Fault, FactKind]):
    """What one run or many of them did and found."""

    inductions: int = 0
    leader_changes: int = 0
    rebalances: int = 0
    overlaps: int = 0
    longest_overlap_s: float = 0.0

    def add(self, other: Self) -> None:
        """Take in the report of other runs: everything is added up, but the longest is the longest of all."""
        longest_s = max(self.longest_overlap_s, other.longest_overlap_s)
        super().add(other)
        self.longest_overlap_s = longest_s


def replay_command(seed: int, profile: Profile = ANYTHING) -> str:
    """The one command that shows a seed's run again."""
    return command_to_replay("neli", seed, profile.name)


def run_seed(seed: int, profile: Profile = ANYTHING, write: Write | None = None) -> Report:
    """Run one seed. Same seed, same run: in another process, with another hash seed, on another day."""
    random = Random(f"neli/{profile.name}/{seed}")
    world = World(profile.draw(random), random, Trace(write))
    report = Report(seeds=1)
    with report.judging(seed, world.say):
        _run(world)
    _account(world, report)
    return report


def _account(world: World, report: Report) -> None:
    report.simulated_s = world.now
    report.events = world.scheduler.events
    report.inductions = world.oracle.inductions
    report.leader_changes = world.oracle.leader_changes
    report.rebalances = world.coordinator.rebalances
    report.overlaps = world.oracle.overlaps
    report.longest_overlap_s = world.oracle.longest_overlap_s
    report.faults = world.hits
    report.facts = world.facts


def _run(world: World) -> None:
    for _ in range(world.scenario.processes):
        world.start()
    world.scheduler.run_until(1.2)
    _chaos(world)
    heal(world)
    settle(world)
    stay(world)


def _chaos(world: World) -> None:
    random, ends = world.random, world.now + world.scenario.chaos_s
    kinds = sorted(world.scenario.faults)
    weights = [_WEIGHTS.get(kind, 1.0) for kind in kinds]
    while kinds and world.now < ends:
        world.scheduler.run_until(world.now + random.expovariate(1.4))
        strike(world, random.choices(kinds, weights)[0])


def strike(world: World, fault: Fault) -> None:
    """Let a fault befall somebody whom it can befall."""
    random, settings = world.random, world.scenario.settings
    session_s = settings.session_timeout_s
    for_s = {
        Fault.PAUSE_SHORT: random.uniform(0.1, 0.9) * session_s,
        Fault.PAUSE_LONG: random.uniform(1.1, 2.5) * session_s,
        Fault.STUCK: random.uniform(1.05, 1.5) * settings.max_poll_interval_s,
        Fault.BROKER_RESTART: random.uniform(0.1, 1.0),
    }.get(fault, random.uniform(0.3, 2.5))
    process = None if fault in _OF_BROKER else random.choice(world.alive or [None])
    if fault in _OF_BROKER:
        if fault is not Fault.START or len(world.alive) < world.scenario.processes + 1:
            world.befall(fault, None, for_s)
    elif process is not None:
        world.befall(fault, process, for_s)


def heal(world: World) -> None:
    """End all faults, and see to it that somebody is there to lead."""
    world.heal()
    world.scheduler.run_until(world.now + 0.3)
    if not world.alive:
        world.start()


def settle(world: World, within_s: float = SETTLES_WITHIN_S) -> None:
    """Wait until every role has exactly one leader, which must be soon.

    What a fault has set going may still come after it is healed: a session that ends, a late request. A
    member that went by another partition count fails, and somebody starts it again.
    """
    ends = world.now + within_s
    quiet_since = max(world.now, world.late_until) + 1.2 * world.scenario.settings.session_timeout_s
    while True:
        world.scheduler.run_until(world.now + _LOOK_EVERY_S)
        if not world.alive:
            world.start()
        unsettled = world.unsettled()
        if unsettled is None and world.now > quiet_since:
            return
        if world.now >= ends:
            raise Violation("NE-6", f"{within_s:g} s after all was healed: {unsettled}")


def stay(world: World, for_s: float = STAYS_FOR_S) -> None:
    """Nothing happens any more, so no leadership begins or ends."""
    before = world.oracle.inductions
    ends = world.now + for_s
    while world.now < ends:
        world.scheduler.run_until(world.now + _LOOK_EVERY_S / 3)
        unsettled = world.unsettled()
        if unsettled is not None or world.oracle.inductions != before:
            raise Violation("NE-6", f"leadership changed although all was well: {unsettled}")


def exercised(report: Report, profile: Profile = ANYTHING) -> list[str]:
    """What runs should have exercised and did not: an oracle that saw nothing happen has proven nothing."""
    missing = []
    if report.inductions < report.seeds:
        missing.append(f"{report.seeds} seeds had {report.inductions} inductions only")
    if report.seeds < MIN_SEEDS_TO_JUDGE:
        return missing
    if report.leader_changes < report.seeds:
        missing.append(f"{report.seeds} seeds had {report.leader_changes} changes of a leader only")
    if not report.facts[FactKind.SUCCEEDS] and Mode.FAST in profile.modes:
        missing.append("no orderly hand-over ever spared the wait")
    return [*missing, *report.too_rare(profile.faults)]


def run_seeds(first: int, count: int, profile: Profile = ANYTHING) -> Report:
    """Run many seeds in this process."""
    return Report.of(run_seed(seed, profile) for seed in range(first, first + count))


def run_chunk(chunk: tuple[int, int, str]) -> Report:
    """``run_seeds`` for other processes: the first seed, how many, and the profile's name."""
    first, count, profile = chunk
    return run_seeds(first, count, PROFILES[profile])
