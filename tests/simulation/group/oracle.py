"""The oracle: what must never happen, judged by what really happens.

It does not ask the nodes what they believe. It sees handlers being entered and returning, processes dying,
every request that reaches the registry, every change of the registry's contents, and true time.

**Access** to a resource lasts from *entering* OnStart to the *return* of OnStop, of a removed resource too.
An OnStop that raised stopped nothing: access is then taken as lasting until the lease has ended. A process
that dies accesses nothing any more.

**The stated bound** (RB-1 for resources that check no token). Two accesses may overlap only if the barrier of
the older one ended with its lease. Let its process *have to isolate itself* at time ``I``: when its own clock
shows ``detect_s`` after the instant at which its lease was last renewed, as no proof of life can count from
later; or when it is told that the session is gone. From ``I`` on a process that does what it should is
stopped or in a handler, but for a small latency: first in the call that ran at ``I``, then in OnStop for the
rest. Each excuse follows from that, and lasts no longer:

- *Its clock ran slow*: by less than ``clock_drift_ratio``, ``I`` comes ``detect_s / (1 - clock_drift_ratio)``
  after the renewal at the latest. A slower clock moves ``I`` and all that follows, so it excuses until OnStop
  has returned after ``I``. A fast clock makes ``I`` early and excuses nothing.
- *It was stopped* for longer than ``safety_margin_s`` after ``I``: a pause that ended before ``I`` delayed
  nothing. Once it goes on it calls OnStop at once (RB-27), which has its ``stop_timeout_s``.
- *Its handlers overran*: they were still busy ``stop_timeout_s`` after ``I``, pauses aside. That excuses as
  long as the two calls run that there can be, and nothing that comes later.

Without any of them access ends by ``I + stop_timeout_s``, and that is before the lease can end: ``detect_s``
was made so. An overlap is therefore judged when it begins and when it ends, and so is every access: time in
which a process has to isolate itself, runs, and calls nobody is a violation even if no lease ends.

With ``on_overrun="kill"`` only the clock is an excuse: one that shows ``access_s`` after the last renewal too
late, and only until then, when the dead man's switch must have fired (RB-34). **Fenced resources** have no
exception: a store that remembers the largest token it saw never accepts a write of an older owner after one
of a newer owner, and never refuses the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TYPE_CHECKING, Protocol

from rebalanser.core.group.types import Header, NodeId, Resource, Session, SharePart, Token
from rebalanser.registry import values
from rebalanser.registry.contract import (
    Changed,
    KeyValue,
    Request,
    Revoke,
    WatchEvent,
)
from simulation.kernel.clock import Spans, covered
from simulation.kernel.reports import Violation

if TYPE_CHECKING:
    from rebalanser.core.group.messages import Acknowledge
    from rebalanser.core.group.node import Node
    from rebalanser.registry.keys import GroupKeys
    from simulation.group.scenario import HostPlan, Scenario
    from simulation.kernel.clock import LocalClock
    from simulation.kernel.scheduler import Scheduler

OPERATOR = "operator"
"""Sender of requests that do not come from a node."""
LATENCY_S = 0.01
"""Maximum seconds outside handlers once a process must stop: covers timers and thread starts."""
TURNS = 8
"""The turns of its loop that this may take besides: of the events that wait, before and after a call."""
MAX_CALLS = 2
"""The calls of handlers that there can be once a process has to stop: the one that runs, and OnStop."""
_EPSILON_S = 1e-4
_FOREVER = float("inf")


class Judged(Protocol):
    """A process, as the oracle sees it."""

    label: str
    stem: str
    clock: LocalClock
    node: Node

    @property
    def plan(self) -> HostPlan:
        """Plan of its host."""
        ...

    @property
    def now(self) -> float:
        """Its monotonic time in seconds."""
        ...

    def is_incarnation(self, node: str) -> bool:
        """True if a member is, or was, this process."""
        ...


class Reactions(Protocol):
    """Checks of reaction times, which follow what the oracle sees."""

    def changed(self, revision: int) -> None:
        """A member, a resource or a drain changed."""

    def freed(self, resource: Resource) -> None:
        """A barrier is gone."""

    def allocated(self) -> None:
        """An allocation is published."""


class JudgedWorld(Protocol):
    """The world, as the oracle sees it."""

    scenario: Scenario
    scheduler: Scheduler
    keys: GroupKeys

    @property
    def promptness(self) -> Reactions | None:
        """Checks of reaction times, if there are any."""
        ...

    @property
    def is_serving(self) -> bool:
        """True while a request of one of the groups is carried out."""
        ...

    def stored(self, key: str) -> KeyValue:
        """Return a key's entry in the registry."""
        ...

    def acknowledged(self, node: str) -> int:
        """Return the version that a member has acknowledged."""
        ...

    def changed_versions(self) -> None:
        """A new version of the allocation is committed."""


