"""The four steps: the resources that a node wants, holds and has started, and what to do next.

Nothing here is sent or called. ``Rebalancing`` answers questions ("what must be stopped?") about its
own state, and takes the outcomes. A node may own 100,000 resources, and no turn of its loop may take
long (RB-42). So the differences between what is wanted, held and started are kept as they change, commands
cover ``MAX_BARRIERS`` at most, and what changes everything at once does so by operations on whole sets.

A barrier that is wanted and not held is either to be tried or waits for its holder. One that is held for
nothing started is either ready to be started or spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from itertools import chain, islice
from typing import Any, Final, TypeVar

from rebalanser.core.group.messages import BarriersAdded, Handler, ShareRead
from rebalanser.core.group.states import STEPS, Step
from rebalanser.core.group.types import Header, Mode, NodeId, Resource, Share, Token
from rebalanser.errors import InternalError

NOTHING: frozenset[Resource] = frozenset()
MAX_BARRIERS: Final = 10_000
"""Maximum number of barriers that one command adds, removes or reads (RB-42)."""
BLOCKED_SHOWN: Final = 5
"""Maximum number of resources that a person is shown as waited for."""
AnswerT = TypeVar("AnswerT")


class Releases:
    """The resources that the application has released, until when, and which of them the node key names.

    They outlive a session: each registration names them again.
    """

    def __init__(self) -> None:
        self._until: dict[Resource, float] = {}
        self.resources = NOTHING
        """The resources that are released now."""
        self.next_end = math.inf
        """When the first of them ends; infinity if none does."""
        self.recorded: frozenset[Resource] | None = NOTHING
        """The resources that the node key names; None after a rewrite of unknown outcome."""
        self.revision = 0
        """The revision at which the node key was put."""

    @property
    def unrecorded(self) -> bool:
        """True if the node key has to be rewritten."""
        return self.recorded != self.resources

    def release(self, resource: Resource, until: float) -> bool:
        """Release a resource until then. Return False if it is released for as long already."""
        if until <= self._until.get(resource, -math.inf):
            return False
        self._replace({**self._until, resource: until})
        return True

    def accept(self, resource: Resource) -> None:
        """End the release of a resource."""
        if resource in self._until:
            self._replace({each: until for each, until in self._until.items() if each != resource})

    def expire(self, now: float) -> None:
        """End the releases whose time has passed."""
        if now >= self.next_end:
            self._replace({resource: until for resource, until in self._until.items() if until > now})

    def _replace(self, until: dict[Resource, float]) -> None:
        self._until = until
        self.resources = frozenset(until)
        self.next_end = min(until.values(), default=math.inf)


class Rebalancing:
    """One node's side of the rebalances that it takes part in."""

    def __init__(self, mode: Mode, start_in_batches: bool, releases: Releases) -> None:
        self._mode = mode
        self._releases = releases
        self._start_in_batches = start_in_batches and mode is Mode.COOPERATIVE
        self.header: Header | None = None
        self.share: Share | None = None
        self.pending = False
        """True if a later share is stored, which may be committed yet."""
        self.read_revision = -1
        self.stale_revision = 0
        self.held: dict[Resource, Token] = {}
        self.started: dict[Resource, Token] = {}
        self.stuck: set[Resource] = set()
        self.uncertain: set[Resource] = set()
        self.blocked_since: dict[NodeId, int] = {}
        self.acknowledged = 0
        self.acknowledged_revision = 0
        self.running: Handler | None = None
        self.starting: Mapping[Resource, Token] = {}
        self.stopping = NOTHING
        self.asked: set[Resource] = set()
        """Resources that were asked to stop while a handler ran: they pass OnStop, even if wanted again."""
        self.step = Step.SETTLED
        self._restarting: set[Resource] = set()
        self._giving_back: set[Resource] = set()
        self._leaving: set[Resource] = set()
        self._ready: dict[Resource, Token] = {}
        self._spare: set[Resource] = set()
        self._to_try: set[Resource] = set()
        self._waiting_for: dict[NodeId, set[Resource]] = {}
        self._empty_start_called = False
        self._answers: dict[tuple[str, bool], Any] = {}

    def _changed(self) -> None:
        """Forget the answers to questions; to be called by whatever changes what they are about."""
        self._answers.clear()

    def _once(self, question: str, everything: bool, answer: Callable[[], AnswerT]) -> AnswerT:
        """Answer a question once until something changes."""
        key = (question, everything)
        if key not in self._answers:
            self._answers[key] = answer()
        known: AnswerT = self._answers[key]
        return known

    @property
    def wanted(self) -> frozenset[Resource]:
        """The resources of the share that the node acts on."""
        return self.share.resources if self.share else NOTHING

    @property
    def must_read(self) -> bool:
        """True if the share may have changed since it was read."""
        return self.stale_revision > self.read_revision

    def noticed(self, revision: int, share_version: int | None) -> None:
        """Handle that a share of this node was written or committed; None if its version is unknown."""
        if share_version is None or self.share is None or share_version > self.share.version:
            self.stale_revision = max(self.stale_revision, revision)

    def adopt(self, read: ShareRead) -> bool:
        """Adopt the share that was read. Return True if it is another one than before."""
        self._changed()
        self.read_revision = read.revision
        self.pending = read.pending
        if read.header is not None:
            self.header = read.header
        if read.share is None or (self.share is not None and read.share.version <= self.share.version):
            return False
        before, self.share = self.wanted, read.share
        if self._mode is Mode.EAGER:
            self._restarting = set(self.started)
        if self._restarting or read.share.resources:
            self._empty_start_called = False
        self._compare(before)
        return True

    def _compare(self, before: frozenset[Resource]) -> None:
        """Compute the changes of a new share; ``before`` is what was wanted.

        A share may be replaced as a whole: sets without a common element are taken as they are, which is
        quicker than to work out their difference.
        """
        gone, arrived = before, self.wanted
        if not before.isdisjoint(self.wanted):
            gone, arrived = before.difference(self.wanted), self.wanted.difference(before)
        waiting = ((holder, resources - gone) for holder, resources in self._waiting_for.items())
        self._waiting_for = {holder: kept for holder, kept in waiting if kept}
        self._forget_holders()
        if self._to_try:
            self._to_try -= gone
        self._to_try |= arrived if arrived.isdisjoint(self.held) else arrived.difference(self.held)
        if self._leaving:
            self._leaving -= arrived
        ends_all = len(gone) == len(self.started) and gone.issuperset(self.started)
        stopping = gone if ends_all else gone.intersection(self.started)
        self._leaving.update(self._restarting or stopping, self.asked)
        self._leaving -= self.stuck
        unwanted = gone.intersection(self._ready)
        if len(unwanted) == len(self._ready):
            self._ready = {}
        for resource in unwanted if self._ready else ():
            del self._ready[resource]
        # In eager mode another share may come before all that an earlier one restarts is removed.
        returned = frozenset(self._spare) if self._mode is Mode.EAGER else arrived.intersection(self._spare)
        self._spare -= returned
        self._sort_out(unwanted | returned)

    def _sort_out(self, unstarted: frozenset[Resource]) -> None:
        """Sort barriers that are held for nothing started: what is wanted may start, the rest is spare."""
        ready = unstarted
        for leaving in (self._restarting, self._giving_back):
            if leaving:
                ready = ready.difference(leaving)
        ready = ready.intersection(self.wanted) if ready else ready
        self._spare |= unstarted.difference(ready) if ready else unstarted
        self._ready.update(self._with_tokens(ready))

    def _with_tokens(self, held: frozenset[Resource]) -> Mapping[Resource, Token]:
        """These barriers with their tokens. Most of all are picked in the order of memory: it is quicker."""
        if len(held) == len(self.held):
            return self.held
        if 2 * len(held) > len(self.held):
            return {r: token for r, token in self.held.items() if r in held}
        return {resource: self.held[resource] for resource in held}

    @property
    def blocked(self) -> dict[Resource, NodeId]:
        """Some of the resources that are waited for, with their holders: ``BLOCKED_SHOWN`` at most."""
        every = ((r, holder) for holder, resources in self._waiting_for.items() for r in resources)
        return dict(islice(every, BLOCKED_SHOWN))

    def to_stop(self, everything: bool) -> frozenset[Resource]:
        """Step 1: started resources that must be given up or were asked to stop, or all started ones."""
        return self._once("stop", everything, lambda: self._to_stop(everything))

    def _to_stop(self, everything: bool) -> frozenset[Resource]:
        return frozenset(self.started).difference(self.stuck) if everything else frozenset(self._leaving)

    def to_ask(self, everything: bool) -> frozenset[Resource]:
        """Step 1, while a handler runs: resources to stop after it that were not asked to stop yet."""
        return self._once(
            "ask", everything, lambda: self.to_stop(everything).difference(self.asked, self.stopping)
        )

    def to_remove(self, everything: bool) -> dict[Resource, Token]:
        """Step 2: barriers of no started or wanted resource, at most ``MAX_BARRIERS``."""
        return self._once("remove", everything, lambda: self._to_remove(everything))

    def _to_remove(self, everything: bool) -> dict[Resource, Token]:
        spare = chain(self._spare, self._ready) if everything else self._spare
        return {resource: self.held[resource] for resource in islice(spare, MAX_BARRIERS)}

    def to_find_out(self, everything: bool) -> frozenset[Resource]:
        """Step 2: barriers that may have been added and are not wanted, at most ``MAX_BARRIERS``."""
        return self._once("find out", everything, lambda: self._to_find_out(everything))

    def _to_find_out(self, everything: bool) -> frozenset[Resource]:
        unwanted = self.uncertain if everything else self.uncertain - self.wanted
        return frozenset(islice(unwanted, MAX_BARRIERS))

    def to_add(self) -> frozenset[Resource]:
        """Step 3: barriers that are wanted and not known to be held, at most ``MAX_BARRIERS``."""
        return self._once("add", False, lambda: frozenset(islice(self._to_try, MAX_BARRIERS)))

    @property
    def missing(self) -> bool:
        """True if something is wanted and not held."""
        return bool(self._to_try or self._waiting_for)

    def to_start(self) -> dict[Resource, Token] | None:
        """Step 4: resources that may be started. Empty to report an empty share (RB-18), None for no call."""
        if self._ready and (self._start_in_batches or not self.missing):
            ready = self._ready_and_not_released()
            if ready:
                return ready
        if self.share is not None and not self.wanted and not self.started and not self._empty_start_called:
            return {}
        return None

    def _ready_and_not_released(self) -> dict[Resource, Token]:
        """Return what may be started, without what the application released while it was stopped.

        The barriers of those are kept until the leader gives them to another node. In eager mode OnStart gets
        all of a share, so that what was released starts once more.
        """
        released = self._releases.resources if self._mode is Mode.COOPERATIVE else NOTHING
        if self._ready.keys().isdisjoint(released):
            return self._ready
        return {resource: token for resource, token in self._ready.items() if resource not in released}

    @property
    def completed(self) -> bool:
        """True if the node owns exactly its share, and its handlers have returned."""
        return (
            self.share is not None
            and self.running is None
            and not self.uncertain
            and self._owns_its_share
            and self.to_start() is None
        )

    @property
    def _owns_its_share(self) -> bool:
        return (
            len(self.wanted) == len(self.held) == len(self.started) and not self.missing and not self._leaving
        )

    def calling_start(self, owned: Mapping[Resource, Token]) -> None:
        """Record a call of OnStart: access begins when it is entered."""
        self._call(Handler.START)
        self.starting = owned
        self.started.update(owned)
        kept = self._ready.keys() - owned.keys() if len(owned) < len(self._ready) else NOTHING
        self._ready = {resource: self._ready[resource] for resource in kept}
        self._empty_start_called = not owned

    def ask(self, resources: Collection[Resource]) -> None:
        """Record that these are asked to stop while a handler runs."""
        self._changed()
        self.asked.update(resources)
        self._leaving.update(resources)

    def calling_stop(self, resources: frozenset[Resource]) -> None:
        """Record a call of OnStop."""
        self._call(Handler.STOP)
        self.stopping = resources

    def _call(self, handler: Handler) -> None:
        self._changed()
        if self.running is not None:
            raise InternalError(f"{handler} called while {self.running} runs")
        self.running = handler

    def start_returned(self, entered: bool) -> None:
        """Handle the end of OnStart, returned or raised; if it was not ``entered`` there was no access."""
        self._changed()
        self.running = None
        if not entered:
            self._end_access(frozenset(self.starting))
            self._empty_start_called = False
        self.starting = {}

    def stop_returned(self, failed: bool) -> None:
        """End access, as OnStop returned. If it raised, access is taken as not stopped (RB-24)."""
        self._changed()
        self.running = None
        resources, self.stopping = self.stopping, NOTHING
        if failed:
            self.stuck.update(resources)
            self.asked -= resources
            self._leaving -= resources
        else:
            self._end_access(resources)

    def _end_access(self, resources: frozenset[Resource]) -> None:
        if len(resources) == len(self.started):
            self.started, self.asked, self._leaving = {}, set(), set()
        else:
            self.asked -= resources
            self._leaving -= resources
            for resource in resources:
                del self.started[resource]
        if self.held:
            self._sort_out(resources)

    def barriers_added(self, outcome: BarriersAdded) -> None:
        """Handle that some barriers were added and others are held by other nodes.

        If the answer to an earlier attempt was lost, only "added" makes a barrier certain: that attempt may
        have taken effect before the allocation changed, or may yet, once the holder is gone.
        """
        self._changed()
        if outcome.superseded:
            self.stale_revision = max(self.stale_revision, outcome.revision, self.read_revision + 1)
        if self.uncertain:
            self.uncertain -= outcome.added.keys()
        self.uncertain |= outcome.unknown
        self._hold(outcome.added)
        self._to_try.difference_update(outcome.blocked)
        for resource, holder in outcome.blocked.items():
            if resource in self.wanted and resource not in self.held:
                self._waiting_for.setdefault(holder, set()).add(resource)
                self.blocked_since.setdefault(holder, outcome.revision)
        self._forget_holders()

    def _hold(self, barriers: Mapping[Resource, Token]) -> None:
        self.held.update(barriers)
        self._to_try.difference_update(barriers)
        self._sort_out(frozenset(barriers).difference(self.started))

    def barriers_unknown(self, asked: frozenset[Resource]) -> None:
        """Handle a lost answer: each of these barriers may be this node's, now or a little later."""
        self._changed()
        self.uncertain |= asked

    def barriers_read(
        self, asked: frozenset[Resource], mine: Mapping[Resource, Token]
    ) -> dict[Resource, Token]:
        """Record which of these barriers are this node's. Return those that it did not know it held."""
        self._changed()
        found = {resource: token for resource, token in mine.items() if self.held.get(resource) != token}
        self.uncertain -= asked
        self._hold(mine)
        return found

    def removal_unknown(self, resources: Collection[Resource]) -> None:
        """Handle a lost answer: each of these barriers may be gone, now or a little later.

        So none of them protects anything any more, even if a newer allocation gives it back.
        """
        self._changed()
        self._giving_back.update(resources)
        self._spare.update(resources)
        for resource in resources if self._ready else ():
            self._ready.pop(resource, None)

    def barriers_removed(self, resources: Collection[Resource]) -> None:
        """None of these barriers is this node's any more."""
        self._changed()
        for resource in resources:
            self.held.pop(resource, None)
        for held in (self._restarting, self._giving_back, self._spare):
            held.difference_update(resources)
        for resource in resources if self._ready else ():
            self._ready.pop(resource, None)
        self._to_try |= self.wanted.intersection(resources)

    def unblocked(self, holder: NodeId, revision: int) -> None:
        """Try again what ``holder`` blocked: it removed barriers, or left, at ``revision``."""
        if revision > self.blocked_since.get(holder, revision):
            self._changed()
            self._to_try |= self._waiting_for.pop(holder)
            self._forget_holders()

    def _forget_holders(self) -> None:
        """Forget holders that block nothing any more."""
        self.blocked_since = {
            holder: since for holder, since in self.blocked_since.items() if holder in self._waiting_for
        }

    def abandon(self) -> None:
        """Give up what could not be stopped: the session that owned it is over."""
        self._changed()
        self.stuck.clear()
        self.started.clear()
        self.asked.clear()
        self._leaving.clear()

    def forget(self) -> None:
        """Forget every barrier, as the session is gone (RB-22). Started resources are still to be stopped."""
        self._changed()
        self.header = None
        self.share = None
        self.pending = False
        self._leaving = set(self.started) - self.stuck
        self.read_revision = -1
        self.stale_revision = 0
        self.held.clear()
        self.uncertain.clear()
        self.acknowledged = self.acknowledged_revision = 0
        self._restarting.clear()
        self._giving_back.clear()
        self._spare.clear()
        self._ready = {}
        self._to_try.clear()
        self._waiting_for.clear()
        self._forget_holders()
        self._empty_start_called = False

    def observe_step(self, everything: bool) -> None:
        """Find the step that the node is in, and check that it may follow the one before."""
        step = self._step(everything)
        if step is not self.step and step not in STEPS[self.step]:
            raise InternalError(f"step {step} may not follow {self.step}")
        self.step = step

    def _step(self, everything: bool) -> Step:
        if self.running is not None:
            return Step.STOPPING if self.running is Handler.STOP else Step.STARTING
        if self.to_stop(everything):
            return Step.STOPPING
        if self.to_remove(everything) or self.to_find_out(everything):
            return Step.REMOVING
        if not everything and self.missing:
            return Step.ADDING
        if not everything and self.to_start():
            return Step.STARTING
        return Step.SETTLED
