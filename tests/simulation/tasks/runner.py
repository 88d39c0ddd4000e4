"""Runs: chaos, healing, and the check that all tasks are soon completed that can be."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rebalanser.core.tasks.model import CLOSED_UNDONE, AfterFailure, Status, TaskId
from simulation.kernel.reports import MIN_SEEDS_TO_JUDGE, RunReport, Violation, command_to_replay
from simulation.kernel.trace import Trace, Write
from simulation.tasks.scenario import ANYTHING, OF_REQUESTS, PROFILES, Fault, Profile
from simulation.tasks.ticking import SCHEDULE, tick_of
from simulation.tasks.working import PLAIN
from simulation.tasks.world import CALMS_S, World

SETTLES_WITHIN_S = 90.0
"""Seconds after healing until all is complete: some dozen tasks, some with an abandoned claim."""
_LOOK_EVERY_S = 0.5
IDLE_S = 0.3
"""Maximum seconds that a task is ready while a worker is idle, once all is quiet."""
_BURST = 12
_BURST_S = 6.0
_TICK_S = 0.05
_PAUSED_S = 2.0
_TICKS_S = 8.0
_STRIKES = tuple(fault for fault in Fault if fault not in set(OF_REQUESTS) | {Fault.COLLECT})


@dataclass
class Report(RunReport[Fault, str]):
    """Result of one run or of many, with the facts that the oracle has counted."""


def replay_command(seed: int, profile: Profile = ANYTHING) -> str:
    """Command that repeats a seed's run with its trace."""
    return command_to_replay("tasks", seed, profile.name)


def run_seed(seed: int, profile: Profile = ANYTHING, write: Write | None = None) -> Report:
    """Run one seed. Equal seeds run equally, also in another process and with another hash seed."""
    random = Random(f"tasks/{profile.name}/{seed}")
    report = Report(seeds=1)
    trace = Trace(write)
    world = World(profile.draw(random), random, trace)
    with report.judging(seed, world.say):
        _run(world)
    report.simulated_s = world.now
    report.events = world.scheduler.events
    report.faults = world.hits
    report.facts = world.oracle.counts
    return report


def _run(world: World) -> None:
    _chaos(world)
    world.heal()
    if world.is_ticking:
        _tick(world)
    _settle(world)
    if world.pools or world.servers:
        _burst(world)
    if world.has_pauses:
        _pause(world)
    world.oracle.are_spooled_made()
    world.oracle.are_logs_whole(world.engine.tasks, world.engine.update_at)


def _chaos(world: World) -> None:
    random, kinds = world.random, [fault for fault in _STRIKES if fault in world.scenario.faults]
    while world.now < world.scenario.chaos_s:
        world.scheduler.run_until(world.now + random.expovariate(world.scenario.strikes_per_s))
        if kinds:
            world.befall(random.choice(kinds))


def _burst(world: World) -> None:
    """Add tasks once all is quiet: no worker may be idle while one of them is ready (SK-20)."""
    world.scheduler.run_until(world.now + CALMS_S)
    for producer in world.producers:
        producer.make(_BURST)
    ready_since: dict[tuple[TaskId, int], float] = {}
    ends = world.now + _BURST_S
    while world.now < ends:
        world.scheduler.run_until(world.now + _TICK_S)
        _judge_idle(world, ready_since)
    _settle(world)
    world.scheduler.run_until(world.now + CALMS_S)
    for each in (*world.pools, *world.servers):
        for trouble in each.failures.troubles():
            raise Violation("SK-19", f"{each.name} says that it fails, and nothing does: {trouble}")