@dataclass(slots=True)
class Barrier:
    """A barrier that was added: whose, and how it ended."""

    node: str
    lease: int
    token: Token
    ended_with_lease: bool = False
    removed: bool = False


@dataclass(slots=True)
class Access:
    """One process's access to one resource."""

    process: Judged
    barrier: Barrier
    until_lease_ends: bool = False


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two processes had access to one resource at once, as it really was, whoever noticed.

    ``older`` is the one with the smaller token; ``at`` is the true time (seconds) when the second of them
    entered OnStart, and ``excuse`` why the stated bound allows it, or None.
    """

    resource: Resource
    older: NodeId
    older_token: Token
    newer: NodeId
    newer_token: Token
    at: float
    excuse: str | None


@dataclass(slots=True)
class Conduct:
    """Grounds for an excuse: when a process was stopped, and when it was in a handler."""

    paused: Spans = field(default_factory=Spans)
    busy: Spans = field(default_factory=Spans)
    told_lost: dict[int, float] = field(default_factory=dict)
    """True time at which the loss of each lease's session was reported."""

    def idle(self, since: float, now: float) -> float:
        """Seconds since then that it ran outside handlers."""
        spans = sorted((*self.paused.since(since), *self.busy.since(since)))
        return max(0.0, now - since) - covered(spans, since, now)

    def handling(self, since: float, now: float) -> float:
        """For how long it ran since then and was in a handler."""
        return max(0.0, now - since) - self.idle(since, now) - self.paused.within(since, now)


@dataclass(slots=True)
class _Sink:
    """A fenced store: one row per resource with the largest token that it saw, and whose that was."""

    token: Token = 0
    process: Judged | None = None


