"""What can go wrong with the claims of tasks and their updates; and what only looks like it."""

from __future__ import annotations

from typing import Final

from rebalanser.history import SkuldKind
from support.histories.ownership import neighbours, strangers
from support.histories.planted import TASKS, Defect, Drama, Planted, finding
from support.histories.world import Process, World


def _update(world: World, worker: Process, task: str, token: int, number: int) -> None:
    world.after(0.05, 1.0)
    world.write(worker, SkuldKind.UPDATED, resource=task, token=token, revision=world.commit(), value=number)


def claimed_twice(world: World) -> tuple[Planted, ...]:
    """Two workers hold one claim number, one after the other (SK-6)."""
    first, second = strangers(world)
    task = world.resource()
    token = world.take(first, task, claim=0)
    world.after(0.5, 3.0)
    world.stop(first, task, token)
    world.after(1.5, 5.0)
    world.take(second, task, claim=0)
    return (finding(world, Defect.CLAIM_TWICE, task),)


def claimed_twice_at_once(world: World) -> tuple[Planted, ...]:
    """Two workers hold one claim number at the same time (SK-6)."""
    first, second = neighbours(world)
    task = world.resource()
    token = world.take(first, task, claim=0)
    world.after(0.5, 3.0)
    heir = world.take(second, task, claim=0)
    world.after(0.5, 3.0)
    world.stop(first, task, token)
    world.after(0.5, 3.0)
    world.stop(second, task, heir)
    return (finding(world, Defect.CLAIM_TWICE, task), finding(world, Defect.OVERLAP, task))


def update_left_out(world: World) -> tuple[Planted, ...]:
    """An update's number is left out and the next one accepted (SK-9)."""
    worker = world.process(world.rng.choice(world.hosts))
    task = world.resource()
    token = world.take(worker, task)
    count = world.rng.randint(2, 90)
    skipped = world.rng.randrange(count - 1)
    for number in range(count):
        if number != skipped:
            _update(world, worker, task, token, number)
    if world.rng.random() < 0.5:
        world.stop(worker, task, token)
    return (finding(world, Defect.UPDATE_GAP, task),)


def updates_of_each_claim(world: World) -> tuple[Planted, ...]:
    """Every claim numbers its updates from 0, and resends some: a near miss (SK-9)."""
    task = world.resource()
    for worker in strangers(world):
        token = world.take(worker, task)
        for number in (0, 1, 1, 2, 2, 2, 3):
            _update(world, worker, task, token, number)
        world.stop(worker, task, token)
        world.after(1.5, 5.0)
    return ()


def stale_update(world: World) -> tuple[Planted, ...]:
    """A write of a claim arrives late, after the next claim's begin, and is accepted (SK-10)."""
    first, second = strangers(world)
    task = world.resource()
    token = world.take(first, task)
    _update(world, first, task, token, 0)
    world.stop(first, task, token)
    world.after(1.5, 5.0)
    world.take(second, task)
    world.after(1.5, 5.0)
    kind, number = world.rng.choice([(SkuldKind.UPDATED, 1), (SkuldKind.COMPLETED, None)])
    world.write(first, kind, resource=task, token=token, revision=world.commit(), value=number)
    return (finding(world, Defect.STALE_WRITE, task),)


def stale_write_refused(world: World) -> tuple[Planted, ...]:
    """A write of a superseded claim is refused: a near miss (SK-10)."""
    first, second = strangers(world)
    task = world.resource()
    token = world.take(first, task)
    _update(world, first, task, token, 0)
    world.stop(first, task, token)
    world.after(1.5, 5.0)
    heir = world.take(second, task)
    world.after(1.5, 5.0)
    world.write(first, SkuldKind.FENCED, resource=task, token=token, revision=world.commit())
    _update(world, second, task, heir, 0)
    return ()


DRAMAS: Final = (
    Drama(claimed_twice, TASKS),
    Drama(claimed_twice_at_once, TASKS),
    Drama(update_left_out, TASKS),
    Drama(updates_of_each_claim, TASKS),
    Drama(stale_update, TASKS),
    Drama(stale_write_refused, TASKS),
)
