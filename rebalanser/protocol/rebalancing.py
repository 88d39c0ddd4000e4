"""The four steps: what a node wants, holds and has started, and therefore what is the next thing to do.

Nothing here is sent or called. :class:`Rebalancing` answers questions ("what must be stopped?") about its
own state, and is told what came of it. A node may own 100,000 resources, so each question is answered once
until something changes, and by operations on whole sets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rebalanser.errors import InternalError
from rebalanser.protocol.messages import BarriersAdded, Handler, ShareRead
from rebalanser.protocol.states import STEPS, Step
from rebalanser.protocol.types import Header, Mode, NodeId, Resource, Share, Token

NOTHING: frozenset[Resource] = frozenset()
AnswerT = TypeVar("AnswerT")


class Rebalancing:
    """One node's side of the rebalances that it takes part in."""

    def __init__(self, mode: Mode, start_in_batches: bool) -> None:
        self._mode = mode
        self._start_in_batches = start_in_batches and mode is Mode.COOPERATIVE
        self.header: Header | None = None
        self.share: Share | None = None
        self.read_revision = -1
        self.stale_revision = 0
        self.held: dict[Resource, Token] = {}
        self.started: dict[Resource, Token] = {}
        self.stuck: set[Resource] = set()
        self.uncertain: set[Resource] = set()
        self.blocked: dict[Resource, NodeId] = {}
        self.blocked_since: dict[NodeId, int] = {}
        self.acknowledged = 0
        self.acknowledged_revision = 0
        self.running: Handler | None = None
        self.starting: frozenset[Resource] = NOTHING
        self.asked: set[Resource] = set()
        """What was asked to stop while a handler ran: it passes OnStop, even if it is wanted again."""
        self.step = Step.SETTLED
        self._restarting: set[Resource] = set()
        self._giving_back: set[Resource] = set()
        self._told_of_nothing = False
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
        """Whether the share may have changed since it was read."""
        return self.stale_revision > self.read_revision

    def noticed(self, revision: int, share_version: int | None) -> None:
        """The allocation changed at ``revision``; this node's share stands since ``share_version``."""
        unchanged = self.share is not None and share_version == self.share.version
        if unchanged and self.header is not None and not self.must_read:
            if revision > self.header.revision:
                self.header = replace(self.header, revision=revision)
            self.read_revision = max(self.read_revision, revision)
        self.stale_revision = max(self.stale_revision, revision)

    def adopt(self, read: ShareRead) -> bool:
        """Act on what was read from now on. Whether the share is another than before."""
        self._changed()
        self.read_revision = read.revision
        if read.header is not None:
            self.header = read.header
        if read.share is None or (self.share is not None and read.share.version <= self.share.version):
            return False
        self.share = read.share
        self.blocked = {r: holder for r, holder in self.blocked.items() if r in read.share.resources}
        self._forget_holders()
        if self._mode is Mode.EAGER:
            self._restarting = set(self.started)
        if self._restarting or read.share.resources:
            self._told_of_nothing = False
        return True

    def to_stop(self, everything: bool) -> frozenset[Resource]:
        """Step 1: what is started and must be given up or was asked to stop, or all of it."""
        return self._once("stop", everything, lambda: self._to_stop(everything))

    def _to_stop(self, everything: bool) -> frozenset[Resource]:
        if everything:
            return frozenset(self.started).difference(self.stuck)
        leaving = self._restarting | self.asked
        if not leaving and self.wanted.issuperset(self.started):
            return NOTHING
        started = frozenset(self.started)
        return (started.difference(self.wanted) | (started & leaving)).difference(self.stuck)

    def to_remove(self, everything: bool) -> dict[Resource, Token]:
        """Step 2: the barriers that are held for nothing that is started or wanted."""
        return self._once("remove", everything, lambda: self._to_remove(everything))

    def _to_remove(self, everything: bool) -> dict[Resource, Token]:
        leaving = self._restarting | self._giving_back
        if not everything and not leaving and self.wanted.issuperset(self.held):
            return {}
        spare = frozenset(self.held).difference(self.started)
        if not everything:
            spare = spare.difference(self.wanted) | (spare & leaving)
        return {r: token for r, token in self.held.items() if r in spare} if spare else {}

    def to_find_out(self, everything: bool) -> frozenset[Resource]:
        """Step 2: the barriers that may have been added and are not wanted."""
        return frozenset(self.uncertain if everything else self.uncertain - self.wanted)

    def to_add(self) -> frozenset[Resource]:
        """Step 3: the barriers that are wanted, and not known to be held by another node."""
        return self._once("add", False, lambda: self.missing.difference(self.blocked))

    @property
    def missing(self) -> frozenset[Resource]:
        """What is wanted and not held."""
        return self._once("missing", False, lambda: self.wanted.difference(self.held))

    def to_start(self) -> dict[Resource, Token] | None:
        """Step 4: what may be started; empty for "you own nothing" (RB-18); None for nothing to say."""
        return self._once("start", False, self._to_start)

    def _to_start(self) -> dict[Resource, Token] | None:
        idle = self.wanted.difference(self.started, self._restarting, self._giving_back)
        ready = {r: token for r, token in self.held.items() if r in idle} if idle else {}
        if ready and (self._start_in_batches or not self.missing):
            return ready
        if self.share is not None and not self.wanted and not self.started and not self._told_of_nothing:
            return {}
        return None

    @property
    def completed(self) -> bool:
        """Whether the node owns what its share says and nothing else, and its handlers have returned."""
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
            len(self.wanted) == len(self.held) == len(self.started)
            and not self.missing
            and self._once("started", False, lambda: self.wanted.issuperset(self.started))
        )

    def calling_start(self, owned: Mapping[Resource, Token]) -> None:
        """OnStart is being called: access begins when it is entered."""
        self._changed()
        self._call(Handler.START)
        self.starting = frozenset(owned)
        self.started.update(owned)
        self._told_of_nothing = not owned

    def ask(self, resources: Collection[Resource]) -> None:
        """These are asked to stop while a handler runs."""
        self._changed()
        self.asked.update(resources)

    def calling_stop(self) -> None:
        """OnStop is being called."""
        self._call(Handler.STOP)

    def _call(self, handler: Handler) -> None:
        if self.running is not None:
            raise InternalError(f"{handler} called while {self.running} runs")
        self.running = handler

    def start_returned(self, entered: bool) -> None:
        """OnStart returned or raised; where it was not ``entered`` there was no access."""
        self._changed()
        self.running = None
        if not entered:
            for resource in self.starting:
                self.started.pop(resource)
            self.asked -= self.starting
            self._told_of_nothing = False
        self.starting = NOTHING

    def stop_returned(self, resources: Iterable[Resource], failed: bool) -> None:
        """OnStop returned: access has ended. If it raised, access is taken as not stopped (RB-24)."""
        self._changed()
        self.running = None
        self.asked.difference_update(resources)
        if failed:
            self.stuck.update(resources)
            return
        for resource in resources:
            self.started.pop(resource)

    def barriers_added(self, outcome: BarriersAdded) -> None:
        """Some barriers were added, others are held by other nodes.

        Where an earlier attempt's answer was lost only "added" ends the doubt: that attempt may have taken
        effect before the allocation changed, or may yet, once the holder is gone.
        """
        self._changed()
        if outcome.superseded:
            self.stale_revision = max(self.stale_revision, outcome.revision, self.read_revision + 1)
        if self.uncertain:
            self.uncertain -= outcome.added.keys()
        self.uncertain |= outcome.unknown
        self.held.update(outcome.added)
        self.blocked.update((r, holder) for r, holder in outcome.blocked.items() if r in self.wanted)
        for holder in outcome.blocked.values():
            self.blocked_since.setdefault(holder, outcome.revision)
        self._forget_holders()

    def barriers_unknown(self, asked: frozenset[Resource]) -> None:
        """An answer was lost: each of these barriers may be this node's, now or a little later."""
        self.uncertain |= asked

    def barriers_read(
        self, asked: frozenset[Resource], mine: Mapping[Resource, Token]
    ) -> dict[Resource, Token]:
        """It is known again which of these barriers are this node's. Those that it did not know to hold."""
        self._changed()
        found = {resource: token for resource, token in mine.items() if self.held.get(resource) != token}
        self.uncertain -= asked
        self.held.update(mine)
        return found

    def removal_unknown(self, resources: Iterable[Resource]) -> None:
        """An answer was lost: each of these barriers may be gone, now or a little later.

        So none of them protects anything any more, not even if a newer allocation gives it back.
        """
        self._changed()
        self._giving_back.update(resources)

    def barriers_removed(self, resources: Iterable[Resource]) -> None:
        """None of these barriers is this node's any more."""
        self._changed()
        for resource in resources:
            self.held.pop(resource, None)
            self._restarting.discard(resource)
            self._giving_back.discard(resource)

    def released(self, holder: NodeId, revision: int) -> None:
        """``holder`` removed barriers, or left, at ``revision``: what it blocked is worth another try."""
        self._changed()
        if revision > self.blocked_since.get(holder, revision):
            self.blocked = {r: node for r, node in self.blocked.items() if node != holder}
            self._forget_holders()

    def _forget_holders(self) -> None:
        """Keep since when a holder blocks only while it does: a release is news if it came later."""
        holders = set(self.blocked.values())
        self.blocked_since = {node: since for node, since in self.blocked_since.items() if node in holders}

    def abandon(self) -> None:
        """What could not be stopped is given up: the session that owned it is over."""
        self._changed()
        self.stuck.clear()
        self.started.clear()
        self.asked.clear()

    def forget(self) -> None:
        """The session is gone, and every barrier with it (RB-22). What is started is still to be stopped."""
        self._changed()
        self.header = None
        self.share = None
        self.read_revision = -1
        self.stale_revision = 0
        self.held.clear()
        self.uncertain.clear()
        self.blocked.clear()
        self.blocked_since.clear()
        self.acknowledged = self.acknowledged_revision = 0
        self._restarting.clear()
        self._giving_back.clear()
        self._told_of_nothing = False

    def observe_step(self, everything: bool) -> None:
        """Work out which step the node is in, and check that it may follow the one before."""
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
