"""Two owners at once, none for too long, tokens that go back; and what only looks like it."""

from __future__ import annotations

from typing import Final

from rebalanser.core.group.messages import FactKind as GroupKind
from rebalanser.history import UNLIMITED_S, Protocol
from support.histories.planted import (
    BARRIERS,
    CERTAIN,
    OWNERS,
    POSSIBLE,
    Defect,
    Drama,
    Planted,
    finding,
)
from support.histories.world import CLOCK_ERROR_S, LEASE_TTL_S, Process, World

UNOWNED_LIMIT_S: Final = 60.0
"""For how long a resource may be unowned by the audit's default."""
_OVERLAPS_S: Final = (0.001, 0.02, 0.3, 2.0, 30.0, 900.0, 7200.0, 40_000.0)
_SURELY_S: Final = (CLOCK_ERROR_S + 0.6, 5.0, 60.0, 3600.0, 40_000.0)


def neighbours(world: World) -> tuple[Process, Process]:
    """Two processes of one host: their times are of one clock."""
    host = world.rng.choice(world.hosts)
    return world.process(host), world.process(host)


def strangers(world: World) -> tuple[Process, Process]:
    """Two processes of different hosts, the first one's clock not behind the second one's."""
    first, second = sorted(world.rng.sample(world.hosts, 2), key=lambda host: -host.clock_error_s)
    return world.process(first), world.process(second)


def overtake(
    world: World,
    first: Process,
    second: Process,
    apparent_s: float,
    *,
    overlap_limit_s: float | None = None,
) -> str:
    """The first owner's lease ends and the second begins; by their clocks they overlap for ``apparent_s``."""
    resource = world.resource()
    world.after(0.5, 3.0)
    token = world.take(first, resource, overlap_limit_s=overlap_limit_s)
    ends = world.now + max(apparent_s, 0.0) + world.rng.uniform(5.0, 20.0)
    begins = ends - apparent_s + first.host.clock_error_s - second.host.clock_error_s
    world.stop(first, resource, token, ends=ends, overlap_limit_s=overlap_limit_s)
    world.now = begins - 0.004
    heir = world.add_barrier(second, resource)
    world.now = begins
    world.start(second, resource, heir, overlap_limit_s=overlap_limit_s)
    world.now = max(ends, world.now) + 1.0
    if world.rng.random() < 0.7:
        world.give(second, resource, heir)
    return resource


def overlap_on_one_host(world: World) -> tuple[Planted, ...]:
    """Two processes of one host own at once, if only for a millisecond."""
    resource = overtake(world, *neighbours(world), world.rng.choice(_OVERLAPS_S))
    return (finding(world, Defect.OVERLAP, resource),)


def overlap_beyond_clock_error(world: World) -> tuple[Planted, ...]:
    """Two hosts own at once, for longer than their clocks can explain."""
    resource = overtake(world, *strangers(world), world.rng.choice(_SURELY_S))
    return (finding(world, Defect.OVERLAP, resource),)


def overlap_within_clock_error(world: World) -> tuple[Planted, ...]:
    """By their clocks two hosts own at once, a lease having ended, but their clocks may explain it."""
    resource = overtake(world, *strangers(world), world.rng.uniform(0.02, CLOCK_ERROR_S - 0.05))
    return (finding(world, Defect.OVERLAP, resource, POSSIBLE),)


def handed_over_within_clock_error(world: World) -> tuple[Planted, ...]:
    """The same where the first stopped in good order, as far as its protocol tells: a near miss (AU-5)."""
    overtake(world, *strangers(world), world.rng.uniform(0.02, CLOCK_ERROR_S - 0.05))
    return ()


def tight_on_one_host(world: World) -> tuple[Planted, ...]:
    """The next owner begins a millisecond after the end on one clock: a near miss."""
    overtake(world, *neighbours(world), -world.rng.choice([0.001, 0.05, 1.0]))
    return ()


def close_on_two_hosts(world: World) -> tuple[Planted, ...]:
    """The next owner begins well after the lease's end on another host: a near miss."""
    overtake(world, *strangers(world), -world.rng.uniform(CLOCK_ERROR_S + 0.1, 3.0))
    return ()