class Oracle:
    """Watches a ``World`` and raises ``Violation``."""

    def __init__(self, world: JudgedWorld) -> None:
        self._world = world
        self._keys = world.keys
        self._actor: str | None = None
        self._request: Request | None = None
        self.barriers: dict[Resource, Barrier] = {}
        self._added: dict[tuple[Resource, Token], Barrier] = {}
        self._last_token: dict[Resource, Token] = {}
        self._last_entered: dict[Resource, Token] = {}
        self.accesses: dict[Resource, dict[str, Access]] = {}
        self._conduct: dict[str, Conduct] = {}
        self._sinks: dict[Resource, _Sink] = {}
        self._renewed: dict[int, float] = {}
        self._lease_ends: dict[int, float] = {}
        self._joined: dict[str, Session] = {}
        self.members: dict[str, int] = {}
        """The members by id, and the revision that made each one."""
        self._released: dict[NodeId, list[tuple[int, frozenset[Resource]]]] = {}
        """The releases that each node's record names, by the revision that put them."""
        self.term = 0
        self.leader = ""
        self.leader_changes = 0
        self.header: Header | None = None
        self.headers = 0
        self.given: dict[Resource, tuple[NodeId, float]] = {}
        """Owner of each resource in the latest allocation, and since when without a break (true seconds)."""
        self.last_worked: dict[Resource, float] = {}
        """True time (seconds) at which the latest access to a resource ended."""
        self.allocation: dict[NodeId, int] = {}
        """Since which version the share of each member stands, in the latest allocation."""
        self._shares: dict[str, KeyValue] = {}
        self._ever_named: set[tuple[NodeId, int]] = set()
        """The shares, by node and version, that some allocation named."""
        self.handler_calls = 0
        self.stale_writes = 0
        self.writes = 0
        self.overlaps: list[Overlap] = []

    @property
    def excused(self) -> int:
        """How many overlaps were within the stated bound."""
        return sum(overlap.excuse is not None for overlap in self.overlaps)

    @property
    def _now(self) -> float:
        return self._world.scheduler.now

    def conduct(self, process: Judged) -> Conduct:
        """What is known of how a process ran."""
        conduct = self._conduct.get(process.stem)
        if conduct is None:
            conduct = self._conduct[process.stem] = Conduct()
        return conduct

    @property
    def actor(self) -> str | None:
        """Sender of the request that takes effect just now; None while a lease ends."""
        return self._actor

    def delivering(self, request: Request, origin: str) -> None:
        """A request is about to take effect."""
        self._actor, self._request = origin, request

    def delivered(self) -> None:
        """It has taken effect."""
        self._actor = self._request = None

    def renewed(self, lease: int, ttl_s: float) -> None:
        """A lease was granted or renewed just now."""
        self._renewed[lease] = self._now
        self._lease_ends[lease] = self._now + ttl_s

    def leases_renewed_by_restart(self, ttl_s: float) -> None:
        """Every lease got its full time again."""
        for lease in self._lease_ends:
            self._lease_ends[lease] = self._now + ttl_s

    def changed(self, events: Sequence[WatchEvent]) -> None:
        """Keys of the group changed: all that one transaction did, or the end of one lease."""
        if self._actor is None and self._world.is_serving:
            keys = [event.key for event in events if isinstance(event, Changed)]
            raise Violation("RB-33", f"another group changed {keys}")
        for event in events:
            if isinstance(event, Changed):
                self._changed(event)
        self._check_allocation(events)
        if self._actor is None:
            self._check_ended_together(events)

    def _changed(self, event: Changed) -> None:
        keys, key = self._keys, event.key
        if self._world.promptness and key.startswith((keys.nodes, keys.resources, keys.drains)):
            self._world.promptness.changed(event.revision)
        if key.startswith(keys.barriers):
            self._barrier_changed(event, keys.resource_of_barrier(key))
        elif key.startswith(keys.nodes):
            self._member_changed(event, keys.name(key, keys.nodes))
        elif key.startswith(keys.shares):
            self._share_changed(event)
        elif key == keys.term:
            self._term_changed(event)
        elif key == keys.header:
            self._header_changed(event)

    def _barrier_changed(self, event: Changed, resource: Resource) -> None:
        if event.value is None:
            self._barrier_gone(resource)
            return
        entry = self._world.stored(event.key)
        if entry.create_revision != event.revision:
            raise Violation("RB-1", f"the barrier of {resource} was overwritten by {self._actor}")
        node = event.value.decode()
        if node != self._actor:
            raise Violation("RB-15", f"{self._actor} added a barrier of {resource} in the name of {node}")
        if event.revision <= self._last_token.get(resource, 0):
            raise Violation("RB-12", f"token {event.revision} of {resource} is not larger than the last")
        if entry.lease not in self._renewed:
            raise Violation("RB-20", f"the barrier of {resource} belongs to no lease")
        barrier = Barrier(node, entry.lease, event.revision)
        self._last_token[resource] = event.revision
        self.barriers[resource] = self._added[resource, event.revision] = barrier

    def _barrier_gone(self, resource: Resource) -> None:
        barrier = self.barriers.pop(resource)
        if self._world.promptness:
            self._world.promptness.freed(resource)
        if self._actor is None:
            barrier.ended_with_lease = True
            self._end_stuck_access(resource, barrier)
            self._check_ended(resource, barrier)
            return
        barrier.removed = True
        if self._actor != barrier.node:
            raise Violation(
                "RB-16" if self._actor.startswith(OPERATOR) else "RB-15",
                f"{self._actor} removed the barrier of {resource}, which was {barrier.node}'s",
            )
        for access in self.accesses.get(resource, {}).values():
            if access.barrier is barrier:
                how = "revoked its lease" if isinstance(self._request, Revoke) else "removed the barrier"
                rule = "RB-24" if access.until_lease_ends else "RB-11"
                raise Violation(rule, f"{barrier.node} {how} while it accessed {resource}")

    def _end_stuck_access(self, resource: Resource, barrier: Barrier) -> None:
        accesses = self.accesses.get(resource, {})
        for stem, access in list(accesses.items()):
            if access.barrier is barrier and access.until_lease_ends:
                del accesses[stem]

    def _check_ended(self, resource: Resource, barrier: Barrier) -> None:
        """Access has ended before the lease has (RB-21)."""
        for access in self.accesses.get(resource, {}).values():
            if access.barrier is barrier and self._excuse(access) is None:
                raise Violation(
                    self._rule_of_late_stop(access),
                    f"{access.process.label} still accesses {resource} when its lease ends",
                )

    def _check_ended_together(self, events: Sequence[WatchEvent]) -> None:
        """A lease that ends takes the member and its barriers at once (RB-20)."""
        nodes = self._keys.nodes
        gone = {
            self._keys.name(e.key, nodes)
            for e in events
            if isinstance(e, Changed) and e.key.startswith(nodes)
        }
        for resource, barrier in self.barriers.items():
            if barrier.node in gone:
                raise Violation("RB-20", f"{barrier.node} is gone, and its barrier of {resource} is not")

    def _member_changed(self, event: Changed, node: str) -> None:
        if event.value is None:
            if self._actor not in (None, node):
                raise Violation("RB-4", f"{self._actor} removed the member {node}")
            self.members.pop(node, None)
            return
        member = values.load_member(node, self._entry(event))
        known = self._released.setdefault(node, [])
        if node in self.members:
            self._check_rewritten(event, node)
            known.append((event.revision, member.released))
            return
        known.append((event.revision, member.released))
        joined = self._joined.get(node)
        if joined is not None and self._world.stored(event.key).lease == joined.lease:
            raise Violation("RB-4", f"{node}, which has left, is a member again")
        self.members[node] = event.revision

    def _check_rewritten(self, event: Changed, node: NodeId) -> None:
        """A member's key is put again only by itself, in the session that it has."""
        entry = self._world.stored(event.key)
        joined = self._joined.get(node)
        if (
            self._actor != node
            or joined is None
            or (entry.lease, entry.create_revision)
            != (
                joined.lease,
                joined.created,
            )
        ):
            raise Violation("RB-4", f"{node} was registered over itself")

    def released_at(self, node: NodeId, revision: int | None = None) -> frozenset[Resource]:
        """The releases that the node's record named at this revision, or names now."""
        told = [
            released for at, released in self._released.get(node, ()) if revision is None or at <= revision
        ]
        return told[-1] if told else frozenset()

    def _share_changed(self, event: Changed) -> None:
        if event.value is None:
            self._shares.pop(event.key, None)
            return
        known = self._shares.get(event.key)
        if known is not None and known.value != event.value and self._named(event.key):
            raise Violation("RB-9", f"{event.key} was rewritten after the header named it")
        self._shares[event.key] = self._entry(event)

    def _named(self, share_key: str) -> bool:
        part = self._keys.share_part(share_key)
        return self.allocation.get(part.node) == part.version

    def _check_allocation(self, events: Sequence[WatchEvent]) -> None:
        """Only a new header changes what members are to own, and only to shares of its own version.

        A share counts if it was written for the member as it is: a late registration makes another one.
        """
        keys = {event.key for event in events if isinstance(event, Changed)}
        if not any(key.startswith((self._keys.shares, self._keys.nodes, self._keys.header)) for key in keys):
            return
        before, header = self.allocation, self.header
        latest: dict[str, int] = {}
        for key, entry in self._shares.items():
            part = self._keys.share_part(key)
            its_own = part.part == 0 and entry.mod_revision > self.members.get(part.node, _FOREVER)
            if its_own and header is not None and header.is_committed(part.version):
                latest[part.node] = max(part.version, latest.get(part.node, 0))
        self.allocation = latest
        if header is None:
            return
        allowed = {header.version} if self._keys.header in keys else set()
        for node in self.members:
            known, now = before.get(node), latest.get(node)
            if now != known and now not in allowed:
                raise Violation("RB-9", f"{node} has the share of version {now} after {known}, by no header")
        if self._keys.header in keys:
            self._ever_named.update(latest.items())

    def _term_changed(self, event: Changed) -> None:
        if event.value is None:
            raise Violation("RB-5", "the term key was deleted")
        leadership = values.load_leadership(self._entry(event))
        if not leadership.leader and (self._actor, self.term) == (self.leader, leadership.term):
            self.leader = ""
            return
        if leadership.term <= self.term:
            raise Violation("RB-5", f"term {leadership.term} after term {self.term}")
        if self.leader in self.members:
            raise Violation("RB-5", f"{leadership.leader} took the term from {self.leader}, which lives")
        self.term, self.leader = leadership.term, leadership.leader
        self.leader_changes += 1

    def _header_changed(self, event: Changed) -> None:
        if event.value is None:
            raise Violation("RB-9", "the header was deleted")
        header = values.load_header(self._entry(event))
        if self._actor != self.leader or header.term != self.term:
            raise Violation(
                "RB-6",
                f"{self._actor} published version {header.version} in term {header.term}; "
                f"{self.leader} leads term {self.term}",
            )
        if self.header is not None and header.version <= self.header.version:
            raise Violation("RB-9", f"version {header.version} after version {self.header.version}")
        self.header = header
        self.headers += 1
        self._world.changed_versions()

    def check_shares(self) -> None:
        """Every share of the committed allocation is there, and no resource is in two of them."""
        if self.header is None:
            return
        owners: dict[Resource, str] = {}
        for node, version in self.allocation.items():
            for resource in values.load_share(version, self._parts(node, version)).resources:
                if resource in owners:
                    raise Violation("RB-2", f"{resource} is given to {owners[resource]} and to {node}")
                owners[resource] = node
        self.given = {
            resource: self.given[resource]
            if self.given.get(resource, ("", 0.0))[0] == node
            else (node, self._now)
            for resource, node in owners.items()
        }
        if self._world.promptness:
            self._world.promptness.allocated()

    def obsolete_parts(self) -> list[str]:
        """The keys of shares that were in an earlier allocation and are not in the latest."""
        parts = {key: self._keys.share_part(key) for key in self._shares}
        return sorted(
            key
            for key, part in parts.items()
            if (part.node, part.version) in self._ever_named and not self._named(key)
        )

    def _parts(self, node: str, version: int) -> list[KeyValue]:
        """The parts of a share that are there, in their order."""
        parts = (self._keys.share(SharePart(node, version, part)) for part in count())
        return [self._shares[key] for key in takewhile(self._shares.__contains__, parts)]

    @staticmethod
    def _entry(event: Changed) -> KeyValue:
        return KeyValue(event.key, event.value or b"", event.revision, event.revision)

    def start_entered(self, process: Judged, owned: Mapping[Resource, Token], late: bool) -> None:
        """OnStart is entered: access begins. ``late``: it was stopped after its look at the clock."""
        self._busy(process)
        for resource, token in sorted(owned.items()):
            barrier = self._barrier_for_start(process, resource, token)
            self._check_not_late(process, resource, barrier, late)
            self._check_overlap(process, resource, barrier)
            self.accesses.setdefault(resource, {})[process.stem] = Access(process, barrier)
            if token < self._last_entered.get(resource, 0) and not self._excuse(Access(process, barrier)):
                raise Violation("RB-12", f"{process.label} starts {resource} with an old token {token}")
            self._last_entered[resource] = max(token, self._last_entered.get(resource, 0))

    def _barrier_for_start(self, process: Judged, resource: Resource, token: Token) -> Barrier:
        barrier = self._added.get((resource, token))
        if barrier is None or not process.is_incarnation(barrier.node):
            raise Violation("RB-12", f"{process.label} starts {resource} without a barrier of its own")
        if barrier.removed:
            raise Violation("RB-11", f"{process.label} starts {resource}, whose barrier it removed")
        return barrier

    def _check_not_late(self, process: Judged, resource: Resource, barrier: Barrier, late: bool) -> None:
        """OnStart is not entered when OnStop is due, but for a process stopped between look and entering."""
        due = self._due_by_clock(process, barrier.lease)
        if self._now <= due + _EPSILON_S:
            return
        if not late or self.conduct(process).idle(due, self._now) > _EPSILON_S:
            raise Violation("RB-21", f"{process.label} starts {resource} when it has to isolate itself")

    def _check_overlap(self, process: Judged, resource: Resource, barrier: Barrier) -> None:
        for access in self.accesses.get(resource, {}).values():
            if access.process is process:
                raise Violation("RB-1", f"{process.label} starts {resource} twice")
            mine = Access(process, barrier)
            older, newer = sorted((access, mine), key=lambda one: one.barrier.token)
            excuse = self._excuse(older)
            self.overlaps.append(
                Overlap(
                    resource,
                    older.barrier.node,
                    older.barrier.token,
                    newer.barrier.node,
                    newer.barrier.token,
                    self._now,
                    excuse,
                )
            )
            if excuse is None:
                raise Violation(
                    self._rule_of_late_stop(older) if older.barrier.ended_with_lease else "RB-1",
                    f"{process.label} starts {resource} (token {barrier.token}) while "
                    f"{access.process.label} accesses it (token {access.barrier.token})",
                )

    def _due_by_clock(self, process: Judged, lease: int, within_s: float | None = None) -> float:
        """When (true seconds) its own clock shows ``within_s`` since the lease was last renewed.

        By default the time after which a process has to isolate itself, if it proves life no more.
        """
        after_s = self._world.scenario.timings.detect_s if within_s is None else within_s
        return process.clock.true(process.clock.local(self._renewed[lease]) + after_s)

    def _isolated_since(self, access: Access) -> float:
        """When (true seconds) a process has, or had, to begin to end an access; ``I`` above."""
        due = self._due_by_clock(access.process, access.barrier.lease)
        return min(due, self.conduct(access.process).told_lost.get(access.barrier.lease, _FOREVER))

    def _excuse(self, access: Access) -> str | None:
        """Why a process may still access what it owned, or None; see the stated bound."""
        barrier, process, now = access.barrier, access.process, self._now
        if not barrier.ended_with_lease:
            return None
        isolated, conduct = self._isolated_since(access), self.conduct(process)
        calls = sum(end > isolated + _EPSILON_S for _, end in conduct.busy.since(isolated))
        if conduct.idle(isolated, now) > self.latency_s or calls > MAX_CALLS:
            return None
        timings = self._world.scenario.timings
        if process.plan.kills:
            slow = self._ran_slow(access, timings.access_s) and self._before_switch(access)
            return "its clock ran slow" if slow else None
        if self._ran_slow(access, timings.detect_s):
            return "its clock ran slow"
        if conduct.paused.within(isolated, now) > timings.safety_margin_s - _EPSILON_S:
            return "it was stopped"
        if conduct.handling(isolated, now) > timings.stop_timeout_s:
            return "its handlers overran"
        return None

    def _ran_slow(self, access: Access, within_s: float) -> bool:
        """True if a clock slower than allowed shows too late that this time has passed since the renewal."""
        lease = access.barrier.lease
        latest = self._renewed[lease] + within_s / (1 - self._world.scenario.timings.clock_drift_ratio)
        return self._due_by_clock(access.process, lease, within_s) > latest + _EPSILON_S

    def _before_switch(self, access: Access) -> bool:
        """True if the dead man's switch is not due yet."""
        clock = access.process.clock
        renewed = clock.local(self._renewed[access.barrier.lease])
        return clock.local(self._now) <= renewed + self._world.scenario.timings.access_s + _EPSILON_S

    @property
    def latency_s(self) -> float:
        """Maximum seconds outside handlers, in all, once a process must isolate itself."""
        return LATENCY_S + TURNS * self._world.scenario.turn_s

    def _rule_of_late_stop(self, access: Access) -> str:
        """The rule that a process breaks which accesses something for longer than it may."""
        if access.process.plan.kills and access.barrier.ended_with_lease:
            return "RB-34"
        paused = self.conduct(access.process).paused.within(self._isolated_since(access), self._now)
        return "RB-27" if paused > _EPSILON_S else "RB-21"

    def _check_stopped_in_time(self, access: Access, resource: Resource) -> None:
        """An access that ends now ended in time: no excuse has run out, and nothing was put off."""
        isolated = self._isolated_since(access)
        if access.until_lease_ends or self._now <= isolated:
            return
        idle_s = self.conduct(access.process).idle(isolated, self._now)
        if idle_s > self.latency_s or (access.barrier.ended_with_lease and self._excuse(access) is None):
            raise Violation(
                self._rule_of_late_stop(access),
                f"{access.process.label} accessed {resource} for {self._now - isolated:.3f} s after it had "
                f"to isolate itself, and did nothing in {idle_s:.3f} s of that",
            )

    def start_returned(self, process: Judged) -> None:
        """OnStart returned or raised."""
        self.conduct(process).busy.end(self._now)

    def stop_entered(self, process: Judged, resources: Sequence[Resource]) -> None:
        """OnStop is entered; access goes on."""
        self._busy(process)
        for resource in resources:
            if process.stem not in self.accesses.get(resource, {}):
                raise Violation("RB-22", f"{process.label} stops {resource}, which it had not started")

    def _busy(self, process: Judged) -> None:
        self.handler_calls += 1
        self.conduct(process).busy.begin(self._now)

    def stop_returned(self, process: Judged, resources: Sequence[Resource], error: str | None) -> None:
        """OnStop returned, and access has ended; or it raised, and access lasts until the lease ends."""
        self.conduct(process).busy.end(self._now)
        for resource in resources:
            access = self.accesses[resource][process.stem]
            self.last_worked[resource] = self._now
            self._check_stopped_in_time(access, resource)
            if error is None or access.barrier.ended_with_lease:
                del self.accesses[resource][process.stem]
            else:
                access.until_lease_ends = True

    def died(self, process: Judged) -> None:
        """The process is no more, and accesses nothing."""
        for resource, accesses in self.accesses.items():
            access = accesses.pop(process.stem, None)
            if access is not None:
                self._check_stopped_in_time(access, resource)

    def write(self, process: Judged, resource: Resource, token: Token) -> None:
        """A process writes to the fenced store of a resource."""
        self.writes += 1
        sink = self._sinks.setdefault(resource, _Sink())
        if token > sink.token:
            sink.token, sink.process = token, process
        elif token < sink.token:
            self.stale_writes += 1
            barrier = self.barriers.get(resource)
            if barrier is not None and barrier.token == token:
                raise Violation("RB-12", f"the owner {barrier.node} of {resource} is refused as stale")
        elif sink.process is not process:
            raise Violation("RB-12", f"token {token} of {resource} was given to two owners")

    def guarded(self, process: Judged, deadline: float) -> None:
        """A process promises that its access ends by a true time, unless it proves life again."""
        session = process.node.session
        if session is None:
            return
        timings, clock, renewed = self._world.scenario.timings, process.clock, self._renewed[session.lease]
        if clock.local(deadline) > max(clock.local(renewed) + timings.access_s, process.now) + _EPSILON_S:
            raise Violation("RB-21", f"{process.label} counts on its lease from later than it was renewed")
        ends = self._lease_ends[session.lease]
        in_bound = clock.slowest(renewed) >= 1 - timings.clock_drift_ratio
        if in_bound and deadline > max(ends, self._now) + _EPSILON_S:
            raise Violation(
                "RB-21",
                f"{process.label} counts on its lease until {deadline:.4f}, which may end at {ends:.4f}",
            )

    def acknowledging(self, process: Judged, command: Acknowledge) -> None:
        """A process is about to say that it has completed its share, which must be true (RB-19)."""
        parts = self._parts(command.session.node, command.version)
        if not parts:
            return
        due = values.load_share(command.version, parts).resources
        accessed = {
            resource
            for resource, accesses in self.accesses.items()
            if process.stem in accesses and accesses[process.stem].barrier.node == command.session.node
        }
        if accessed != due:
            raise Violation(
                "RB-19",
                f"{process.label} acknowledges version {command.version} with {sorted(due)} "
                f"while it accesses {sorted(accessed)}",
            )
        spare = {r for r, barrier in self.barriers.items() if barrier.node == command.session.node} - due
        if spare:
            raise Violation(
                "RB-14", f"{process.label} acknowledges while it still holds barriers of {sorted(spare)}"
            )

    def told_completed(self, process: Judged, version: int) -> None:
        """A leader says that a version is complete: then every node has acknowledged its share of it."""
        header = self.header
        if header is None or header.version != version:
            return
        for node, since in self.allocation.items():
            # An earlier attempt to register, which comes late, makes a member until its own lease ends.
            was_there = self.members.get(node, _FOREVER) <= header.revision
            if was_there and self._world.acknowledged(node) < since:
                raise Violation(
                    "RB-19", f"{process.label} takes version {version} for complete; {node} has not finished"
                )

    def told_joined(self, session: Session) -> None:
        """A process learns that it is a member by an id, which no other incarnation ever has (RB-4)."""
        if self._joined.setdefault(session.node, session) != session:
            raise Violation("RB-4", f"the id {session.node} was used by an incarnation before")

    def told_session_lost(self, process: Judged, session: Session) -> None:
        """A process is told that a session of its is gone, which must be true."""
        self.conduct(process).told_lost.setdefault(session.lease, self._now)
        if self.members.get(session.node) == session.created:
            raise Violation("RB-22", f"{process.label} is told that {session.node} is gone, which lives")
