"""The published suite for coordinators sees faults, and quotes the contract truly."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rebalanser.core.group import TopicKind, messages, types
from rebalanser.core.group.messages import Join, Noticed
from rebalanser.registry import Coordinator, GroupKeys, RegistryCoordinator, Translation, coordinator
from rebalanser.registry.contract import Delete, Transaction, Unchanged
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from rebalanser.testing.coordinator_suite import (
    CoordinatorConformance,
    CoordinatorHarness,
    NoticeRecorder,
    plant_foreign_keys,
)
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rebalanser.core.group import Command, Session, Topic
    from rebalanser.core.group.messages import Outcome
    from rebalanser.core.group.types import Header, Leadership, SharePart
    from rebalanser.registry.contract import Capabilities, Guard, KeyValue, WatchEvent
    from rebalanser.registry.coordinator import Listener, Progress
    from rebalanser.registry.script import CommandScript, Script

TESTS = dict(inspect.getmembers(CoordinatorConformance, inspect.isfunction))


def plain(text: str) -> str:
    return " ".join(re.sub(r"``[\w.]*?(\w+)``", r"\1", text).replace("`", "").replace("**", "").split())


CONTRACT = plain(" ".join(map(inspect.getsource, (coordinator, messages, types)))).lower()


@pytest.mark.parametrize("name", sorted(name for name in TESTS if name.startswith("test_")))
def test_every_quotation_is_in_the_contract(name: str) -> None:
    quotations = re.findall(r'"([^"]+)"', inspect.getdoc(TESTS[name]) or "")
    assert quotations, f"{name} does not say what it holds"
    for quotation in quotations:
        assert plain(quotation).lower() in CONTRACT


class NoSessionGuard(Translation):
    def _alive(self, session: Session) -> tuple[Guard, ...]:
        return ()


class NoTermGuard(Translation):
    def _leads(self, leadership: Leadership) -> tuple[Guard, ...]:
        return ()


class NoShareGuard(Translation):
    def _has_share(self, node: str, version: int, revision: int) -> tuple[Guard, ...]:
        return ()


class GuardedByAllocation(Translation):
    def _has_share(self, node: str, version: int, revision: int) -> tuple[Guard, ...]:
        return (Unchanged(self.keys.header, revision),)


class SharesInOnePart(Translation):
    def _part_bytes(self, share: SharePart) -> int:
        return sys.maxsize


class NoBaseGuard(Translation):
    def _based_on(self, header: Header | None) -> tuple[Guard, ...]:
        return ()


class TakesHeldBarriers(Translation):
    def _free(self, barrier: str) -> tuple[Guard, ...]:
        return ()


class RemovesAnyBarrier(Translation):
    def _mine(self, barrier: str, token: int) -> tuple[Guard, ...]:
        return ()


class TakesOthersForMine(Translation):
    def _is_mine(self, barrier: KeyValue, session: Session) -> bool:
        return True


class ForgetsWhoRegistered(Translation):
    def _unregistered(self, key: str) -> tuple[Guard, ...]:
        return ()


class OvertakenAcknowledgements(Translation):
    def _not_overtaken(self, key: str, revision: int) -> tuple[Guard, ...]:
        return ()


class OvertakenRecords(OvertakenAcknowledgements):
    pass


class RegistersWithoutRefusals(Translation):
    def _join(self, command: messages.Join) -> CommandScript:
        return super()._join(replace(command, member=replace(command.member, released=frozenset())))


class BarrierUnderResource(Translation):
    """Removes a resource's barrier along with it, as the original does."""

    def remove_resources(self, resources: Sequence[str], progress: Progress) -> Script[int]:
        yield Transaction(then=tuple(Delete(self.keys.barrier(resource)) for resource in resources))
        return (yield from super().remove_resources(resources, progress))


class SilentAboutRemovals(Translation):
    def notices(self, topic: Topic, events: Sequence[WatchEvent]) -> list[Noticed]:
        return [n for n in super().notices(topic, events) if n.topic.kind is not TopicKind.REMOVALS]


class SilentAboutThePast(RegistryCoordinator):
    def watch(self, node: str, topics: Mapping[Topic, int], listener: Listener) -> None:
        now = self.read().group.revision + 1
        super().watch(node, dict.fromkeys(topics, now), listener)


class OneSpaceForAllGroups(Translation):
    def __init__(self, _keys: GroupKeys, capabilities: Capabilities) -> None:
        super().__init__(GroupKeys("root", "shared"), capabilities)


class CountsFromTheAnswer(RegistryCoordinator):
    """Takes the instant at which a registration was answered for the one at which it was asked for."""

    def perform(self, command: Command) -> Outcome:
        outcome = super().perform(command)
        if isinstance(command, Join) and isinstance(outcome, messages.Joined):
            return messages.Joined(outcome.session, outcome.proven_at + 1.0)
        return outcome


class TellsRemovalsOfOthers(RegistryCoordinator):
    """Takes what is gone by now for what this command removed."""

    def perform(self, command: Command) -> Outcome:
        outcome = super().perform(command)
        if isinstance(outcome, messages.BarriersRemoved):
            return replace(outcome, removed_at=dict.fromkeys(outcome.resources, outcome.revision))
        return outcome


class TellsRemovalsLate(RegistryCoordinator):
    """Takes for the removal a revision by which another may hold the barrier already."""

    def perform(self, command: Command) -> Outcome:
        outcome = super().perform(command)
        if isinstance(outcome, messages.BarriersRemoved):
            late = {resource: at + 1_000 for resource, at in outcome.removed_at.items()}
            return replace(outcome, removed_at=late)
        return outcome


