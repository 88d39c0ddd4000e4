"""Records that are missing, or there twice and different, and clocks that are hours apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rebalanser.core.group.messages import FactKind as GroupKind
from rebalanser.history import Protocol, Record, SkuldKind
from support.histories.ownership import UNOWNED_LIMIT_S, neighbours, strangers
from support.histories.planted import (
    BARRIERS,
    OWNERS,
    POSSIBLE,
    ROTATED,
    TASKS,
    Defect,
    Drama,
    Planted,
    finding,
)
from support.histories.world import NOTES, Process, World


def _gap(world: World, process: Process, first: int, last: int, reason: str) -> Planted:
    return Planted(Defect.GAP, world.group, process=process.name, first=first, last=last, reason=reason)


def _lose(world: World, process: Process, first: int, last: int) -> Planted:
    """Take the records of these numbers away, some sinks leaving a record that says so."""
    if world.rng.random() < 0.5:
        process.records = [r for r in process.records if not first <= r.sequence <= last]
        return _gap(world, process, first, last, "missing")
    return _record_gap(world, process, first, last)


def _record_gap(world: World, process: Process, first: int, last: int) -> Planted:
    reason = world.rng.choice(["ENOSPC: No space left on device", "the writer is too slow"])
    lost = {record.sequence: record for record in process.records if first <= record.sequence <= last}
    stand_in = Record.gap(lost[first], lost[last], dropped=len(lost), reason=reason)
    kept = [record for record in process.records if record.sequence not in lost]
    process.records = sorted([*kept, stand_in], key=lambda record: record.sequence)
    return _gap(world, process, first, last, reason)


def _chatter(world: World, process: Process, count: int) -> None:
    for _ in range(count):
        world.after(0.1, 2.0)
        world.note(process)


def gap_in_the_middle(world: World) -> tuple[Planted, ...]:
    """Records without meaning for any verdict are missing from the middle of an access."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    token = world.take(process, resource)
    _chatter(world, process, 1)
    first = len(process.records)
    _chatter(world, process, world.rng.choice([1, 2, 63, 64, 65, 130]))
    last = len(process.records) - 1
    _chatter(world, process, 1)
    world.give(process, resource, token)
    return (_lose(world, process, first, last),)


def two_gaps(world: World) -> tuple[Planted, ...]:
    """Records are missing from two places of one process."""
    process = world.process(world.rng.choice(world.hosts))
    _chatter(world, process, world.rng.randint(80, 200))
    last = len(process.records) - 1
    cut = world.rng.randrange(5, last - 5)
    one = _lose(world, process, world.rng.randrange(1, cut - 1), cut - 1)
    return (one, _lose(world, process, cut + 1, world.rng.randrange(cut + 1, last)))


def beginning_rotated_away(world: World) -> tuple[Planted, ...]:
    """The oldest file of a process is not there any more, and with it the start of an access."""
    first, second = neighbours(world)
    resource = world.resource()
    _chatter(world, first, world.rng.randint(0, 100))
    token = world.take(first, resource)
    _chatter(world, first, world.rng.randint(1, 5))
    begins = len(first.records)
    world.give(first, resource, token)
    world.after(1.0, 5.0)
    world.take(second, resource)
    first.records = first.records[begins:]
    return (_gap(world, first, 0, begins - 1, ROTATED),)


def gap_hides_a_barrier(world: World) -> tuple[Planted, ...]:
    """The record of a barrier is missing: OnStart may have been entered without it, or not."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    _chatter(world, process, 2)
    token = world.take(process, resource)
    _chatter(world, process, 2)
    world.give(process, resource, token)
    at = next(r.sequence for r in process.records if r.kind == GroupKind.BARRIER_ADDED)
    before = at - world.rng.randint(0, 1)
    found = finding(world, Defect.START_WITHOUT_BARRIER, resource, POSSIBLE, behind_gap=True)
    return (found, _lose(world, process, before, at))


def gap_hides_an_end(world: World) -> tuple[Planted, ...]:
    """The record of OnStop's return is missing, and the next owner begins while the node still writes."""
    first, second = neighbours(world)
    resource = world.resource()
    token = world.take(first, resource)
    _chatter(world, first, 2)
    lost = len(first.records)
    world.stop(first, resource, token)
    last = len(first.records) - 1
    world.after(1.0, 3.0)
    heir = world.take(second, resource)
    _chatter(world, first, 3)
    world.give(second, resource, heir)
    found = finding(world, Defect.OVERLAP, resource, POSSIBLE, behind_gap=True)
    return (found, _lose(world, first, lost, last))


