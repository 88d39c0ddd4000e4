"""The exploration: nothing is broken within its bound, and it finds what mutants break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rebalanser.core.group.node import Node
from rebalanser.core.group.rebalancing import Rebalancing
from rebalanser.registry.translation import Translation
from simulation import exploration
from simulation.exploration import LABELS, STORIES, Action, Kind, Model, Report, Search, State
from simulation.kernel.mutants import Switch, always, switched

JOINING, *_, CUT_OFF = STORIES
INDEPENDENT = (Action(Kind.START, 0), Action(Kind.START, 1))


def _after(model: Model, state: State, *actions: Action) -> State:
    for action in actions:
        assert action in model.actions(state)
        state = model.after(state, action)
    return state


@pytest.mark.rule("RB-1", "RB-3", "RB-11", "RB-12")
def test_no_order_of_events_breaks_a_rule() -> None:
    report = Search(states=6000, depth=1, samples=30).run()
    assert report.found is None
    assert report.complete == 1
    assert report.states >= 6000
    assert report.deepest > 10
    assert report.settled >= 10
    assert set(report.kinds) == set(Kind) - {Kind.NOTHING_FAILS}


def test_a_search_is_the_same_each_time() -> None:
    first, second = (Search(states=1500, depth=1, samples=5).run() for _ in range(2))
    assert first == second


def test_the_order_of_what_is_independent_does_not_matter() -> None:
    model = Model()
    one = _after(model, model.first(), *INDEPENDENT)
    other = _after(model, model.first(), *reversed(INDEPENDENT))
    assert model.digest(one) == model.digest(other)


def test_the_order_of_revisions_matters() -> None:
    model = Model()
    began = _after(model, model.first(), *INDEPENDENT)
    register = [
        [Action(Kind.EXECUTE, host, 1), Action(Kind.REPLY, host, 1), Action(Kind.EXECUTE, host, 1)]
        for host in range(len(LABELS))
    ]
    granted = [step for steps in register for step in steps[:2]]
    ready = _after(model, began, *granted)
    one = _after(model, ready, register[0][2], register[1][2])
    other = _after(model, ready, register[1][2], register[0][2])
    assert model.digest(one) != model.digest(other)


def test_states_are_merged_whatever_their_absolute_revisions_and_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digests() -> list[bytes]:
        model = Model()
        state, taken = model.first(), [model.digest(model.first())]
        for action in CUT_OFF.steps(model):
            state = model.after(state, action)
            taken.append(model.digest(state))
        return taken

    before = digests()
    monkeypatch.setattr(exploration, "FIRST_REVISION", 3_000_000)
    monkeypatch.setattr(exploration, "FIRST_INSTANT", 1500.0)
    assert digests() == before


def test_a_step_leaves_the_state_before_it_alone() -> None:
    model = Model()
    state, states = model.first(), []
    for action in JOINING.steps(model):
        for each in model.actions(state):
            model.after(state, each)
        states.append(state)
        state = model.after(state, action)
    for state in states:
        for host in state.hosts:
            assert host.node is None or exploration.form_of(host.node) == host.node_form
            assert host.describe() == host.form
        assert state.stored.describe() == state.stored.form


def _remove_while_started(_: Any) -> Any:
    def to_remove(self: Rebalancing, everything: bool) -> dict[str, int]:
        return {r: token for r, token in self.held.items() if everything or r not in self.wanted}

    return to_remove


def _keep_after_lost_lease(original: Callable[[Rebalancing], None]) -> Any:
    def forget(self: Rebalancing) -> None:
        held = dict(self.held)
        original(self)
        self.held.update(held)
        self._spare.update(held)

    return forget


def _searched(switches: tuple[Switch, ...], story: exploration.Story, samples: int) -> Report:
    with switched(switches):
        return Search(states=5000, depth=3, stories=(story,), samples=samples).run()


@pytest.mark.parametrize(
    ("switches", "story", "rule"),
    [
        pytest.param(
            (Switch(Translation, "_free", always(())),), JOINING, "RB-1", id="a barrier is added over another"
        ),
        pytest.param(
            (
                Switch(Node, "_stops_first", lambda _: property(lambda _: False)),
                Switch(Rebalancing, "to_remove", _remove_while_started),
            ),
            JOINING,
            "RB-11",
            id="barriers are removed while the resource is accessed",
        ),
        pytest.param(
            (Switch(Rebalancing, "forget", _keep_after_lost_lease),),
            CUT_OFF,
            "RB-12",
            id="barriers are remembered when the lease is lost",
        ),
        pytest.param(
            (Switch(Node, "_make_good", always(None)),),
            JOINING,
            "RB-3",
            id="heartbeats make up for no lost notice",
        ),
    ],
)
def test_a_mutant_is_found(switches: tuple[Switch, ...], story: exploration.Story, rule: str) -> None:
    report = _searched(switches, story, samples=5000 if rule == "RB-3" else 20)
    assert report.found is not None
    assert report.found.rule == rule


def test_the_shortest_counterexample_can_be_read() -> None:
    report = _searched((Switch(Translation, "_free", always(())),), JOINING, samples=1)
    assert report.found is not None
    assert len(report.found.steps) == 3
    first, *lines, last = report.found.lines
    assert first == "story: both join, after 20 steps"
    assert last == "RB-1: the barrier of r0 was overwritten by a.1-0"
    assert "a.1       request carried out: AddBarriers: if nodes/a.1-0 was created at" in lines[-1]
