"""Runs: chaos, healing, and the demand that all is well soon and stays so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from rebalanser.core.shiva.messages import FactKind
from rebalanser.core.shiva.types import ApplicationId
from simulation.kernel.reports import MIN_SEEDS_TO_JUDGE, RunReport, Violation, command_to_replay
from simulation.kernel.trace import Trace, Write
from simulation.shiva.chaos import Chaos
from simulation.shiva.faults import Fault
from simulation.shiva.scenario import ANYTHING, PROFILES, Profile
from simulation.shiva.world import World

if TYPE_CHECKING:
    from rebalanser.core.shiva.types import SetAside
    from simulation.shiva.running import ApplicationProcess

SETTLES_WITHIN_S = 60.0
"""How long after healing all must be well: rounds, deadlines, restarts until what cannot run has failed."""
STAYS_FOR_S = 5.0
_LOOK_EVERY_S = 1.0
_STOPS_WITHIN_S = 1.5
"""How long what was asked to stop may still be there."""
_LOOKS = 2
_FOLLOWS_WITHIN_S = 1.5
"""How long it takes until a document says what has changed."""


@dataclass
class Report(RunReport[Fault, FactKind]):
    """What one run or many of them did and found."""

    documents: int = 0
    terms: int = 0
    starts: int = 0
    moves: int = 0
    kept: int = 0
    side_by_side: int = 0
    """Overlaps of mode ``available`` where a worker was cut off."""
    excused: int = 0
    """Overlaps where a clock had run off beyond the bound."""


def replay_command(seed: int, profile: Profile = ANYTHING) -> str:
    """The one command that shows a seed's run again."""
    return command_to_replay("shiva", seed, profile.name)


def run_seed(
    seed: int,
    profile: Profile = ANYTHING,
    write: Write | None = None,
    make_world: Callable[..., World] = World,
) -> Report:
    """Run one seed. Same seed, same run: in another process, with another hash seed, on another day."""
    random = Random(f"shiva/{profile.name}/{seed}")
    world = make_world(profile.draw(random), random, Trace(write))
    report = Report(seeds=1)
    with report.judging(seed, world.say):
        _run(world)
    _account(world, report)
    return report


def _account(world: World, report: Report) -> None:
    oracle = world.oracle
    report.simulated_s = world.now
    report.events = world.scheduler.events
    report.documents, report.terms = oracle.documents, oracle.terms
    report.starts, report.moves, report.kept = oracle.starts, oracle.moves, world.kept
    report.side_by_side, report.excused = oracle.side_by_side, oracle.excused
    report.faults, report.facts = world.hits, world.facts


def _run(world: World) -> None:
    chaos = Chaos(world)
    chaos.begin()
    world.run_for(world.scenario.chaos_s)
    chaos.end()
    heal(world)
    settle(world)
    stay(world)
    stop_in_vain(world)
    if world.random.random() < 0.5:
        change_leader(world)


def heal(world: World) -> None:
    """End all faults, and see to it that somebody leads and somebody can run something."""
    world.heal()
    world.run_for(_STOPS_WITHIN_S)
    for host in world.hosts:
        if host.plan.worker and any(
            h is not host and h.worker_id == host.worker_id and h.up for h in world.hosts
        ):
            continue
        needed = host.plan.leads or host is next((h for h in world.hosts if h.plan.worker), None)
        if not host.up and (needed or world.random.random() < 0.7):
            world.start(host)


def settle(world: World, within_s: float = SETTLES_WITHIN_S) -> None:
    """Wait until all is well (SH-2, SH-4, SH-5, SH-8, SH-11, SH-12, SH-15), which must be soon."""
    ends = world.now + within_s
    options = world.scenario.options
    world.run_for((options.missed_rounds + 1) * options.round_s)
    well = 0
    while well < _LOOKS:
        world.run_for(_LOOK_EVERY_S)
        unsettled = world.oracle.unsettled()
        well = 0 if unsettled else well + 1
        if unsettled and world.now >= ends:
            rule, _, sentence = unsettled.partition(": ")
            raise Violation(rule, f"{within_s:g} s after all was healed: {sentence}")


