"""What the simulator once found, each as the shortest script that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import pytest

from rebalanser.core.group import FactKind, Handler, Membership, Node
from rebalanser.core.group.types import Trouble
from rebalanser.errors import RegistryUnavailable
from rebalanser.registry import values
from rebalanser.registry.contract import Changed
from simulation.group import PROFILES, Armed, FaultKind, HostPlan, Violation, run_seed
from simulation.group.operators import Change
from simulation.group.scenario import TIMINGS
from simulation.kernel.mutants import edited

if TYPE_CHECKING:
    from tests.simulation.conftest import Script

MakeScript: TypeAlias = "Callable[..., Script]"


@pytest.mark.rule("RB-11", "RB-12")
def test_a_late_removal_takes_no_barrier_from_under_a_resource_that_came_back(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start(0)
    group[0].link.armed.append(Armed(FaultKind.REQUEST_LATE, "RemoveBarriers"))
    group.world.start(group[1])
    group.run_until(lambda: FaultKind.REQUEST_LATE in group.world.hits)
    group.world.crash(group[1])
    group.world.set_drained("host-1", drained=True)
    group.settle()
    assert group.owned(0) == set(group.world.resources)


@pytest.mark.rule("RB-34")
def test_a_slow_clock_excuses_a_late_kill_even_if_it_was_slow_only_after_the_isolation(
    script: MakeScript,
) -> None:
    group = script(plans=(HostPlan("host-0", kills=True),), resources=2)
    group.start(0)
    group.world.pause(group[0], 20.0, FaultKind.PAUSE_LONG)
    group.world.run_for(TIMINGS.detect_s + 0.1)
    group.world.drift(group[0], 0.4, FaultKind.DRIFT_BEYOND)
    group.run_until(lambda: FaultKind.KILLED_BY_GUARD in group.world.hits)


@pytest.mark.rule("RB-9")
@pytest.mark.parametrize("fault", [FaultKind.REQUEST_LOST, FaultKind.REQUEST_REFUSED])
def test_a_share_whose_deletion_failed_may_stay_until_the_next_allocation(
    script: MakeScript, fault: FaultKind
) -> None:
    group = script(hosts=3, resources=9, max_operations=8)
    group.start()
    group[0].link.armed.append(Armed(fault, "Publish", 2))
    group.world.crash(group[2])
    group.settle()
    assert group.world.hits[fault]
    group.world.start(group[2])
    group.settle()
    assert group.world.oracle.obsolete_parts() == []


@pytest.mark.rule("RB-19")
def test_a_late_acknowledgement_does_not_hide_that_a_newer_version_is_complete(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group[0].link.armed.append(Armed(FaultKind.REQUEST_LATE, "Acknowledge"))
    group.world.start(group[0])
    group.run_until(lambda: FaultKind.REQUEST_LATE in group.world.hits)
    group.world.start(group[1])
    group.settle()


@pytest.mark.rule("RB-19")
def test_the_leader_learns_of_acknowledgements_that_no_watch_told(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start(0)
    group.world.start(group[1])
    group.run_until(lambda: bool(group.times(FactKind.ALLOCATION_PUBLISHED, 0, group.world.now - 0.01)))
    group[0].link.watch_silent = True
    group.run_until(lambda: bool(group.times(FactKind.ACKNOWLEDGED, 1)))
    group.world.run_for(0.01)
    group[0].link.watch_silent = False
    group.settle()
    assert group.world.hits[FaultKind.WATCH_SILENT] > 0


@pytest.mark.rule("RB-2", "RB-14")
def test_barriers_in_many_transactions_are_added_while_other_shares_keep_changing(script: MakeScript) -> None:
    group = script(hosts=3, resources=1, max_operations=16)
    group.start()
    many = [f"many-{number:03}" for number in range(480)]
    others = ["host-1", "host-2"]
    ends = group.world.now + 30.0

    def move_another() -> None:
        others.reverse()
        group.world.add(["r0"], others[0])
        if group.world.now < ends:
            group.world.scheduler.at(group.world.now + 0.12, move_another)

    group.world.add(many, "host-0")
    move_another()
    group.run_until(lambda: group.owned(0) >= set(many), within_s=20.0)
    assert group.world.now < ends - 5.0, "others still moved"


@pytest.mark.rule("RB-43")
@pytest.mark.parametrize("command", ["ReadGroup", "Publish"])
def test_a_leader_that_can_heartbeat_and_not_lead_gives_way(script: MakeScript, command: str) -> None:
    group = script(hosts=3, resources=6)
    group.start()
    group[0].link.armed += [Armed(FaultKind.REQUEST_LOST, command) for _ in range(100)]
    group.world.crash(group[2])
    group.run_until(lambda: group.owned(1) | group.owned(0) == set(group.world.resources), within_s=60.0)
    assert group.times(FactKind.RESIGNED, 0)
    assert group.times(FactKind.ELECTED, 1)
    assert not group.times(FactKind.SESSION_LOST, 0)
    trouble = values.load_leadership(group.world.stored(group.world.keys.term)).trouble
    assert trouble == Trouble(1, "OutcomeUnknown: no answer in time")
    group[0].link.armed.clear()
    group.settle()


@pytest.mark.rule("RB-9", "RB-2")
def test_a_plan_that_was_given_up_is_never_committed_later(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    group[0].link.armed.append(Armed(FaultKind.REQUEST_LATE, "Publish"))
    removed = sorted(group.owned(1))
    group.world.remove(removed)
    group.run_until(lambda: FaultKind.REQUEST_LATE in group.world.hits)
    group.world.add(removed)
    group.settle()
    assert group.owned(0) | group.owned(1) == set(group.world.resources)


@pytest.mark.rule("RB-9")
def test_late_parts_of_a_plan_rewrite_no_share_of_another(script: MakeScript) -> None:
    group = script(hosts=4, resources=8, max_operations=8)
    group.start(0)
    for skip in range(3):
        group[0].link.armed.append(Armed(FaultKind.REQUEST_LATE, "Publish", skip))
    for index in (1, 2, 3):
        group.world.start(group[index])
        group.world.run_for(0.2)
    group.settle()
    assert group.world.hits[FaultKind.REQUEST_LATE] == 3


@pytest.mark.rule("RB-14")
@pytest.mark.parametrize("kind", [FaultKind.REQUEST_LATE, FaultKind.REPLY_LOST])
def test_a_barrier_that_was_added_without_a_word_is_given_back(script: MakeScript, kind: FaultKind) -> None:
    group = script(hosts=2, resources=4)
    group.start(0)
    group[0].link.armed.append(Armed(kind, "AddBarriers"))
    group.world.add(["new"])
    group.run_until(lambda: kind in group.world.hits)
    group.world.set_drained("host-0", drained=True)
    group.start(1)
    assert group.owned(1) == set(group.world.resources)


@pytest.mark.rule("RB-24", "RB-20")
def test_a_node_whose_onstop_raised_does_nothing_until_its_lease_has_ended(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    process = group[1].running
    assert process is not None
    group[1].handler_faults.append(FaultKind.STOP_RAISES)
    group.world.set_drained("host-1", drained=True)
    group.run_until(lambda: process.node.membership is Membership.LAPSING)
    before = dict(group.world.commands)
    group[0].running.lose_watches() if group[0].running else None
    group.run_until(lambda: process.node.membership is not Membership.LAPSING)
    later = {command: count - before.get(command, 0) for command, count in group.world.commands.items()}
    assert later.get("Acknowledge", 0) <= 1
    group.settle()


@pytest.mark.rule("RB-26")
def test_a_graceful_stop_of_a_node_that_is_cut_off_ends(script: MakeScript) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    group.world.cut(group[1], 60.0, refuses=True)
    group.world.stop(group[1])
    group.run_until(lambda: group[1].running is None)
    group.settle()
    assert group.owned(0) == set(group.world.resources)


@pytest.mark.rule("RB-34")
@pytest.mark.parametrize("hurried_for_good", [False, True])
def test_a_process_back_in_touch_is_not_killed_by_the_limit_of_on_stop(
    script: MakeScript, monkeypatch: pytest.MonkeyPatch, hurried_for_good: bool
) -> None:
    if hurried_for_good:
        own_time = "self._limit_handler(self._handler_began, self._timings.start_timeout_s)"
        monkeypatch.setattr(Node, "_hurry", edited(own_time, "pass")(Node._hurry))
    timings = replace(TIMINGS, start_timeout_s=10.0)
    group = script(plans=(HostPlan("host-0", kills=True),), resources=2, timings=timings)
    monkeypatch.setattr(group[0], "behaviour", lambda handler, _: (4.0 * (handler is Handler.START), None))
    group.world.start(group[0])
    group.run_until(lambda: bool(group.owned(0)))
    group.world.cut(group[0], timings.detect_s + 0.2, refuses=True)
    if hurried_for_good:
        with pytest.raises(Violation, match="RB-34: host-0 is killed after"):
            group.world.run_for(6.0)
    else:
        group.world.run_for(6.0)
        assert group.times(FactKind.ISOLATED, 0)
        assert FaultKind.KILLED_BY_GUARD not in group.world.hits


@pytest.mark.rule("RB-25")
def test_an_onstop_whose_time_an_onstart_has_used_up_is_reported_when_its_access_must_end(
    script: MakeScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = script(hosts=2, resources=4)
    group.start()
    monkeypatch.setattr(group[1], "behaviour", lambda _, has_work: (0.75 * has_work, None))
    proven = group.world.commands["Heartbeat"]
    group.run_until(lambda: group.world.commands["Heartbeat"] >= proven + 4)
    group.world.run_for(0.05)
    group[1].link.armed += [Armed(FaultKind.REQUEST_LOST, "Heartbeat") for _ in range(100)]
    process = group[1].running
    assert process is not None
    deadline = process.node.deadline
    assert deadline is not None
    access_ends = process.clock.true(deadline)
    group.world.run_for(access_ends - TIMINGS.stop_timeout_s - 0.15 - group.world.now)
    group.world.add(["new"], "host-1")
    group.run_until(lambda: bool(group.times(FactKind.HANDLER_OVERRAN, 1)))
    assert group.world.now == pytest.approx(access_ends, abs=0.01)
    assert len(group.times(FactKind.START_RETURNED, 1, access_ends - TIMINGS.stop_timeout_s)) == 1
    assert not group.times(FactKind.STOP_RETURNED, 1, access_ends - TIMINGS.stop_timeout_s)


@pytest.mark.rule("RB-44")
def test_a_late_request_is_judged_also_after_one_that_had_nothing_to_write(script: MakeScript) -> None:
    world = script().world
    late = world.operations.begin(Change("drains host-0", drain=("host-0", True)))
    world.operations.ended(late, RegistryUnavailable("no answer"))
    world.run_for(0.1)
    idle = world.operations.begin(Change("undrains host-0", drain=("host-0", False)))
    world.operations.ended(idle, None)
    with pytest.raises(Violation, match="RB-44"):
        world.operations.changed([Changed(world.keys.drain("host-0"), 99, b"")], late.origin)


@pytest.mark.rule("RB-19")
def test_a_registration_that_comes_again_after_its_node_has_left_undoes_no_completion() -> None:
    assert run_seed(2000044, PROFILES["operators"]).violations == []