def overlap_after_waking(world: World) -> tuple[Planted, ...]:
    """A process sleeps past its lease, wakes, and is killed before OnStop: its last record tells (RB-27)."""
    first, second = neighbours(world) if world.rng.random() < 0.5 else strangers(world)
    resource = world.resource()
    world.after(0.5, 3.0)
    world.take(first, resource)
    world.after(15.0, 40.0)
    token = world.take(second, resource)
    world.after(3.0, 20.0)
    world.note(first)
    world.after(1.0, 2.0)
    world.give(second, resource, token)
    return (finding(world, Defect.OVERLAP, resource),)


def refuted_by_revisions(world: World) -> tuple[Planted, ...]:
    """By their clocks two hosts may own at once; revisions say they did not: a near miss (AU-5)."""
    first, second = strangers(world)
    resource = world.resource()
    world.after(0.5, 3.0)
    token = world.take(first, resource)
    world.after(2.0, 20.0)
    world.give(first, resource, token)
    world.after(0.001, 0.005)
    token = world.take(second, resource)
    world.after(2.0, 10.0)
    world.give(second, resource, token)
    return ()


def killed_after_idling(world: World) -> tuple[Planted, ...]:
    """A process writes nothing for long and is killed: nobody knows for how long it owned (RB-2)."""
    first, second = strangers(world)
    resource = world.resource()
    world.take(first, resource)
    world.after(UNOWNED_LIMIT_S * 2, UNOWNED_LIMIT_S * 50)
    world.take(second, resource)
    return (finding(world, Defect.UNOWNED, resource, POSSIBLE),)


def overlap_within_its_limit(world: World) -> tuple[Planted, ...]:
    """Owners overlap no longer than the mode allows that the operator chose: a near miss (NE-6, SH-14)."""
    allowed_s = world.rng.choice([10.0, UNLIMITED_S])
    overtake(world, *neighbours(world), world.rng.uniform(0.1, 9.0), overlap_limit_s=allowed_s)
    return ()


def overlap_over_its_limit(world: World) -> tuple[Planted, ...]:
    """Owners overlap for longer than the mode allows that the operator chose."""
    resource = overtake(world, *neighbours(world), world.rng.uniform(10.1, 60.0), overlap_limit_s=10.0)
    return (finding(world, Defect.OVERLAP, resource),)


def three_owners(world: World) -> tuple[Planted, ...]:
    """A long access overlaps two short ones that follow each other: each pair is found."""
    host = world.rng.choice(world.hosts)
    long, short, last = world.process(host), world.process(host), world.process(host)
    resource = world.resource()
    first = world.take(long, resource)
    world.after(1.0, 5.0)
    second = world.take(short, resource)
    world.after(1.0, 5.0)
    world.give(short, resource, second)
    world.after(0.5, 2.0)
    third = world.take(last, resource)
    world.after(1.0, 5.0)
    world.stop(long, resource, first)
    world.after(1.0, 5.0)
    world.give(last, resource, third)
    overlap = finding(world, Defect.OVERLAP, resource)
    return (overlap, overlap)


def barrier_held_twice(world: World) -> tuple[Planted, ...]:
    """The registry gives a barrier away before its holder, whose access has ended, removed it."""
    first, second = neighbours(world) if world.rng.random() < 0.5 else strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.stop(first, resource, token)
    world.after(1.5, 4.0)
    heir = world.take(second, resource)
    world.after(0.1, 1.0)
    world.remove_barrier(first, resource, token)
    world.after(2.0, 10.0)
    world.give(second, resource, heir)
    return (finding(world, Defect.BARRIER_OVERLAP, resource),)


