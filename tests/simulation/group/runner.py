"""Runs: chaos, healing, and the demand that all is well soon and stays so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rebalanser.core.group.messages import FactKind
from simulation.group.chaos import Chaos
from simulation.group.coverage import counting
from simulation.group.faults import FaultKind
from simulation.group.scenario import ANYTHING, PROFILES, Profile
from simulation.group.world import OnFact, World
from simulation.kernel.reports import MIN_SEEDS_TO_JUDGE, RunReport, Violation, command_to_replay
from simulation.kernel.trace import Trace, Write

SETTLES_WITHIN_S = 25.0
"""How long after healing all must be well: leases that end, late requests, rejoining, a few rebalances."""
STAYS_FOR_S = 1.5
_LOOK_EVERY_S = 0.4


@dataclass
class Report(RunReport[FaultKind, FactKind]):
    """What one run or many of them did and found."""

    rebalances: int = 0
    versions: int = 0
    leader_changes: int = 0
    writes: int = 0
    stale_writes: int = 0
    excused: int = 0
    met: Counter[str] = field(default_factory=Counter)
    """How each command ended, and each transition of the tables: how often."""


def replay_command(seed: int, profile: Profile = ANYTHING) -> str:
    """The one command that shows a seed's run again."""
    return command_to_replay("group", seed, profile.name)


def run_seed(
    seed: int,
    profile: Profile = ANYTHING,
    write: Write | None = None,
    on_fact: OnFact | None = None,
    make_world: Callable[..., World] = World,
) -> Report:
    """Run one seed. Same seed, same run: in another process, with another hash seed, on another day."""
    random = Random(f"{profile.name}/{seed}")
    world = make_world(profile.draw(random), random, Trace(write), on_fact)
    report = Report(seeds=1)
    with report.judging(seed, world.say), counting(world.met):
        _run(world)
    _account(world, report)
    return report


def _account(world: World, report: Report) -> None:
    report.simulated_s = world.now
    report.events = world.scheduler.events
    for group in world.groups:
        oracle = group.oracle
        report.rebalances += group.facts[FactKind.REBALANCE_COMPLETED]
        report.versions += oracle.headers
        report.leader_changes += max(0, oracle.leader_changes - 1)
        report.writes += oracle.writes
        report.stale_writes += oracle.stale_writes
        report.excused += oracle.excused
        report.faults += group.hits
        report.facts += group.facts
        report.met += group.met


def _run(world: World) -> None:
    if world.scenario.neighbour is not None:
        World(world.scenario.neighbour, world.random, world.trace, beside=world)
    groups, ends = world.groups, world.now + world.scenario.chaos_s
    chaos = [Chaos(group) for group in groups]
    for each in chaos:
        each.begin()
    while world.now < ends:
        world.run_for(min(_LOOK_EVERY_S, ends - world.now))
        if world.scenario.live_within_s is not None:
            world.check_alive(world.scenario.live_within_s)
    for each in chaos:
        each.end()
    for step in (heal, settle, stay):
        for group in groups:
            step(group)


def heal(world: World) -> None:
    """End all faults, and see to it that somebody is there to own resources."""
    world.heal()
    for host in world.hosts:
        if host.running is None and world.random.random() < 0.7:
            world.start(host)
    first = world.hosts[0]
    if first.running is None or first.running.stopping:
        world.crash(first)
        world.start(first)


def settle(world: World, within_s: float = SETTLES_WITHIN_S) -> None:
    """Wait until all is well (RB-2, RB-3, RB-19), which must be soon.

    What a fault has set going may still come after it is healed: a node that was cut off notices up to a
    lease later. So all must be well after that, and still be when a rebalance that was held back is over.
    """
    timings = world.scenario.timings
    within_s += world.improves_within_s()
    ends = world.now + within_s
    aftermath_ends = world.now + timings.lease_ttl_s
    while True:
        world.run_for(_LOOK_EVERY_S)
        unsettled = world.unsettled()
        quiet_since = max(aftermath_ends, world.network.late_until + _LOOK_EVERY_S)
        if unsettled is None and world.now > quiet_since:
            world.run_for(timings.settle_time_s + timings.min_rebalance_interval_s)
            unsettled = world.unsettled()
            if unsettled is None:
                return
        if world.now >= ends:
            rule, _, sentence = (unsettled or "RB-3: late requests were under way").partition(": ")
            raise Violation(rule, f"{within_s:g} s after all was healed: {sentence}")


def stay(world: World, for_s: float = STAYS_FOR_S) -> None:
    """All is well and must stay so: no change of the registry, no handler called (RB-3, RB-10).

    What nodes still have to find out they may ask, for a while; in the end they send heartbeats only (RB-7).
    """
    policy = world.operations.policy
    for_s += policy.move_interval_s + policy.cooldown_s
    ends = world.now + SETTLES_WITHIN_S + 2 * for_s
    before = (world.store.revision, world.oracle.handler_calls, world.oracle.headers)
    while True:
        asked = _asked(world)
        world.run_for(for_s)
        if (world.store.revision, world.oracle.handler_calls, world.oracle.headers) != before:
            raise Violation("RB-3", "something changed although all was well")
        if _asked(world) == asked:
            return
        if world.now >= ends:
            raise Violation("RB-7", f"{_asked(world) - asked} sent although all was well")


def _asked(world: World) -> Counter[str]:
    return Counter({command: count for command, count in world.commands.items() if command != "Heartbeat"})


def exercised(report: Report, profile: Profile = ANYTHING) -> list[str]:
    """What runs should have exercised and did not: an oracle that saw nothing happen has proven nothing.

    Rebalances and faults must have come often enough, and leader changes where leaders fail; a batch too
    small for that is judged by its rebalances alone.
    """
    missing = []
    if report.rebalances < report.seeds:
        missing.append(f"{report.seeds} seeds completed {report.rebalances} rebalances only")
    if report.seeds < MIN_SEEDS_TO_JUDGE:
        return missing
    if profile is not ANYTHING:
        return [*missing, *report.too_rare(profile.faults)]
    if report.leader_changes < report.seeds * 0.2:
        missing.append(f"{report.seeds} seeds had {report.leader_changes} changes of the leader only")
    if not report.stale_writes:
        missing.append("no stale write was ever refused")
    return [*missing, *report.too_rare([*profile.faults, FaultKind.KILLED_BY_GUARD])]


def run_seeds(first: int, count: int, profile: Profile = ANYTHING) -> Report:
    """Run many seeds in this process. A run that had no rebalance at all is a violation of its own."""
    total = Report()
    for seed in range(first, first + count):
        report = run_seed(seed, profile)
        if not report.versions and not report.violations:
            report.violations.append((seed, "exercise", f"seed {seed} published no allocation"))
        total.add(report)
    return total


def run_chunk(chunk: tuple[int, int, str]) -> Report:
    """``run_seeds`` for other processes: the first seed, how many, and the profile's name."""
    first, count, profile = chunk
    return run_seeds(first, count, PROFILES[profile])
