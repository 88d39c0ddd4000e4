"""Steps left out or taken in the wrong order, and terms with two leaders."""

from __future__ import annotations

from typing import Final

from rebalanser.core.group.messages import FactKind as GroupKind
from rebalanser.history import Protocol
from support.histories.ownership import neighbours, strangers
from support.histories.planted import BARRIERS, Defect, Drama, Planted, finding
from support.histories.world import ELECTED, World


def start_without_any_barrier(world: World) -> tuple[Planted, ...]:
    """OnStart is entered and the barrier was never added."""
    process = world.process(world.rng.choice(world.hosts))
    resource, token = world.resource(), world.commit()
    world.after(0.5, 3.0)
    world.start(process, resource, token)
    world.after(1.0, 5.0)
    if world.rng.random() < 0.5:
        world.stop(process, resource, token)
    return (finding(world, Defect.START_WITHOUT_BARRIER, resource),)


def start_before_its_barrier(world: World) -> tuple[Planted, ...]:
    """OnStart is entered before the barrier is added."""
    process = world.process(world.rng.choice(world.hosts))
    resource, token = world.resource(), world.commit()
    world.after(0.5, 3.0)
    world.write(process, GroupKind.START_ENTERED, resource=resource, token=token)
    world.after(0.001, 0.5)
    world.add_barrier(process, resource, token)
    world.after(0.001, 0.5)
    world.write(process, GroupKind.START_RETURNED, resource=resource, token=token)
    world.after(1.0, 5.0)
    if world.rng.random() < 0.5:
        world.give(process, resource, token)
    return (finding(world, Defect.START_WITHOUT_BARRIER, resource),)


def barrier_removed_before_stopped(world: World) -> tuple[Planted, ...]:
    """The barrier is removed while OnStop runs; nobody else comes before it returns."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    token = world.take(process, resource)
    world.after(1.0, 5.0)
    if world.rng.random() < 0.5:
        world.write(process, GroupKind.STOP_ENTERED, resource=resource, token=token)
        world.remove_barrier(process, resource, token)
        world.after(0.001, 1.0)
        world.write(process, GroupKind.STOP_RETURNED, resource=resource, token=token)
    else:
        world.remove_barrier(process, resource, token)
        world.stop(process, resource, token)
    return (finding(world, Defect.STEP_ORDER, resource),)


def removal_asked_for_before_stopped(world: World) -> tuple[Planted, ...]:
    """The removal is asked for while OnStop runs; it is answered only after OnStop has returned."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    token = world.take(process, resource)
    world.after(1.0, 5.0)
    world.write(process, GroupKind.STOP_ENTERED, resource=resource, token=token)
    sent = world.after(0.001, 1.0)
    world.after(0.001, 1.0)
    world.write(process, GroupKind.STOP_RETURNED, resource=resource, token=token)
    world.remove_barrier(process, resource, token, sent=sent)
    return (finding(world, Defect.STEP_ORDER, resource),)