def _tick(world: World) -> None:
    """Judge once all is quiet that each tick has its task, unless its schedule is paused (SK-15, SK-23).

    Meanwhile a partition changes its owner, and the store takes no writes for some seconds.
    """
    world.scheduler.run_until(world.now + CALMS_S + 1.0)
    began = world.now
    world.scheduler.run_until(began + 1.0)
    world.assign(0, is_told=True)
    world.scheduler.run_until(began + 2.0)
    world.network.refuse(Fault.LOCKED, world.now + 2.5)
    world.scheduler.run_until(began + _TICKS_S)
    _judge_ticks(world, began, world.now - 1.0)
    paused_at = world.now
    world.operator.pause(_TICKS_S, PLAIN)
    world.scheduler.run_until(paused_at + 2 * _TICKS_S)
    for tick in _ticks(paused_at + 1.0, paused_at + _TICKS_S - 1.0):
        if world.oracle.exists(SCHEDULE.task_id(tick)):
            raise Violation("SK-23", f"the tick {tick} is enqueued, and its schedule is paused")
    _judge_ticks(world, paused_at + _TICKS_S + 1.0, world.now - 1.0)
    world.is_ticking = False


def _ticks(after: float, until: float) -> list[int]:
    """Return the ticks between two true times."""
    first, last = tick_of(after), tick_of(until)
    return list(range(first + 2, last + 1, 2))


def _judge_ticks(world: World, after: float, until: float) -> None:
    for tick in _ticks(after, until):
        task = SCHEDULE.task_id(tick)
        world.oracle.counts["looks at ticks"] += 1
        if not world.oracle.exists(task) and task not in world.left_out:
            raise Violation("SK-15", f"the tick {tick} has no task")


def _pause(world: World) -> None:
    """Pause the queue while tasks come: claims not begun are given back, and all goes on later (SK-23)."""
    for producer in world.producers:
        producer.make(_BURST)
    world.scheduler.run_until(world.now + 1.0)
    world.operator.pause(_PAUSED_S)
    ready_since: dict[tuple[TaskId, int], float] = {}
    ends = world.now + _PAUSED_S + _BURST_S
    was_paused = False
    while world.now < ends:
        world.scheduler.run_until(world.now + _TICK_S)
        paused_at = world.oracle.paused_at
        if (paused_at is not None) is not was_paused:
            ready_since.clear()
            was_paused = paused_at is not None
        _judge_idle(world, ready_since)
        if paused_at is not None and world.now > paused_at + IDLE_S:
            for pool in world.pools:
                pool.judge_paused()
    _settle(world)


def _judge_idle(world: World, ready_since: dict[tuple[TaskId, int], float]) -> None:
    """Judge that no task waits without a reason; ``ready_since`` has when it was first seen so."""
    idle_since = min((pool.idle_since for pool in world.pools), default=world.now)
    for task, stored in world.engine.tasks.items():
        claim = stored.state.claim
        if stored.state.status is not Status.CLAIMED:
            claim = None
        if claim is not None and any(pool.lacks(claim) for pool in world.pools):
            since = ready_since.setdefault((task, stored.revision), world.now)
            if world.now - since > IDLE_S:
                raise Violation("SK-20", f"task {task} is claimed for {claim}, and its worker lacks that")
        elif claim is not None:
            ready_since.pop((task, stored.revision), None)
        if not world.is_ready(stored):
            continue
        waits_since = min((each.waits_since(stored.head.name) for each in world.servers), default=world.now)
        since = max(min(idle_since, waits_since), ready_since.setdefault((task, stored.revision), world.now))
        world.oracle.counts["looks at ready tasks"] += 1
        if world.now - since > IDLE_S:
            raise Violation("SK-20", f"task {task} is ready, and a worker is idle, since {since:.3f}")


def _settle(world: World) -> None:
    ends = world.now + SETTLES_WITHIN_S
    while (unsettled := _unsettled(world)) is not None:
        if world.now > ends:
            raise Violation("SK-17", f"{SETTLES_WITHIN_S:g} s after all was healed: {unsettled}")
        world.scheduler.run_until(world.now + _LOOK_EVERY_S)