def gap_hides_an_update(world: World) -> tuple[Planted, ...]:
    """The record of an update is missing: its number may have been left out, or not."""
    worker = world.process(world.rng.choice(world.hosts))
    task = world.resource()
    token = world.take(worker, task)
    for number in range(4):
        world.after(0.1, 1.0)
        world.write(
            worker, SkuldKind.UPDATED, resource=task, token=token, revision=world.commit(), value=number
        )
    lost = len(worker.records) - world.rng.randint(2, 4)
    found = finding(world, Defect.UPDATE_GAP, task, POSSIBLE, behind_gap=True)
    return (found, _lose(world, worker, lost, lost))


def told_differently(world: World) -> tuple[Planted, ...]:
    """Two different records have one name: a process was restored from a snapshot and ran on, say."""
    process = world.process(world.rng.choice(world.hosts))
    _chatter(world, process, world.rng.randint(3, 10))
    told = world.rng.choice(process.records)
    changes: Mapping[str, object] = world.rng.choice(
        [
            {"wall_time": told.wall_time + world.rng.choice([0.001, 3600.0])},
            {"term": told.term + 1},
            {"resource": world.resource()},
            {"detail": {"error": "another story"}},
        ]
    )
    process.records.append(told.model_copy(update=changes))
    return (finding(world, Defect.CONFLICT, None),)


def clock_hours_off(world: World) -> tuple[Planted, ...]:
    """One host's clock is hours from the other's, as is seen where one acts on what the other did."""
    off_s = world.rng.choice([-1.0, 1.0]) * world.rng.uniform(3600.0, 4 * 3600.0)
    strange, usual = world.host(off_s), world.host()
    behind, ahead = (strange, usual) if off_s < 0 else (usual, strange)
    first, second = world.process(ahead), world.process(behind)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 20.0)
    world.give(first, resource, token)
    world.after(0.01, 1.0)
    token = world.take(second, resource)
    world.after(2.0, 20.0)
    world.give(second, resource, token)
    return (Planted(Defect.CLOCK, world.group, hosts=(behind.name, ahead.name)),)


def owned_through_a_gap(world: World) -> tuple[Planted, ...]:
    """All records of an access are missing: its resource seems unowned, and need not have been."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 5.0)
    world.give(first, resource, token)
    lost = len(first.records)
    world.after(2.0, 5.0)
    token = world.take(first, resource)
    world.after(UNOWNED_LIMIT_S * 2, UNOWNED_LIMIT_S * 5)
    world.give(first, resource, token)
    last = len(first.records) - 1
    _chatter(world, first, 1)
    world.take(second, resource)
    found = finding(world, Defect.UNOWNED, resource, POSSIBLE, behind_gap=True)
    return (found, _lose(world, first, lost, last))


_NEUTRAL: Final = frozenset(NOTES)

DRAMAS: Final = (
    Drama(gap_in_the_middle, _NEUTRAL),
    Drama(two_gaps, _NEUTRAL),
    Drama(beginning_rotated_away, OWNERS),
    Drama(gap_hides_a_barrier, BARRIERS),
    Drama(gap_hides_an_end, OWNERS),
    Drama(gap_hides_an_update, TASKS),
    Drama(told_differently, OWNERS),
    Drama(clock_hours_off, BARRIERS),
    Drama(owned_through_a_gap, frozenset({Protocol.GROUP})),
)