def next_owner_before_removal_is_answered(world: World) -> tuple[Planted, ...]:
    """The same, and the next owner begins before OnStop returned, though no record is out of order."""
    first, second = neighbours(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(1.0, 5.0)
    world.write(first, GroupKind.STOP_ENTERED, resource=resource, token=token)
    sent, removed = world.after(0.001, 0.5), world.commit()
    world.after(0.001, 0.05)
    world.take(second, resource)
    world.after(0.001, 0.5)
    world.write(first, GroupKind.STOP_RETURNED, resource=resource, token=token)
    world.remove_barrier(first, resource, token, removed, sent=sent)
    return (finding(world, Defect.STEP_ORDER, resource), finding(world, Defect.OVERLAP, resource))


def barrier_removed_though_onstop_raised(world: World) -> tuple[Planted, ...]:
    """OnStop raised, and the barrier is removed all the same (RB-24)."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    token = world.take(process, resource)
    world.after(1.0, 5.0)
    world.fail_to_stop(process, resource, token)
    world.remove_barrier(process, resource, token)
    return (finding(world, Defect.STEP_ORDER, resource),)


def no_barrier_though_one_was_left(world: World) -> tuple[Planted, ...]:
    """The next owner adds no barrier before the former one has removed its own: only one ever stood."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(1.0, 5.0)
    world.stop(first, resource, token)
    heir = world.commit()
    world.after(2.0, 5.0)
    world.start(second, resource, heir)
    world.after(1.0, 5.0)
    world.remove_barrier(first, resource, token)
    return (finding(world, Defect.START_WITHOUT_BARRIER, resource),)


def barrier_removed_and_never_stopped(world: World) -> tuple[Planted, ...]:
    """The barrier is removed and OnStop never returned."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    token = world.take(process, resource)
    world.after(1.0, 5.0)
    if world.rng.random() < 0.5:
        world.write(process, GroupKind.STOP_ENTERED, resource=resource, token=token)
    world.remove_barrier(process, resource, token)
    return (finding(world, Defect.STEP_ORDER, resource),)


def next_owner_before_stopped(world: World) -> tuple[Planted, ...]:
    """The barrier is removed while OnStop runs, and the next owner begins before it returns."""
    first, second = neighbours(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(1.0, 5.0)
    world.write(first, GroupKind.STOP_ENTERED, resource=resource, token=token)
    world.remove_barrier(first, resource, token)
    world.after(0.001, 0.05)
    heir = world.take(second, resource)
    world.after(0.001, 100.0)
    world.write(first, GroupKind.STOP_RETURNED, resource=resource, token=token)
    world.after(0.1, 5.0)
    world.give(second, resource, heir)
    return (
        finding(world, Defect.STEP_ORDER, resource),
        finding(world, Defect.OVERLAP, resource),
    )


def stopped_but_barrier_lapsed(world: World) -> tuple[Planted, ...]:
    """OnStop returned and the barrier ended with the lease: a near miss (RB-21)."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(3.0, 5.0)
    world.write(first, GroupKind.ISOLATED, detail={"last_proof_s": 5.0})
    world.stop(first, resource, token)
    world.after(1.0, 5.0)
    world.take(second, resource)
    world.after(0.1, 3.0)
    world.write(first, GroupKind.SESSION_LOST)
    return ()


def barrier_never_used(world: World) -> tuple[Planted, ...]:
    """A newer allocation takes a resource away before OnStart was entered: a near miss (RB-14)."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.add_barrier(first, resource)
    world.after(0.01, 2.0)
    if world.rng.random() < 0.5:
        world.write(first, GroupKind.START_REFUSED, resource=resource, token=token)
    world.remove_barrier(first, resource, token)
    world.after(0.001, 0.5)
    world.take(second, resource)
    return ()


def two_leaders(world: World) -> tuple[Planted, ...]:
    """Two members are elected in one term (RB-5, SH-7)."""
    first, second = strangers(world)
    world.term += 1
    for leader in (first, second):
        leader.term = world.term
        world.write(leader, ELECTED[world.protocol], revision=world.commit())
        world.after(0.5, 5.0)
    return (finding(world, Defect.TWO_LEADERS, None),)


def leader_after_leader(world: World) -> tuple[Planted, ...]:
    """Two members lead, each its own term, the first not knowing yet that it leads no more: a near miss."""
    first, second = strangers(world)
    for leader in (first, second):
        world.term += 1
        leader.term = world.term
        world.write(leader, ELECTED[world.protocol], revision=world.commit())
        world.after(0.5, 5.0)
    world.note(first)
    return ()


_LED: Final = frozenset({Protocol.GROUP, Protocol.SHIVA})

DRAMAS: Final = (
    Drama(start_without_any_barrier, BARRIERS),
    Drama(start_before_its_barrier, BARRIERS),
    Drama(barrier_removed_before_stopped, BARRIERS),
    Drama(removal_asked_for_before_stopped, BARRIERS),
    Drama(next_owner_before_removal_is_answered, BARRIERS),
    Drama(barrier_removed_though_onstop_raised, BARRIERS),
    Drama(no_barrier_though_one_was_left, BARRIERS),
    Drama(barrier_removed_and_never_stopped, BARRIERS),
    Drama(next_owner_before_stopped, BARRIERS),
    Drama(stopped_but_barrier_lapsed, BARRIERS),
    Drama(barrier_never_used, BARRIERS),
    Drama(two_leaders, _LED),
    Drama(leader_after_leader, _LED),
)