def _unsettled(world: World) -> str | None:
    """Return what is still wrong; None if all spooled tasks exist, and all are complete that can be."""
    for outbox in world.outboxes:
        if outbox.spooled or outbox.to_make:
            return f"outbox {outbox.number} holds {len(outbox.spooled)} tasks, {outbox.to_make} are to come"
    for producer in world.producers:
        if producer.enqueueing:
            return f"{producer.name} can't enqueue what it enqueues together"
    completable: dict[TaskId, bool] = {}
    for task in world.oracle.tasks():
        if task not in world.oracle.completed and _is_completable(world, task, completable):
            return f"task {task} could be completed and is not"
        if _fails_for_ever(world, task):
            return f"task {task} waits for what is dead, and is to fail with it"
    return None


def _is_dead_for_ever(world: World, task: TaskId) -> bool:
    """True if a task is dead or cancelled that no operator requeues."""
    stored = world.engine.tasks.get(task)
    return stored is not None and stored.head.name != PLAIN and stored.state.status in CLOSED_UNDONE


def _fails_for_ever(world: World, task: TaskId) -> bool:
    stored = world.engine.tasks.get(task)
    return (
        stored is not None
        and stored.head.name != PLAIN
        and stored.head.after_failure is AfterFailure.FAIL
        and stored.state.status is Status.WAITING
        and any(_is_dead_for_ever(world, needed) for needed in stored.head.after)
    )


def _is_completable(world: World, task: TaskId, known: dict[TaskId, bool]) -> bool:
    if task in world.oracle.completed:
        return True
    if task not in known:
        if not world.oracle.exists(task) or task in world.oracle.hopeless | world.oracle.closed_gone:
            known[task] = False
        else:
            head = world.oracle.task(task).head
            passes = head.after_failure is AfterFailure.RUN
            known[task] = head.name == PLAIN and all(
                _is_completable(world, needed, known) or (passes and _is_dead_for_ever(world, needed))
                for needed in head.after
            )
    return known[task]


def exercised(report: Report, profile: Profile = ANYTHING) -> list[str]:
    """Return what runs should have exercised and did not: an oracle that saw nothing proves nothing."""
    least: dict[str, float] = {"claims": 3, "completed": 2}
    if report.seeds >= MIN_SEEDS_TO_JUDGE:
        least |= {
            "claims for slots": 0.5,
            "claims of what was over": 1,
            "updates": 2,
            "stale accesses": 0.1,
            "enqueued twice": 0.2,
            "batches of several": 0.5,
        }
        if Fault.PAUSE_QUEUE in profile.faults:
            least |= {"pauses": 1, "refused: paused": 0.1}
        if Fault.FULL in profile.faults:
            least["kept"] = 1
            least["claims that failed"] = 1
        if Fault.TOO_LARGE in profile.faults:
            least["failed writes: RequestTooLarge"] = 0.2
        if profile.dependent_ratio >= 0.5:
            least |= {"runs after a failure": 0.05, "fails with a dependency": 0.05}
        if Fault.REPLY_LOST in profile.faults:
            least["forwarded again"] = 0.2
        if profile.is_collecting:
            least |= {"collected": 1, "dead or cancelled ones deleted": 0.1}
    missing = [
        f"{report.seeds} seeds had {report.facts[fact]} times only: {fact}"
        for fact, ratio in least.items()
        if report.facts[fact] < ratio * report.seeds
    ]
    if report.seeds < MIN_SEEDS_TO_JUDGE:
        return missing
    return [*missing, *report.too_rare(fault for fault in profile.faults if fault is not Fault.COLLECT)]


def run_seeds(first: int, count: int, profile: Profile = ANYTHING) -> Report:
    """Run several seeds in this process."""
    return Report.of(run_seed(seed, profile) for seed in range(first, first + count))


def run_chunk(chunk: tuple[int, int, str]) -> Report:
    """``run_seeds`` for other processes: the first seed, how many, and the profile's name."""
    first, count, profile = chunk
    return run_seeds(first, count, PROFILES[profile])
