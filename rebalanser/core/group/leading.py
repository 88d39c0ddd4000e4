"""Leading: the election, and the rebalances of a leader.

It sends nothing, like ``rebalancing``: it decides what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from rebalanser.core.group.messages import (
    NO_LIMITS,
    Alive,
    GroupRead,
    MakePlan,
    MoveLimits,
    Noticed,
    PlanMade,
    ReadGroup,
)
from rebalanser.core.group.problem import AllocationProblem
from rebalanser.core.group.states import ROLE, Role, Vote
from rebalanser.core.group.succession import LabelSuccession, succession
from rebalanser.core.group.types import (
    MAX_REJOIN_GRACE_S,
    Effort,
    Group,
    Header,
    Leadership,
    Member,
    Mode,
    NodeId,
    Plan,
    PlanBasis,
    Policy,
    Resource,
    Session,
    Share,
    Timings,
    Topic,
    TopicKind,
    special_resources,
)

if TYPE_CHECKING:
    from rebalanser.core.allocation.solver import Allocation

MEMBERS_PER_BEAT: Final = 128
"""Number of members per heartbeat between two readings of the fingerprint: a leader of this many reads it
with each second heartbeat, of twice as many with each third, and so on (RB-45)."""
RESIGN_AFTER: Final = 5
"""Consecutive failures to read the group or to publish, after which a leader resigns (RB-43)."""

Solve: TypeAlias = Callable[[AllocationProblem], "Allocation"]
"""Computes an allocation; see ``rebalanser.core.allocation.solve``."""

_LEADERSHIP: Final = Topic(TopicKind.LEADERSHIP)
_GROUP: Final = Topic(TopicKind.GROUP)
_ACKNOWLEDGEMENTS: Final = Topic(TopicKind.ACKNOWLEDGEMENTS)
_EFFORTS_KEPT: Final = 16
"""Maximum number of plans whose effort is kept; few are of unknown outcome at once."""


def _revision(header: Header | None) -> int:
    return header.revision if header is not None else 0


def intended(
    group: Group, allocation: Allocation, passing: LabelSuccession | None = None
) -> dict[NodeId, frozenset[Resource]]:
    """Return the share of each member by an allocation, and of each node whose share is kept (RB-39).

    Drained nodes own nothing (RB-30).
    """
    kept = (succession(group) if passing is None else passing).kept
    return {node: allocation.shares.get(node, frozenset()) for node in group.members} | dict(kept)


def problem_of(group: Group) -> AllocationProblem:
    """Return the allocation problem of a group in which everything may move.

    The share of a label is kept while it is stored: only its leader counts the time.
    """
    passing = succession(group)
    return _problem(group, _pinned(group, _pins(group), passing), passing)


def _problem(
    group: Group,
    pinned: Mapping[Resource, NodeId],
    passing: LabelSuccession,
    special: frozenset[Resource] | None = None,
    unsettled: frozenset[Resource] | None = None,
    limits: MoveLimits = NO_LIMITS,
) -> AllocationProblem:
    active = _active(group, passing.superseded)
    return AllocationProblem(
        nodes=active,
        resources=group.resources,
        previous=_passed_on(group, passing),
        policy=group.policy,
        pinned=pinned,
        refused=releasers(group),
        kept={node: group.remembered[node] for node in passing.kept},
        drained=frozenset(group.members.keys() - active.keys()),
        special=special,
        unsettled=unsettled,
        moves_left=limits.moves_left,
        resting=limits.resting,
    )


def _active(group: Group, superseded: frozenset[NodeId] = frozenset()) -> dict[NodeId, Member]:
    """The members that may own resources."""
    return {
        node: member
        for node, member in group.members.items()
        if member.label not in group.drained and node not in superseded
    }


def _previous(group: Group) -> dict[NodeId, frozenset[Resource]]:
    return {node: share.resources for node, share in group.shares.items()}


def _passed_on(group: Group, passing: LabelSuccession) -> dict[NodeId, frozenset[Resource]]:
    """Return the previous shares, where those of replaced nodes are their heirs' (RB-39)."""
    shares = _previous(group)
    for node, heir in passing.heirs.items():
        inherited = shares.pop(node)
        shares[heir] = inherited | shares[heir] if shares.get(heir) else inherited
    return shares