class KeepsTheTerm(Translation):
    def _resign(self, command: messages.Resign) -> CommandScript:
        yield Transaction(then=())
        leadership = command.leadership
        return messages.Resigned(replace(leadership, leader="", revision=leadership.revision + 1))


class LeasesInAnotherOrder(Translation):
    def leases(self, nodes: Sequence[str]) -> Script[Mapping[str, int]]:
        found = yield from super().leases(nodes)
        return dict(zip(found, reversed(found.values()), strict=True))


class LeavesWithoutRevoking(Translation):
    def _leave(self, command: messages.Leave) -> CommandScript:
        yield Transaction(then=(Delete(self.keys.node(command.session.node)),))
        return messages.Left()


class Faulty(CoordinatorHarness):
    """Groups in a memory store, by a translation or a coordinator with a fault."""

    min_ttl_s = 1.0

    def __init__(self, fault: type[Translation | RegistryCoordinator], patience_s: float) -> None:
        self.patience_s = patience_s
        self._fault = fault
        self._clock = FakeClock()
        self._store = MemoryStore(self._clock)

    def open(self, group: str = "group") -> Coordinator:
        kind = self._fault if issubclass(self._fault, RegistryCoordinator) else RegistryCoordinator
        registry = MemoryRegistry(self._store)
        opened = kind(registry, "root", group, self._clock.now, 10)
        if issubclass(self._fault, Translation):
            opened._translation = self._fault(GroupKeys("root", group), registry.capabilities)
        return opened

    def now(self) -> float:
        return self._clock.now()

    def let_pass(self, seconds: float) -> None:
        self._clock.advance(seconds)
        self._store.expire()

    def lose_history(self) -> None:
        self._store.compact(self._store.revision + 1)

    def plant_foreign(self) -> Callable[[], bool]:
        return plant_foreign_keys(lambda: MemoryRegistry(self._store), GroupKeys("root", "group"))


class TidiesUp(Translation):
    """Deletes what it can't read when a plan is published."""

    def _publish(self, command: messages.Publish) -> CommandScript:
        outcome = yield from super()._publish(command)
        yield Transaction(then=(Delete(f"{self.keys.prefix}shares/foo"),))
        return outcome


class SilentAboutTheUnreadable(Translation):
    def read(self) -> Script[coordinator.GroupView]:
        view = yield from super().read()
        return replace(view, group=replace(view.group, unreadable={}))


FAULTS: dict[type[Translation | RegistryCoordinator], str] = {
    NoSessionGuard: "test_every_command_of_an_ended_session_is_refused",
    NoTermGuard: "test_an_earlier_term_can_do_nothing",
    NoShareGuard: "test_another_share_adds_nothing",
    GuardedByAllocation: "test_the_shares_of_others_may_change_meanwhile",
    SharesInOnePart: "test_a_share_may_be_larger_than_a_request",
    NoBaseGuard: "test_a_plan_on_an_old_allocation_conflicts",
    TakesHeldBarriers: "test_a_held_barrier_blocks",
    RemovesAnyBarrier: "test_only_own_barriers_are_removed",
    TakesOthersForMine: "test_a_barrier_has_one_holder",
    ForgetsWhoRegistered: "test_joining_again_makes_no_second_member",
    OvertakenAcknowledgements: "test_a_late_acknowledgement_changes_nothing",
    OvertakenRecords: "test_a_late_record_changes_nothing",
    RegistersWithoutRefusals: "test_a_record_names_what_its_node_has_released",
    BarrierUnderResource: "test_removing_a_resource_leaves_its_barrier",
    SilentAboutRemovals: "test_notices_of_a_holder_that_removes_barriers",
    SilentAboutThePast: "test_a_watch_tells_of_the_past",
    OneSpaceForAllGroups: "test_groups_never_touch_each_other",
    CountsFromTheAnswer: "test_life_is_proven_from_before_the_request",
    TellsRemovalsOfOthers: "test_a_removal_is_told_where_it_happened",
    TellsRemovalsLate: "test_each_of_many_removals_is_told_where_it_happened",
    KeepsTheTerm: "test_whoever_resigned_leads_no_more_and_anybody_may_lead_next",
    TidiesUp: "test_what_no_rebalanser_wrote_is_reported_and_left_alone",
    SilentAboutTheUnreadable: "test_what_no_rebalanser_wrote_is_reported_and_left_alone",
    LeasesInAnotherOrder: "test_the_ages_of_heartbeats_are_told",
    LeavesWithoutRevoking: "test_leaving_takes_all_of_the_session_along",
}


@pytest.fixture
def run() -> Iterator[Callable[[str, CoordinatorHarness], None]]:
    with ExitStack() as stack:

        def run_test(name: str, harness: CoordinatorHarness) -> None:
            def connect(group: str = "group") -> Coordinator:
                return stack.enter_context(closing(harness.open(group)))

            fixtures = {
                "harness": harness,
                "connect": connect,
                "coordinator": connect(),
                "notices": NoticeRecorder(harness.patience_s),
            }
            parameters = list(inspect.signature(TESTS[name]).parameters)[1:]
            TESTS[name](CoordinatorConformance(), **{each: fixtures[each] for each in parameters})

        yield run_test


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_sees_a_fault(
    fault: type[Translation | RegistryCoordinator], run: Callable[[str, CoordinatorHarness], None]
) -> None:
    run(FAULTS[fault], Faulty(Translation, patience_s=PATIENCE_S))
    with pytest.raises(AssertionError):
        run(FAULTS[fault], Faulty(fault, patience_s=0.1))