def barrier_and_access_twice(world: World) -> tuple[Planted, ...]:
    """The registry gives a barrier away while its holder works on."""
    first, second = neighbours(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    heir = world.take(second, resource)
    world.after(2.0, 10.0)
    world.give(first, resource, token)
    world.after(2.0, 10.0)
    world.give(second, resource, heir)
    return (
        finding(world, Defect.OVERLAP, resource),
        finding(world, Defect.BARRIER_OVERLAP, resource),
    )


def token_goes_back(world: World) -> tuple[Planted, ...]:
    """A later owner has a smaller token, or the same one."""
    first, second = neighbours(world) if world.rng.random() < 0.5 else strangers(world)
    resource = world.resource()
    smaller = world.commit()
    token = world.take(first, resource)
    world.after(5.0, 20.0)
    world.stop(first, resource, token)
    world.after(2.0, 10.0)
    same = world.rng.random() < 0.5 and world.protocol is not Protocol.SKULD
    world.take(second, resource, token=token if same else smaller)
    return (finding(world, Defect.TOKEN_ORDER, resource),)


def unowned_for_long(world: World) -> tuple[Planted, ...]:
    """Nobody owns a resource for longer than the limit; in Shiva that may have been wanted."""
    first, second = neighbours(world) if world.rng.random() < 0.5 else strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.give(first, resource, token)
    world.after(UNOWNED_LIMIT_S + 2.0, UNOWNED_LIMIT_S * 100)
    world.take(second, resource)
    commanded = world.protocol is Protocol.SHIVA
    return (finding(world, Defect.UNOWNED, resource, POSSIBLE if commanded else CERTAIN),)


def unowned_for_short(world: World) -> tuple[Planted, ...]:
    """Nobody owns a resource for as long as is allowed, then its old owner again: a near miss."""
    process = world.process(world.rng.choice(world.hosts))
    resource = world.resource()
    for _ in range(world.rng.randint(2, 4)):
        token = world.take(process, resource)
        world.after(2.0, 10.0)
        world.give(process, resource, token)
        world.after(UNOWNED_LIMIT_S * 0.5, UNOWNED_LIMIT_S - 1.0)
    return ()


def overlap_before_onstop_raised(world: World) -> tuple[Planted, ...]:
    """The next owner begins while OnStop runs, which then raises: access had surely not ended."""
    first, second = neighbours(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.take(second, resource)
    world.after(0.001, 2.0)
    world.fail_to_stop(first, resource, token)
    return (finding(world, Defect.OVERLAP, resource),)


def overlap_after_onstop_raised(world: World) -> tuple[Planted, ...]:
    """OnStop raises, the lease ends, the next owner begins, and the first writes on: it may go on (RB-24)."""
    first, second = neighbours(world) if world.rng.random() < 0.5 else strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.fail_to_stop(first, resource, token)
    world.after(LEASE_TTL_S, LEASE_TTL_S * 2)
    world.take(second, resource)
    world.after(CLOCK_ERROR_S * 2, 10.0)
    world.note(first)
    return (finding(world, Defect.OVERLAP, resource, POSSIBLE),)


def overlap_beside_onstop_raised(world: World) -> tuple[Planted, ...]:
    """OnStop raised and nothing tells of an end; of two that own after it the second is too early."""
    host = world.rng.choice(world.hosts)
    first, second, third = (world.process(host) for _ in range(3))
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.fail_to_stop(first, resource, token)
    world.after(LEASE_TTL_S, LEASE_TTL_S * 2)
    token = world.take(second, resource)
    world.after(2.0, 10.0)
    world.take(third, resource)
    world.after(0.001, 10.0)
    world.stop(second, resource, token)
    world.after(1.0, 10.0)
    world.note(first)
    return (finding(world, Defect.OVERLAP, resource, POSSIBLE), finding(world, Defect.OVERLAP, resource))


def silent_after_onstop_raised(world: World) -> tuple[Planted, ...]:
    """OnStop raises, and the node tells nothing more once the next owner begins: a near miss."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.fail_to_stop(first, resource, token)
    world.after(LEASE_TTL_S, LEASE_TTL_S * 2)
    world.take(second, resource)
    return ()


def started_again_with_its_token(world: World) -> tuple[Planted, ...]:
    """Out of touch for a while, a node stops and starts again what it still holds: a near miss (RB-21)."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    for _ in range(world.rng.randint(1, 3)):
        world.after(2.0, 10.0)
        world.write(first, GroupKind.ISOLATED, detail={"last_proof_s": 5.0})
        world.stop(first, resource, token)
        world.after(0.5, 3.0)
        world.write(first, GroupKind.RECONNECTED)
        world.start(first, resource, token)
    world.after(2.0, 10.0)
    world.give(first, resource, token)
    world.after(0.001, 0.05)
    world.take(second, resource)
    return ()


def started_again_after_another(world: World) -> tuple[Planted, ...]:
    """A node stops, loses its lease, and starts again with its old token, after another owned meanwhile."""
    first, second = neighbours(world) if world.rng.random() < 0.5 else strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.after(2.0, 10.0)
    world.stop(first, resource, token)
    world.after(LEASE_TTL_S, LEASE_TTL_S * 2)
    heir = world.take(second, resource)
    world.after(2.0, 10.0)
    world.give(second, resource, heir)
    world.after(2.0, 10.0)
    world.start(first, resource, token)
    return (finding(world, Defect.TOKEN_ORDER, resource),)


def several_barriers_at_once(world: World) -> tuple[Planted, ...]:
    """The registry lets three barriers stand; the third owner begins in the time of the second only."""
    host = world.rng.choice(world.hosts)
    first, second, third = (world.process(host) for _ in range(3))
    resource = world.resource()
    one = world.take(first, resource)
    world.after(1.0, 5.0)
    other = world.take(second, resource)
    world.after(1.0, 5.0)
    world.stop(first, resource, one)
    world.after(1.0, 5.0)
    world.take(third, resource)
    world.after(1.0, 5.0)
    world.give(second, resource, other)
    world.after(1.0, 5.0)
    world.remove_barrier(first, resource, one)
    overlap = finding(world, Defect.OVERLAP, resource)
    held = finding(world, Defect.BARRIER_OVERLAP, resource)
    return (overlap, overlap, held, held)


def slow_handlers(world: World) -> tuple[Planted, ...]:
    """OnStop takes long and is reported; the next owner waits at the barrier: a near miss (RB-25)."""
    first, second = strangers(world)
    resource = world.resource()
    token = world.take(first, resource)
    world.write(first, GroupKind.STOP_ENTERED, resource=resource, token=token)
    world.write(second, GroupKind.BARRIER_BLOCKED, resource=resource, revision=world.revision)
    world.after(30.0, 300.0)
    world.write(first, GroupKind.HANDLER_OVERRAN, detail={"handler": "stop", "limit_s": 10.0})
    world.after(1.0, 30.0)
    world.write(first, GroupKind.STOP_RETURNED, resource=resource, token=token)
    world.remove_barrier(first, resource, token)
    world.after(0.001, 0.005)
    world.take(second, resource)
    return ()


_OWNED: Final = frozenset({Protocol.GROUP, Protocol.SHIVA, Protocol.NELI})
_MODES: Final = frozenset({Protocol.SHIVA, Protocol.NELI})

DRAMAS: Final = (
    Drama(overlap_on_one_host),
    Drama(overlap_beyond_clock_error),
    Drama(overlap_within_clock_error, BARRIERS),
    Drama(handed_over_within_clock_error, OWNERS - BARRIERS),
    Drama(tight_on_one_host),
    Drama(close_on_two_hosts),
    Drama(overlap_after_waking),
    Drama(refuted_by_revisions, BARRIERS),
    Drama(killed_after_idling, _OWNED),
    Drama(overlap_within_its_limit, _MODES),
    Drama(overlap_over_its_limit, _MODES),
    Drama(three_owners, BARRIERS),
    Drama(barrier_held_twice, BARRIERS),
    Drama(barrier_and_access_twice, BARRIERS),
    Drama(token_goes_back),
    Drama(unowned_for_long, _OWNED),
    Drama(unowned_for_short),
    Drama(overlap_before_onstop_raised, BARRIERS),
    Drama(overlap_after_onstop_raised, BARRIERS),
    Drama(overlap_beside_onstop_raised, BARRIERS),
    Drama(silent_after_onstop_raised, BARRIERS),
    Drama(started_again_with_its_token, BARRIERS),
    Drama(started_again_after_another, BARRIERS),
    Drama(several_barriers_at_once, BARRIERS),
    Drama(slow_handlers, BARRIERS),
)
