"""Lives in which nothing goes wrong that the protocols don't allow for: what an audit must not object to.

Nodes join, lead, share out, stop in good order, are killed, lose their sessions, and their handlers raise.
Each step is written by whom and in the order in which the protocols write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from rebalanser.core.group.messages import FactKind as GroupKind
from rebalanser.core.neli.messages import FactKind as NeliKind
from rebalanser.core.shiva.messages import FactKind as ShivaKind
from rebalanser.history import Protocol, SkuldKind
from support.histories.world import LEASE_TTL_S, Process, World

Shares = dict[Process, dict[str, int]]
"""What each member owns, with its tokens."""


def _balanced(owned: Mapping[Process, Mapping[str, int]], resources: list[str]) -> dict[Process, list[str]]:
    """Shares that differ by one at most, with as few moves as that allows."""
    shares = {member: sorted(tokens) for member, tokens in owned.items()}
    taken = {resource for share in shares.values() for resource in share}
    for resource in resources:
        if resource not in taken:
            min(shares.values(), key=len).append(resource)
    while len(most := max(shares.values(), key=len)) > len(least := min(shares.values(), key=len)) + 1:
        least.append(most.pop())
    return shares


class GroupLife:
    """A group of Rebalanser: members come and go, the leader publishes, everyone takes the four steps."""

    def __init__(self, world: World, resources: list[str]) -> None:
        self._world = world
        self._resources = resources
        self._version = 0
        self._leader: Process | None = None
        self.members: Shares = {}

    def join(self, member: Process) -> None:
        """Register, as a new incarnation if the process was a member before."""
        world = self._world
        member.incarnation += 1
        member.version = 0
        world.write(member, GroupKind.JOINING)
        world.after(0.002, 0.1)
        world.write(member, GroupKind.JOINED, revision=world.commit())
        self.members[member] = {}
        self._lead()

    def leave(self, member: Process) -> None:
        """Stop in good order (RB-26)."""
        world = self._world
        world.write(member, GroupKind.LEAVING)
        self._give_up(member, dict(self.members.pop(member)))
        world.after(0.001, 0.02)
        world.write(member, GroupKind.LEFT)
        self._without(member)

    def kill(self, member: Process) -> None:
        """End with no word; others take over when the lease has ended (RB-20)."""
        del self.members[member]
        self._world.after(LEASE_TTL_S * 0.8, LEASE_TTL_S)
        self._world.commit()
        self._without(member)

    def lose_session(self, member: Process) -> None:
        """Lose touch with the registry: access ends before the lease does (RB-21), then join again."""
        world = self._world
        world.after(3.0, 5.0)
        world.write(member, GroupKind.ISOLATED, detail={"last_proof_s": 5.0})
        tokens = self.members.pop(member)
        self._stop_all(member, tokens)
        world.after(1.0, LEASE_TTL_S)
        world.commit()
        self._without(member)
        world.after(0.5, 3.0)
        world.write(member, GroupKind.SESSION_LOST)
        self.join(member)

    def fail_to_stop(self, member: Process) -> None:
        """OnStop raises: the barriers end with the lease, not before (RB-24)."""
        world = self._world
        tokens = self.members.pop(member)
        for resource, token in tokens.items():
            world.write(member, GroupKind.STOP_ENTERED, resource=resource, token=token)
        world.after(0.01, 1.0)
        for resource, token in tokens.items():
            detail = {"error": "RuntimeError: not now"}
            world.write(member, GroupKind.STOP_FAILED, resource=resource, token=token, detail=detail)
        world.write(member, GroupKind.LEAVING)
        world.write(member, GroupKind.LAPSING, detail={"resources": len(tokens)})
        world.after(LEASE_TTL_S * 0.8, LEASE_TTL_S)
        world.write(member, GroupKind.LEFT)
        world.after(1.0, 2.0)
        world.commit()
        self._without(member)

    def fail_to_start(self, member: Process) -> None:
        """OnStart raises: OnStop is called, the node leaves and joins again (RB-24)."""
        world = self._world
        resource = world.resource()
        token = world.add_barrier(member, resource)
        world.after(0.001, 0.01)
        world.write(member, GroupKind.START_ENTERED, resource=resource, token=token)
        world.after(0.001, 0.5)
        world.write(member, GroupKind.START_FAILED, detail={"error": "RuntimeError: no disk"})
        self.members[member][resource] = token
        self._resources.append(resource)
        self.leave(member)
        world.after(0.5, 2.0)
        self.join(member)

    def report_loads(self) -> None:
        """The applications say what their resources cost them."""
        for member, tokens in self.members.items():
            for resource, token in tokens.items():
                self._world.note(member, resource, token)

    def rebalance(self) -> None:
        """One rebalance with its four steps (RB-11), until every member has completed its share."""
        world, leader = self._world, self._leader
        if leader is None or leader not in self.members:
            return
        world.after(0.05, 0.3)
        detail = {"members": len(self.members), "resources": len(self._resources)}
        world.write(leader, GroupKind.GROUP_READ, revision=world.revision, detail=detail)
        shares = _balanced(self.members, self._resources)
        self._publish(leader, shares)
        for member in world.shuffled(list(self.members)):
            leaving = {r: t for r, t in self.members[member].items() if r not in shares[member]}
            self._adopt(member, len(shares[member]))
            for resource in leaving:
                del self.members[member][resource]
            self._give_up(member, leaving)
        for member in world.shuffled(list(self.members)):
            self._begin(member, [r for r in shares[member] if r not in self.members[member]])
            world.after(0.001, 0.02)
            world.write(
                member,
                GroupKind.ACKNOWLEDGED,
                revision=world.commit(),
                detail={"share_version": self._version},
            )
        world.after(0.001, 0.05)
        world.write(
            leader,
            GroupKind.REBALANCE_COMPLETED,
            value=self._version,
            detail={"completed_version": self._version},
        )

    def _publish(self, leader: Process, shares: Mapping[Process, list[str]]) -> None:
        world = self._world
        self._version += 1
        world.after(0.002, 0.05)
        owners = {resource: member for member, tokens in self.members.items() for resource in tokens}
        moves = sum(owners.get(r, member) is not member for member, share in shares.items() for r in share)
        self._header = world.commit()
        world.write(
            leader,
            GroupKind.ALLOCATION_PUBLISHED,
            revision=self._header,
            value=self._version,
            detail={
                "published_version": self._version,
                "moves": moves,
                "least_moves": moves,
                "nodes": len(shares),
                "resources": len(self._resources),
            },
        )

    def _adopt(self, member: Process, resources: int) -> None:
        world = self._world
        world.after(0.001, 0.05)
        member.version = self._version
        world.write(
            member,
            GroupKind.ALLOCATION_ADOPTED,
            revision=self._header,
            value=self._version,
            detail={"share_version": self._version, "resources": resources},
        )

    def _begin(self, member: Process, arriving: list[str]) -> None:
        world = self._world
        if not arriving:
            return
        if world.rng.random() < 0.3:
            world.write(
                member,
                GroupKind.BARRIER_BLOCKED,
                resource=arriving[0],
                revision=world.revision,
                detail={"holder": "another"},
            )
        world.after(0.002, 0.05)
        revision = world.commit()
        tokens = {resource: world.add_barrier(member, resource, revision) for resource in arriving}
        world.after(0.001, 0.02)
        for resource, token in tokens.items():
            world.write(member, GroupKind.START_ENTERED, resource=resource, token=token)
        world.after(0.001, 1.0)
        for resource, token in tokens.items():
            world.write(member, GroupKind.START_RETURNED, resource=resource, token=token)
        self.members[member].update(tokens)

    def _give_up(self, member: Process, tokens: Mapping[str, int]) -> None:
        if not tokens:
            return
        self._stop_all(member, tokens)
        revision = self._world.commit()
        for resource, token in tokens.items():
            self._world.remove_barrier(member, resource, token, revision)

    def _stop_all(self, member: Process, tokens: Mapping[str, int]) -> None:
        world = self._world
        for resource, token in tokens.items():
            world.write(member, GroupKind.STOP_ENTERED, resource=resource, token=token)
        world.after(0.001, 1.0)
        for resource, token in tokens.items():
            world.write(member, GroupKind.STOP_RETURNED, resource=resource, token=token)

    def _without(self, member: Process) -> None:
        if member is self._leader:
            self._leader = None
        self._lead()
        self.rebalance()

    def _lead(self) -> None:
        """Have a leader, in a new term if there is none (RB-5)."""
        world = self._world
        if not self.members:
            return
        if self._leader is None:
            self._leader = world.rng.choice(list(self.members))
            world.term += 1
            world.after(0.002, 0.05)
            self._leader.term = world.term
            world.write(self._leader, GroupKind.ELECTED, revision=world.commit())
        for member in self.members:
            if member.term != world.term:
                world.after(0.001, 0.02)
                member.term = world.term
                world.write(member, GroupKind.FOLLOWS, detail={"leader": self._leader.node})


def live_as_group(world: World) -> None:
    """Members of a group come and go for a while; half of the lives end while everything runs."""
    life = GroupLife(world, [world.resource() for _ in range(world.rng.randint(2, 5))])
    for _ in range(world.rng.randint(2, 3)):
        life.join(world.process(world.rng.choice(world.hosts)))
    life.rebalance()
    for _ in range(world.rng.randint(1, 4)):
        world.after(1.0, 20.0)
        _group_event(world, life)
        life.report_loads()
    if world.rng.random() < 0.5:
        for member in list(life.members):
            life.leave(member)


def _group_event(world: World, life: GroupLife) -> None:
    member = world.rng.choice(list(life.members))
    partings: list[Callable[[Process], None]] = [life.leave, life.kill, life.fail_to_stop]
    returns: list[Callable[[Process], None]] = [life.lose_session, life.fail_to_start]
    if world.rng.random() < 0.4 or len(life.members) < 2:
        life.join(world.process(world.rng.choice(world.hosts)))
        life.rebalance()
    elif world.rng.random() < 0.5:
        world.rng.choice(partings)(member)
    else:
        world.rng.choice(returns)(member)
        life.rebalance()


def live_as_shiva(world: World) -> None:
    """A leader publishes assignments; workers run applications, restart one, and one worker is killed."""
    leader, *workers = [world.process(world.rng.choice(world.hosts)) for _ in range(world.rng.randint(3, 4))]
    _take_over(world, leader)
    running: Shares = {worker: {} for worker in workers}
    for version, application in enumerate([world.resource() for _ in range(world.rng.randint(2, 4))], 1):
        world.write(leader, ShivaKind.START_COMMANDED, resource=application, detail={"offset": version})
        worker = world.rng.choice(workers)
        _assign(world, leader, worker, version, application)
        running[worker][application] = world.take(worker, application)
    world.after(2.0, 20.0)
    worker, other = world.rng.sample(workers, 2)
    for application, token in running[worker].items():
        if world.rng.random() < 0.5:
            world.stop(worker, application, token)
            world.after(0.1, 1.0)
            world.start(worker, application, token)
    killed = world.rng.random() < 0.5
    if killed:
        world.after(LEASE_TTL_S, LEASE_TTL_S * 1.5)
    for application, token in running[worker].items():
        if not killed:
            world.stop(worker, application, token)
            world.after(1.0, 2.0)
        _assign(world, leader, other, leader.version + 1, application)
        world.take(other, application)


def _take_over(world: World, leader: Process) -> None:
    world.term += 1
    leader.term = world.term
    world.write(leader, ShivaKind.TOOK_OVER, revision=world.commit())
    world.after(0.01, 0.2)


def _assign(world: World, leader: Process, worker: Process, version: int, application: str) -> None:
    revision = world.commit()
    detail = {"epoch": leader.term, "applications": version}
    leader.version = version
    world.write(leader, ShivaKind.DOCUMENT_PUBLISHED, revision=revision, value=version, detail=detail)
    world.after(0.005, 0.1)
    worker.term, worker.version = leader.term, version
    world.write(worker, ShivaKind.FILES_STORED, resource=application)
    world.write(worker, ShivaKind.DOCUMENT_ADOPTED, revision=revision, value=version, detail=detail)
    world.after(0.005, 0.1)


def live_as_neli(world: World) -> None:
    """Members lead partitions, hand them over, and one is killed."""
    members = [world.process(world.rng.choice(world.hosts)) for _ in range(world.rng.randint(2, 3))]
    for partition in range(world.rng.randint(2, 4)):
        name = f"{world.group}-topic/{partition}"
        first, second = world.rng.sample(members, 2)
        token = _induce(world, first, name)
        world.after(2.0, 20.0)
        ending = world.rng.choice(["released", "fenced", "leads"])
        if ending == "leads":
            continue
        world.write(first, NeliKind.REVOKED, resource=name, token=token)
        if ending == "released":
            world.stop(first, name, token)
            world.write(first, NeliKind.RELEASED, resource=name, token=token)
        else:
            world.write(first, NeliKind.FENCED, resource=name, token=token, detail={"reason": "heartbeat"})
        world.after(1.0, 3.0)
        _induce(world, second, name)
    if world.rng.random() < 0.5:
        _kill_a_leader(world)


def _induce(world: World, member: Process, partition: str) -> int:
    world.write(member, NeliKind.ASSIGNED, resource=partition, detail={"tenure": 1})
    world.after(0.01, 0.2)
    world.write(member, NeliKind.SUCCEEDS, resource=partition)
    return world.take(member, partition)


def _kill_a_leader(world: World) -> None:
    partition = f"{world.group}-topic/{world.resource()}"
    killed, heir = world.process(world.rng.choice(world.hosts)), world.process(world.rng.choice(world.hosts))
    _induce(world, killed, partition)
    world.after(LEASE_TTL_S, LEASE_TTL_S * 2)
    _induce(world, heir, partition)


def live_as_skuld(world: World) -> None:
    """Workers claim tasks, write updates and complete them; some are killed, and others take over."""
    workers = [world.process(world.rng.choice(world.hosts)) for _ in range(world.rng.randint(2, 3))]
    for _ in range(world.rng.randint(2, 5)):
        task = world.resource()
        if world.rng.random() < 0.3:
            killed = world.process(world.rng.choice(world.hosts))
            _work(world, killed, task, world.take(killed, task))
            world.after(LEASE_TTL_S, LEASE_TTL_S * 2)
        worker = world.rng.choice(workers)
        token = world.take(worker, task)
        _work(world, worker, task, token)
        world.write(worker, SkuldKind.COMPLETED, resource=task, token=token, revision=world.commit())
        world.after(0.001, 0.1)
        world.stop(worker, task, token)


def _work(world: World, worker: Process, task: str, token: int) -> None:
    """Updates 0, 1, 2..., one of which may be sent again (SK-9)."""
    for number in range(world.rng.randint(0, 4)):
        for _ in range(world.rng.choice([1, 1, 1, 2])):
            world.after(0.05, 1.0)
            world.write(
                worker,
                SkuldKind.UPDATED,
                resource=task,
                token=token,
                revision=world.commit(),
                value=number,
            )
    if world.rng.random() < 0.5:
        world.note(worker, task, token)


LIVES: Final[Mapping[Protocol, Callable[[World], None]]] = MappingProxyType(
    {
        Protocol.GROUP: live_as_group,
        Protocol.SHIVA: live_as_shiva,
        Protocol.NELI: live_as_neli,
        Protocol.SKULD: live_as_skuld,
    }
)
"""A healthy life in each protocol."""
