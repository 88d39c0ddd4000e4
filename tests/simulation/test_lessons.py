"""How others failed at exactly this, each one as a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import pytest

from rebalanser.core.group import Fact, FactKind, Membership, Mode
from simulation.group import Armed, FaultKind, HostPlan, Process
from simulation.group.scenario import TIMINGS

if TYPE_CHECKING:
    from tests.simulation.conftest import Script

MakeScript: TypeAlias = "Callable[..., Script]"


@pytest.mark.lesson(1)
@pytest.mark.rule("RB-26", "RB-11")
def test_a_leader_that_stops_gracefully_keeps_its_barriers_until_onstop_has_returned(
    script: MakeScript,
) -> None:
    group = script(hosts=3, resources=6)
    group.start()
    assert group.world.oracle.leader.startswith("host-0")
    began = group.world.now
    group[0].handler_faults.append(FaultKind.HANDLER_SLOW)
    group.world.stop(group[0])
    group.settle()
    stopped = group.times(FactKind.STOP_RETURNED, 0, began)
    taken_over = group.times(FactKind.START_ENTERED, 1, began) + group.times(FactKind.START_ENTERED, 2, began)
    assert len(stopped) == 2
    assert min(taken_over) > max(stopped)
    assert max(taken_over) - max(stopped) < 0.5 < TIMINGS.lease_ttl_s
    assert group.owned(1) | group.owned(2) == set(group.world.resources)


@pytest.mark.lesson(2)
@pytest.mark.rule("RB-14", "RB-15")
def test_an_aborted_rebalance_removes_no_barrier_of_another_node(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start(0)
    group[0].handler_faults.append(FaultKind.HANDLER_SLOW)
    group.world.start(group[1])
    group.run_until(lambda: bool(group.times(FactKind.BARRIER_BLOCKED, 1)))
    blocked = {fact.resource for _, host, fact in group.facts if fact.kind is FactKind.BARRIER_BLOCKED}
    held = {resource: barrier.token for resource, barrier in group.world.oracle.barriers.items()}
    assert blocked <= held.keys()
    group.world.set_drained("host-1", drained=True)
    group.settle()
    assert group.owned(0) == set(group.world.resources)
    assert group.owned(1) == set()


@pytest.mark.lesson(3)
@pytest.mark.rule("RB-22", "RB-15", "RB-27")
def test_after_a_lost_lease_nothing_is_remembered_and_nothing_of_others_removed(script: MakeScript) -> None:
    group = script(hosts=2, resources=4, writes=1.0)
    group.start()
    paused = group[1].running
    assert paused is not None
    group.world.pause(group[1], 2 * TIMINGS.lease_ttl_s, FaultKind.PAUSE_LONG)
    group.run_until(lambda: group.owned(0) == set(group.world.resources))
    assert group.owned(1) != set()
    resumed = group.world.now
    group.run_until(lambda: not paused.paused)
    assert group.world.oracle.stale_writes > 0
    group.run_until(lambda: group.owned(1) == set(), within_s=1.0)
    assert len(set(group.times(FactKind.STOP_ENTERED, 1, resumed))) == 1
    group.settle()
    assert paused.node.session is not None
    assert paused.node.session.node == "host-1.1-1"
    assert len(group.owned(0)) == len(group.owned(1)) == 2


@pytest.mark.lesson(5)
@pytest.mark.rule("RB-21", "RB-13")
def test_a_node_that_is_cut_off_has_stopped_before_its_lease_can_end(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    cut_at = group.world.now
    group[1].handler_faults.append(FaultKind.HANDLER_SLOW)
    group.world.cut(group[1], 60.0, refuses=False)
    group.run_until(lambda: group.owned(0) == set(group.world.resources))
    stopped = group.times(FactKind.STOP_RETURNED, 1, cut_at)
    taken_over = group.times(FactKind.START_ENTERED, 0, cut_at)
    assert len(stopped) == 2
    assert max(stopped) < min(taken_over)
    assert max(stopped) < cut_at + TIMINGS.access_s
    assert group.world.oracle.excused == 0


@pytest.mark.lesson(6)
@pytest.mark.rule("RB-4")
def test_a_registration_whose_answer_was_lost_makes_no_ghost(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start(0)
    group[1].link.armed.append(Armed(FaultKind.REPLY_LOST, "Join", skip=1))
    group.world.start(group[1])
    group.settle()
    assert set(group.world.oracle.members) == {"host-0.1-0", "host-1.1-0"}
    assert len(group.owned(1)) == 2
    assert FaultKind.REPLY_LOST in group.world.hits


@pytest.mark.lesson(7)
@pytest.mark.rule("RB-3", "RB-29")
def test_a_resource_removed_between_assignment_and_barrier_stops_nobody(script: MakeScript) -> None:
    group = script(hosts=2, resources=6)

    def remove_what_was_just_given(_: Process, fact: Fact) -> None:
        if fact.kind is FactKind.ALLOCATION_ADOPTED and "r5" in group.world.resources:
            group.world.scheduler.at(group.world.now, lambda: group.world.remove(["r5"]))

    group.world.reacts = remove_what_was_just_given
    group.start()
    assert group.owned(0) | group.owned(1) == {"r0", "r1", "r2", "r3", "r4"}
    assert "r5" not in group.world.oracle.barriers


@pytest.mark.lesson(8)
@pytest.mark.rule("RB-18", "RB-2")
def test_those_who_get_nothing_are_told(script: MakeScript) -> None:
    group = script(hosts=4, resources=1)
    group.start()
    for host in group.world.hosts:
        assert host.running is not None
        assert host.running.told_of_nothing == (not host.running.tokens)
        assert host.running.node.settled


@pytest.mark.lesson(9)
@pytest.mark.rule("RB-24")
@pytest.mark.parametrize("fault", [FaultKind.START_RAISES, FaultKind.STOP_RAISES])
def test_a_handler_that_raises_does_not_end_the_node(script: MakeScript, fault: FaultKind) -> None:
    group = script(hosts=2, resources=4)
    group.world.start(group[0])
    group[0].handler_faults.append(fault)
    group.settle()
    group[0].handler_faults.append(fault)
    group.start(1)
    assert group.world.hits[fault] >= 1
    assert group[0].running is not None
    assert group[0].running.node.membership is Membership.MEMBER
    assert len(group.owned(0)) == len(group.owned(1)) == 2


@pytest.mark.lesson(10)
@pytest.mark.rule("RB-16")
def test_a_resource_removed_and_added_again_while_owned_lets_nobody_else_in(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    before = {resource: barrier.token for resource, barrier in group.world.oracle.barriers.items()}
    for host in group.world.hosts:
        host.handler_faults.append(FaultKind.HANDLER_SLOW)
    for resource in sorted(before):
        group.world.remove([resource])
        assert group.world.oracle.barriers[resource].token == before[resource]
        group.world.run_for(0.03)
        group.world.add([resource])
    group.settle()
    assert group.owned(0) | group.owned(1) == set(before)


@pytest.mark.rule("RB-34")
def test_with_kill_a_stopped_process_is_dead_before_its_lease_ends(script: MakeScript) -> None:
    group = script(plans=(HostPlan("host-0"), HostPlan("host-1", kills=True)), resources=4)
    group.start()
    victim = group[1].running
    assert victim is not None
    began = group.world.now
    group.world.pause(group[1], 60.0, FaultKind.PAUSE_LONG)
    group.run_until(lambda: not victim.alive)
    assert group.world.now < began + TIMINGS.lease_ttl_s
    assert group.world.hits[FaultKind.KILLED_BY_GUARD] == 1
    group.settle()
    assert group.world.oracle.excused == 0


@pytest.mark.rule("RB-23")
@pytest.mark.parametrize(
    "moment", [FactKind.ELECTED, FactKind.GROUP_READ, FactKind.ALLOCATION_PUBLISHED, FactKind.BARRIER_REMOVED]
)
def test_a_leader_that_dies_at_any_moment_leaves_what_the_next_one_completes(
    script: MakeScript, moment: FactKind
) -> None:
    group = script(hosts=3, resources=6, max_operations=8)

    def die(process: Process, fact: Fact) -> None:
        if fact.kind is moment and process.label == "host-0":
            group.world.scheduler.at(group.world.now, lambda: group.world.crash(group[0]))

    group.world.start(group[0])
    if moment is FactKind.ELECTED:
        group.world.reacts = die
    else:
        group.settle()
        group.world.reacts = die
    group.world.start(group[1])
    group.world.start(group[2])
    group.run_until(lambda: group[0].running is None)
    group.settle()
    assert group.owned(1) | group.owned(2) == set(group.world.resources)


@pytest.mark.rule("RB-28")
def test_changes_during_a_restart_a_compaction_and_lost_watches_are_not_lost(script: MakeScript) -> None:
    group = script(hosts=3, resources=3)
    group.start()
    for index, host in enumerate(group.world.hosts):
        process = host.running
        assert process is not None
        process.lose_watches()
        group.world.add([f"new-{index}"])
        group.world.compact()
        group.world.restart_registry()
        group.settle()
    assert {len(group.owned(index)) for index in range(3)} == {2}


@pytest.mark.rule("RB-30", "RB-17")
def test_draining_moves_resources_away_and_stops_nothing_else(script: MakeScript) -> None:
    group = script(hosts=3, resources=6)
    group.start()
    began, drained = group.world.now, group.owned(1)
    group.world.set_drained("host-1", drained=True)
    group.settle()
    stopped = {f.resource for at, _, f in group.facts if f.kind is FactKind.STOP_ENTERED and at >= began}
    started = {f.resource for at, _, f in group.facts if f.kind is FactKind.START_ENTERED and at >= began}
    assert stopped == started == drained
    assert group.owned(1) == set()


@pytest.mark.rule("RB-17")
def test_an_eager_node_stops_and_starts_everything(script: MakeScript) -> None:
    group = script(plans=(HostPlan("host-0", mode=Mode.EAGER), HostPlan("host-1")), resources=4)
    group.start(0)
    began = group.world.now
    group.start(1)
    stopped = {f.resource for at, _, f in group.facts if f.kind is FactKind.STOP_ENTERED and at >= began}
    assert stopped == set(group.world.resources)


@pytest.mark.rule("RB-20")
def test_a_dead_nodes_resources_are_owned_again_once_its_lease_has_ended(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    died = group.world.now
    group.world.crash(group[1])
    group.run_until(lambda: group.owned(0) == set(group.world.resources))
    assert group.world.now - died < TIMINGS.lease_ttl_s + 0.2


@pytest.mark.rule("RB-10")
def test_moves_are_minimal_when_a_node_joins(script: MakeScript) -> None:
    group = script(hosts=4, resources=12)
    group.start(0, 1, 2)
    began = group.world.now
    group.start(3)
    stopped = [f.resource for at, _, f in group.facts if f.kind is FactKind.STOP_ENTERED and at >= began]
    assert len(stopped) == len(set(stopped)) == 3