def _pins(group: Group) -> dict[Resource, str]:
    """The label in the pin of each pinned resource."""
    return {r: spec.pin for r, spec in group.resources.items() if spec.pin is not None}


def _pinned(group: Group, pins: Mapping[Resource, str], passing: LabelSuccession) -> dict[Resource, NodeId]:
    """The node that each pinned resource may be on; an empty id where the node is not there.

    Of several nodes with the label it is the first that has not released the resource. What is kept for a
    label, or passes to another node of it, is as if it were pinned (RB-39).
    """
    if not pins:
        return passing.bound
    active = sorted(_active(group, passing.superseded).items(), reverse=True)
    by_label = {member.label: node for node, member in active}
    pinned = {resource: by_label.get(label, "") for resource, label in pins.items()}
    for resource in releasers(group).keys() & pins.keys():
        willing = (n for n, m in active if m.label == pins[resource] and resource not in m.released)
        pinned[resource] = min(willing, default=pinned[resource])
    return pinned | passing.bound


def _differ(before: frozenset[Resource], after: frozenset[Resource]) -> bool:
    """Return True unless these are equal; the very same set is not looked at."""
    return before is not after and before != after


def _unplaced(
    group: Group,
    targets: Mapping[NodeId, frozenset[Resource]],
    unsettled: frozenset[Resource] | None,
    pinned: Mapping[Resource, NodeId],
) -> frozenset[Resource] | None:
    """The resources in no target; None if they and the targets are not as many as there are resources.

    Only resources that were unsettled, are pinned or released may be in none, if the problem is plain.
    """
    missing = len(group.resources) - sum(map(len, targets.values()))
    if missing == 0:
        return frozenset()
    if unsettled is None:
        possible = set(group.resources)
    else:
        possible = {r for r in unsettled.union(pinned, releasers(group)) if r in group.resources}
    for target in targets.values():
        possible -= possible & target
    return frozenset(possible) if len(possible) == missing else None


def releasers(group: Group) -> dict[Resource, frozenset[NodeId]]:
    """The nodes that have released each resource, of those that may own resources; for no other resources."""
    nodes: dict[Resource, set[NodeId]] = {}
    for node, member in _active(group).items():
        for resource in member.released & group.resources.keys() if member.released else ():
            nodes.setdefault(resource, set()).add(node)
    return {resource: frozenset(those) for resource, those in nodes.items()}