def stay(world: World, for_s: float = STAYS_FOR_S) -> None:
    """All is well and must stay so: nothing is published, started or stopped (SH-8).

    A start command that is written again has a new place, which the document says. A record that was set
    aside and no longer matters leaves it.
    """
    kept = world.kept
    world.run_for(_FOLLOWS_WITHIN_S)
    before, documents, aside = _told_and_running(world), world.oracle.documents, _set_aside(world)
    world.run_for(for_s)
    left = aside - _set_aside(world)
    if _set_aside(world) - aside:
        raise Violation("SH-8", f"a record was set aside although all was well: {_set_aside(world) - aside}")
    after = _told_and_running(world)
    for name in before:
        if before[name] != after[name]:
            raise Violation("SH-8", f"{name} changed although all was well: {before[name]} -> {after[name]}")
    if world.oracle.documents - documents > world.kept - kept + len(left):
        raise Violation("SH-8", "a document was published although all was well")


def stop_in_vain(world: World) -> None:
    """Stop what is not there: the client waits for a document that has read its command (SH-18)."""
    world.clients.stop(ApplicationId("t", "c", "never"))
    settle(world)


def _told_and_running(world: World) -> dict[str, object]:
    document = world.status()
    state: dict[str, object] = {"starts": world.oracle.starts, "processes": _running(world)}
    if document is not None:
        state["workers"] = document.workers
        for application, entry in document.applications.items():
            state[str(application)] = replace(entry, offset=0, timestamp_ms=0)
    return state


def _set_aside(world: World) -> set[SetAside]:
    document = world.status()
    return set(document.set_aside) if document is not None else set()


def change_leader(world: World) -> None:
    """Only the leader changes: no application is restarted for that (SH-9).

    Should the group share its partition out once more before the next leader has led, as when that one leaves
    and comes back, nobody may answer the workers for so long that what is exclusive has to end (SH-14).
    """
    terms, starts, before = world.oracle.terms, world.oracle.starts, _processes(world)
    if world.leader is None:
        raise Violation("SH-9", "nobody leads although all was well")
    world.hit(Fault.KICK, "the group shares its partition out anew, although all is well")
    world.group.kick()
    world.run_for(3 * world.scenario.options.round_s + world.deadline_s)
    if world.oracle.terms == terms or world.leader is None:
        raise Violation("SH-9", "nobody took over")
    after, once = _processes(world), world.oracle.terms == terms + 1
    ended = [process for process in before if process not in after]
    may_end = [] if once else [process for process in ended if process.exclusive]
    if ended != may_end or world.oracle.starts - starts > len(may_end):
        raise Violation("SH-9", "a mere change of the leader started or stopped applications")
    settle(world)


def _running(world: World) -> list[tuple[str, int]]:
    return sorted((process.host.plan.name, process.run) for process in _processes(world))


def _processes(world: World) -> list[ApplicationProcess]:
    return [process for processes in world.oracle.running.values() for process in processes]


def exercised(report: Report, profile: Profile = ANYTHING) -> list[str]:
    """What runs should have exercised and did not: an oracle that saw nothing happen has proven nothing."""
    missing = []
    if report.starts < report.seeds:
        missing.append(f"{report.seeds} seeds started {report.starts} processes only")
    if report.seeds < MIN_SEEDS_TO_JUDGE:
        return missing
    if report.terms < report.seeds:
        missing.append(f"{report.seeds} seeds had {report.terms} terms only")
    if report.moves < report.seeds * 0.2:
        missing.append(f"{report.seeds} seeds moved {report.moves} applications only")
    return [*missing, *report.too_rare(profile.faults)]


def run_seeds(first: int, count: int, profile: Profile = ANYTHING) -> Report:
    """Run many seeds in this process."""
    return Report.of(run_seed(seed, profile) for seed in range(first, first + count))


def run_chunk(chunk: tuple[int, int, str]) -> Report:
    """``run_seeds`` for other processes: the first seed, how many, and the profile's name."""
    first, count, profile = chunk
    return run_seeds(first, count, PROFILES[profile])