class Leading:
    """One node's side of leading: its role, and as a leader the group as it last read it."""

    def __init__(self, may_lead: bool, timings: Timings, solve: Solve) -> None:
        self._may_lead = may_lead
        self._timings = timings
        self._solve = solve
        self.role = ROLE.first
        self.leadership: Leadership | None = None
        self.asked: MakePlan | None = None
        """The plan that is being worked out."""
        self.plan: Plan | None = None
        self.group: Group | None = None
        self._basis: PlanBasis | None = None
        """The basis of the next plan; None if the whole group has to be looked at."""
        self._planned_basis: PlanBasis | None = None
        self._leadership_seen = 0
        self._campaign_due = may_lead
        self._campaign_at = -math.inf
        self._tries = 0
        self.last_error = ""
        """The latest error of this leader."""
        self._changed_revision = 0
        self._changed_at: float | None = None
        self._published_at: float | None = None
        self._elected_at = self._improved_at = -math.inf
        """The time of the election, and of the last rebalance with moves that only improved the balance."""
        self._moved_at: dict[Resource, float] = {}
        """The time when each resource moved last for a better balance, within the cool-down."""
        self._improving: dict[int, frozenset[Resource]] = {}
        """The resources that each version which may be committed moves for a better balance."""
        self._improvable = False
        self._improve_at: float | None = None
        """The time of the next plan for a better balance."""
        self._graces: dict[NodeId, float] = {}
        """The end of the grace of each remembered node that is gone, counted since this leader noticed it."""
        self._grace_ends: float | None = None
        """The next such end."""
        self._inherits = False
        self._beats = 0
        self._keys: dict[str, int] = {}
        """Keys that a watch reported and that were not read since, each at its latest revision."""
        self._read: Mapping[str, int] | None = None
        """Keys and prefixes of the last reading; None if it was of the whole."""
        self._whole_at = self._lost_at = 0
        """The revision of the last full reading, and the one up to which a watch may have missed changes."""
        self._acknowledged: dict[NodeId, int] = {}
        self._acknowledgements_missed = self._acknowledgement_noticed = False
        self._acknowledgements_read = 0
        self._completed_version = 0
        self._attempted_version = 0
        self._attempts: dict[int, int] = {}
        """Versions whose publication may still write shares; it requires the header at this revision."""
        self._inherited_term = 0
        self._inherited_version = 0
        self._committed_version = 0
        self.efforts: dict[int, Effort] = {}
        """The efforts of the latest plans, by version."""
        self._publication_unknown: tuple[int, int] | None = None
        self._unreadable: frozenset[str] = frozenset()

    @property
    def header(self) -> Header | None:
        """The latest allocation that this leader has read or committed."""
        return self.group.header if self.group is not None else None

    @property
    def _completed(self) -> bool:
        return self.header is None or self.header.version <= self._completed_version

    @property
    def term(self) -> int:
        """The latest term that this node knows of."""
        return self.leadership.term if self.leadership else 0

    def campaign_due(self, now: float) -> bool:
        """True if the node is to campaign now."""
        return self._may_lead and self._campaign_due and now >= self._campaign_at

    @property
    def must_resign(self) -> bool:
        """True if this leader has failed ``RESIGN_AFTER`` times in a row (RB-43)."""
        return self.role is Role.LEADER and self._tries >= RESIGN_AFTER

    def topics(self) -> dict[Topic, int]:
        """Return the topics to watch, each from its revision."""
        topics: dict[Topic, int] = {}
        if self._may_lead and self.leadership is not None:
            topics[_LEADERSHIP] = self._leadership_seen + 1
            if self.role is Role.FOLLOWER and self.leadership.leader:
                topics[Topic(TopicKind.NODE, self.leadership.leader)] = self._leadership_seen + 1
        if self.role is Role.LEADER and self.group is not None:
            topics[_GROUP] = self.group.revision + 1
            topics[_ACKNOWLEDGEMENTS] = self.group.revision + 1
        return topics

    def elected(self, leadership: Leadership, now: float) -> None:
        """Handle that this node leads the term."""
        if self.role is not Role.LEADER:
            self.role = ROLE.move(self.role, Vote.ELECTED)
        self._follow(leadership, leadership.revision)
        self._forget_group()
        self._moved_at.clear()
        self._improving.clear()
        self._elected_at, self._improved_at = now, -math.inf
        self._changed_at = now
        self._changed_revision = leadership.revision

    def follows(self, leadership: Leadership, revision: int) -> None:
        """Handle that another node leads the term, or none does, as seen at ``revision``."""
        if self.role is Role.LEADER:
            self.deposed()
        self.role = ROLE.move(self.role, Vote.FOLLOWS)
        self._follow(leadership, revision)

    def _follow(self, leadership: Leadership, seen: int) -> None:
        self.leadership = leadership
        self._leadership_seen = seen
        self._campaign_due = not leadership.leader
        self._campaign_at = -math.inf

    def resigned(self, leadership: Leadership, now: float) -> None:
        """Handle that the term has no leader. Others campaign at once, this node after a lease's time."""
        if self.role is Role.LEADER:
            self.deposed()
        self._follow(leadership, leadership.revision)
        self._campaign_at = now + self._timings.lease_ttl_s

    def deposed(self) -> None:
        """Revert to follower, as another term was seen, and find out who leads (RB-6)."""
        self.role = ROLE.move(self.role, Vote.DEPOSED)
        self._drop()

    def _forget_group(self) -> None:
        self.group = self.asked = self.plan = self._basis = None
        self._keys.clear()
        self._whole_at = self._lost_at = 0
        self._acknowledgements_missed = False
        self._graces.clear()
        self._grace_ends = None

    def _drop(self) -> None:
        self._forget_group()
        self._changed_at = self._published_at = self._improve_at = None
        self._acknowledged.clear()
        self._campaign_due = True
        self._tries = 0

    def session_ended(self) -> None:
        """Give up the role: the node is no member any more (RB-22)."""
        self.role = ROLE.move(self.role, Vote.SESSION_ENDED)
        self.leadership = None
        self._campaign_at = -math.inf
        self._drop()

    def leadership_changed(self, revision: int, lost: bool = False) -> bool:
        """Handle a change of the term or its leader, or a possible one if the watch ``lost`` its history.

        Return True if that deposes this node. A leader that only may have been deposed leads on: its next
        heartbeat shows it, and until then nothing that it writes takes effect in another term (RB-6).
        """
        if revision <= self._leadership_seen:
            return False
        if self.role is Role.LEADER:
            return not lost
        self._campaign_due = True
        self._campaign_at = -math.inf
        return False

    def node_gone(self, node: NodeId, revision: int) -> None:
        """Find out who leads, if the node that may be gone is the leader that this node follows."""
        if self.role is Role.FOLLOWER and self.leadership is not None and self.leadership.leader == node:
            self.leadership_changed(revision)

    def group_noticed(self, noticed: Noticed, now: float) -> None:
        """Handle a notice of changed members, resources or drains, or of lost history.

        A notice may come after a reading of a later revision that did not read its keys. The changes of
        operators are in that reading, but those of foreign writers may not be (RB-46).
        """
        if self.role is not Role.LEADER:
            return
        if noticed.lost:
            self._lost_at = max(self._lost_at, noticed.revision)
        for key in noticed.keys:
            if self._unread(key, noticed.revision):
                self._keys[key] = max(noticed.revision, self._keys.get(key, 0))
        self.group_changed(noticed.revision, now)
        self._keep_later_changes(now)

    def _unread(self, key: str, revision: int) -> bool:
        """Return True if a change of the key at a revision may not be in the group that was read."""
        if self.group is None or self._read is None:
            return revision > self._whole_at
        prefix = key[: key.rfind("/") + 1]
        return revision > max(self._whole_at, self._read.get(key, 0), self._read.get(prefix, 0))

    def group_changed(self, revision: int, now: float) -> None:
        """Handle a change of members, resources or drains at ``revision`` (RB-7, RB-9)."""
        if self.role is not Role.LEADER or (self.group is not None and revision <= self.group.revision):
            return
        self._changed_revision = max(self._changed_revision, revision)
        if self._changed_at is None:
            self._changed_at = now

    def next_beat_reads_fingerprint(self) -> bool:
        """Count a heartbeat. Return True if it is to read the fingerprint (RB-45)."""
        if self.role is not Role.LEADER:
            return False
        self._beats += 1
        members = len(self.group.members) if self.group is not None else 0
        return self._beats % (members // MEMBERS_PER_BEAT + 1) == 0

    def seen_alive(self, alive: Alive, now: float) -> None:
        """Make up for lost notices."""
        if not alive.leader_alive:
            self._campaign_due = self._campaign_due or self.role is not Role.LEADER
        if self.group is None or alive.fingerprint is None:
            return
        if alive.fingerprint != self.group.fingerprint:
            self.group_changed(alive.revision, now)
        # A notice of a later acknowledgement does not prove that those before it were noticed (RB-19). But
        # while notices come, more are on their way, and all members are many to read again (RB-45).
        noticed, self._acknowledgement_noticed = self._acknowledgement_noticed, False
        newer = alive.fingerprint.acknowledgements[1] > self._acknowledgements_read
        if newer and not (noticed or self._completed):
            self._miss_acknowledgements(now)

    def _miss_acknowledgements(self, now: float) -> None:
        """Have all acknowledgements read with the next reading of the group."""
        self._acknowledgements_missed = True
        if self._changed_at is None:
            self._changed_at = now

    @property
    def rebalance_at(self) -> float | None:
        """The time at which to read the group for a rebalance; None while there is no reason to (RB-8)."""
        if self.role is not Role.LEADER:
            return None
        due = (at for at in (self._improve_at, self._grace_ends) if at is not None)
        at = min(due, default=None)
        if self._changed_at is not None:
            # The changes settle first, also if more may move before: one reading is for both.
            at = self._changed_at + (self._timings.settle_time_s if self.group is not None else 0.0)
        if at is None:
            return None
        if self._published_at is not None:
            at = max(at, self._published_at + self._timings.min_rebalance_interval_s)
        return at

    def reading_group(self, session: Session, leadership: Leadership) -> ReadGroup:
        """Return the command that reads the group; changes from now on lead to another read."""
        self._changed_at = self._improve_at = self._grace_ends = None
        return ReadGroup(
            session,
            leadership,
            known=None if self._lost_at > self._whole_at else self.group,
            reread_shares=bool(self._attempts),
            reread_acknowledgements=self._acknowledgements_missed,
            acknowledged_until=self._acknowledgements_read if self.group is not None else 0,
            keys=frozenset(self._keys),
        )

    def failed(self, error: str, now: float) -> None:
        """Start over from a fresh read, after a failure to read the group or to publish."""
        self.last_error = error
        self.plan = None
        self._changed_at = now
        self._tries += 1

    def publish_unknown(self, plan: Plan, term: int) -> None:
        """Record that the plan may be committed until the term or the header that it is based on changes."""
        self._publication_unknown = (term, _revision(plan.based_on))

    def _must_forbid(self, group: Group) -> bool:
        """True if a plan that was given up can still be committed, unless another one is."""
        return self._publication_unknown == (self.term, _revision(group.header))

    def group_read(self, command: ReadGroup, outcome: GroupRead, now: float) -> MakePlan:
        """Take the group that was read, and return the request for a plan."""
        group = outcome.group
        if self._inherited_term != self.term:
            self._inherited_term = self.term
            self._inherited_version = max((part.version for part in group.obsolete_parts), default=0)
        if outcome.read is None or command.reread_acknowledgements:
            self._acknowledged = dict(group.acknowledged)
            self._acknowledgements_read = group.revision
            self._acknowledgements_missed = False
        if outcome.read is None:
            self._whole_at = group.revision
        self._basis = self._basis_after(command, outcome)
        if group.header is not None and group.header.term == self.term:
            self._record_improvement(group.header.version, now)
        self.group, self._read = group, outcome.read
        self._keys = {key: at for key, at in self._keys.items() if self._unread(key, at)}
        base = _revision(group.header)
        self._attempts = {version: at for version, at in self._attempts.items() if at == base}
        if self._changed_revision <= group.revision:
            self._changed_at = None
        self._keep_later_changes(now)
        self.asked = MakePlan(
            group,
            self._unused_version(group),
            self._must_forbid(group),
            self._inherited_version,
            frozenset(self._attempts),
            self._basis,
            self._move_limits(group.policy, now),
            self._ended_graces(group, now),
        )
        return self.asked

    def _ended_graces(self, group: Group, now: float) -> frozenset[NodeId]:
        """Count the time since each remembered node was seen to be gone. Return those whose grace is over.

        A new leader does not know when that was, and begins anew: clocks are never compared (RB-39).
        """
        known = self._graces
        self._graces = {
            node: known.get(node, now + min(member.rejoin_grace_s, MAX_REJOIN_GRACE_S))
            for node, member in group.remembered.items()
            if node in group.shares and node not in group.members
        }
        self._grace_ends = min((end for end in self._graces.values() if end > now), default=None)
        return frozenset(node for node, end in self._graces.items() if end <= now)

    def _move_limits(self, policy: Policy, now: float) -> MoveLimits:
        """Return what may move now for a better balance (RB-38)."""
        if not policy.spaces_moves:
            return NO_LIMITS
        self._moved_at = {r: at for r, at in self._moved_at.items() if now < at + policy.cooldown_s}
        return MoveLimits(0 if now < self._improves_from(policy) else None, frozenset(self._moved_at))

    def _improves_from(self, policy: Policy) -> float:
        """The time before which nothing moves for a better balance.

        A new leader does not know what moved before, and counts from its election.
        """
        since_election = self._elected_at + max(policy.move_interval_s, policy.cooldown_s)
        return max(self._improved_at + policy.move_interval_s, since_election)

    def _record_improvement(self, version: int, now: float) -> None:
        """Note the moves of a committed version that only improved the balance."""
        moved = self._improving.pop(version, frozenset())
        if moved:
            self._improved_at = now
            self._moved_at.update(dict.fromkeys(moved, now))

    def _plan_improvement(self, now: float) -> None:
        """Plan again when more may move, if the last plan left the balance to be improved."""
        if not self._improvable or self.group is None:
            return
        policy = self.group.policy
        at = self._improves_from(policy) if policy.spaces_moves else now
        if at <= now and self._moved_at and policy.cooldown_s:
            at = min(self._moved_at.values()) + policy.cooldown_s
        self._improve_at = max(at, now)

    def _basis_after(self, command: ReadGroup, outcome: GroupRead) -> PlanBasis | None:
        """Return the basis for the group that was read, from the one before and the changes."""
        before, after = self.group, outcome.group
        if self._basis is None or outcome.changed is None or before is None:
            return None
        if command.known is not before or after.shares is not before.shares:
            return None
        return self._basis.after(outcome.changed, after.resources)

    def newly_unreadable(self, group: Group) -> bool:
        """Return True if the group has keys that can't be read, and others than when it was read last."""
        known, self._unreadable = self._unreadable, frozenset(group.unreadable)
        return not self._unreadable <= known

    def _keep_later_changes(self, now: float) -> None:
        """Have the group read again if a change is not in what was read (RB-8, RB-9)."""
        if self.group is None or self._changed_at is not None:
            return
        if self._changed_revision > self.group.revision or self._keys or self._lost_at > self._whole_at:
            self._changed_at = now

    def make_plan(self, asked: MakePlan) -> PlanMade:
        """Work out a plan. Depends on nothing that changes, so any thread may call it at any time."""
        group, unsettled = asked.group, asked.basis.unsettled if asked.basis else None
        pins = asked.basis.pins if asked.basis else _pins(group)
        special = asked.basis.special if asked.basis else special_resources(group.resources)
        passing = succession(group, asked.ended, unsettled)
        pinned = _pinned(group, pins, passing)
        problem = _problem(group, pinned, passing, special, unsettled, asked.limits)
        allocation = self._solve(problem)
        targets = intended(group, allocation, passing)
        unplaced = _unplaced(group, targets, unsettled if allocation.is_plain else None, pinned)
        if unplaced is None and unsettled is not None:
            allocation = self._solve(replace(problem, unsettled=None))
            targets = intended(group, allocation, passing)
            unplaced = _unplaced(group, targets, None, pinned)
        plan = self._planned(asked, targets, allocation)
        certificate = allocation.certificate
        return PlanMade(
            asked,
            plan,
            PlanBasis(unplaced, pins, special) if unplaced is not None else None,
            certificate.improvements if plan is not None and group.policy.spaces_moves else frozenset(),
            certificate.improvable and group.policy.max_moves != 0,
            bool(passing.inherited),
        )

    def plan_made(self, made: PlanMade, now: float) -> None:
        """Publish the plan, if there is one and this node still leads as it did when it asked for it."""
        if made.asked is not self.asked:
            return
        self.asked = None
        self.plan = made.plan
        self._improvable = made.improvable
        if made.plan is None:
            self._tries = 0
            self._basis = made.basis
            if made.asked.limits != NO_LIMITS:
                self._plan_improvement(now)
        else:
            self._planned_basis = made.basis
            self._inherits = made.inherits
            self._improving = {v: moved for v, moved in self._improving.items() if v in self._attempts}
            self._improving[made.plan.version] = made.improved
            self._attempted_version = made.plan.version
            self._attempts[made.plan.version] = _revision(made.plan.based_on)
            self._remember(made.plan.version, made.plan.effort)

    def _planned(
        self,
        asked: MakePlan,
        targets: Mapping[NodeId, frozenset[Resource]],
        allocation: Allocation,
    ) -> Plan | None:
        group = asked.group
        previous = _previous(group)
        before = {node: share.version for node, share in group.shares.items()}
        changed = {n for n, share in targets.items() if n not in before or _differ(previous[n], share)}
        remember = {
            node: replace(member, released=frozenset(), registered=0)
            for node, member in group.members.items()
            if member.rejoin_grace_s and node not in group.remembered
        }
        forget = frozenset(group.remembered.keys() - targets.keys())
        if not changed and before.keys() == targets.keys():
            if not (asked.forbids or remember or forget):
                return None
        else:
            changed |= {n for n, member in group.members.items() if member.mode is Mode.EAGER}
        version = asked.version
        return Plan(
            version=version,
            based_on=group.header,
            shares={node: version if node in changed else before[node] for node in targets},
            changed={node: targets[node] for node in changed},
            obsolete=group.obsolete_after(changed | (before.keys() - targets.keys())),
            aborted=group.uncommitted | asked.attempts,
            orphaned=frozenset(
                part for part in group.obsolete_parts if part.version <= asked.inherited_version
            ),
            effort=allocation.effort,
            remember=remember,
            forget=forget,
        )

    def _remember(self, version: int, effort: Effort | None) -> None:
        """Keep the efforts of the latest plans, for one that turns out to be committed later."""
        if effort is None:
            return
        self.efforts[version] = effort
        if len(self.efforts) > _EFFORTS_KEPT:
            del self.efforts[min(self.efforts)]

    def _unused_version(self, group: Group) -> int:
        """Return a version of which no share was ever written, nor can be by a late request."""
        committed = group.header.version if group.header else 0
        obsolete = max((part.version for part in group.obsolete_parts), default=0)
        return max(committed, obsolete, self._attempted_version) + 1

    def learn_own(self, header: Header) -> bool:
        """Return True the first time that this leader sees an allocation which it committed itself.

        It did if the allocation is of the term that it leads: no other node publishes in it (RB-6).
        """
        if header.term != self.term or header.version <= self._committed_version:
            return False
        self._committed_version = header.version
        return True

    def published(self, header: Header, shares: Mapping[NodeId, Share], now: float) -> None:
        """Handle that the plan is committed, with these changed shares."""
        self._tries = 0
        self._attempts.pop(header.version, None)
        if self.group is not None and self.plan is not None:
            kept = {node: share for node, share in self.group.shares.items() if node in self.plan.shares}
            plan, remembered = self.plan, self.group.remembered
            if plan.remember or plan.forget:
                left = {node: member for node, member in remembered.items() if node not in plan.forget}
                remembered = {**left, **plan.remember}
            self.group = replace(
                self.group,
                header=header,
                shares={**kept, **shares},
                obsolete_parts=frozenset(),
                remembered=remembered,
            )
            self._basis = self._planned_basis
        self.plan = None
        self._published_at = now
        self._record_improvement(header.version, now)
        self._plan_improvement(now)
        if self._inherits:
            self._improve_at = now

    def acknowledged(self, node: NodeId, version: int | None, now: float) -> None:
        """Handle that a node completed its share of ``version``; None if the version is unknown."""
        if self.group is None or self.role is not Role.LEADER:
            return
        if version is None:
            self._miss_acknowledgements(now)
        else:
            self._acknowledgement_noticed = True
            self._acknowledged[node] = max(version, self._acknowledged.get(node, 0))

    def _has_completed(self, node: NodeId, version: int) -> bool:
        return self._acknowledged.get(node, 0) >= version

    def newly_completed(self) -> int | None:
        """Return the committed version once, when every node of it has completed its share (RB-19)."""
        group, header = self.group, self.header
        if self.role is not Role.LEADER or group is None or header is None or self._completed:
            return None
        gone = group.remembered.keys() - group.members.keys()  # nobody completes what is kept (RB-39)
        if not all(
            self._has_completed(n, share.version) for n, share in group.shares.items() if n not in gone
        ):
            return None
        self._completed_version = header.version
        return header.version
