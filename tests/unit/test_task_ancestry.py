"""Tasks that would wait for themselves are refused, without looking at what was looked at before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rebalanser.core.tasks.model import (
    AfterFailure,
    ClaimState,
    ClaimTerm,
    Head,
    Status,
    Stored,
    TaskId,
    TaskState,
)
from rebalanser.errors import DependencyCycle
from rebalanser.tasks import ancestry as module
from rebalanser.tasks.ancestry import Ancestry, with_blockers


class Store:
    """Tasks that exist, and how many were read."""

    def __init__(self) -> None:
        self.tasks: dict[TaskId, Stored] = {}
        self.reads = 0
        self.calls = 0

    def read(self, ids: Sequence[TaskId]) -> Mapping[TaskId, Stored]:
        self.reads += len(ids)
        self.calls += 1
        return {task: self.tasks[task] for task in ids if task in self.tasks}

    def add(self, head: Head) -> None:
        self.tasks[head.id] = Stored(head, TaskState(), 1, 0)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def ancestry(store: Store) -> Ancestry:
    return Ancestry(store.read)


def task(name: str, *after: str) -> Head:
    return Head(id=name, queue="q", name="f", after=after)


@pytest.mark.rule("SK-5")
def test_a_task_that_waits_for_itself_is_refused(ancestry: Ancestry) -> None:
    with pytest.raises(DependencyCycle, match="task a would wait for itself"):
        ancestry.refuse_cycle(task("a", "a"))


@pytest.mark.rule("SK-5")
def test_a_cycle_through_tasks_that_waited_for_unknown_ones_is_refused(
    store: Store, ancestry: Ancestry
) -> None:
    store.add(task("c", "a"))
    ancestry.refuse_cycle(task("b", "c"))
    store.add(task("b", "c"))
    with pytest.raises(DependencyCycle):
        ancestry.refuse_cycle(task("a", "b"))
    ancestry.refuse_cycle(task("other", "b"))


@pytest.mark.rule("SK-5")
def test_a_cycle_among_tasks_that_come_together_is_refused(store: Store, ancestry: Ancestry) -> None:
    coming = {"a": task("a", "b")}
    with pytest.raises(DependencyCycle):
        ancestry.refuse_cycle(task("b", "a"), coming)
    ancestry.refuse_cycle(task("c", "a"), coming)
    assert store.reads == 1, "b alone, which does not exist"


def test_what_is_settled_is_not_read_again(store: Store, ancestry: Ancestry) -> None:
    store.add(task("0"))
    for number in range(1, 1_000):
        link = task(str(number), str(number - 1))
        ancestry.refuse_cycle(link)
        store.add(link)
    assert store.reads == 999


def test_a_task_of_which_an_ancestor_is_unknown_is_never_settled(store: Store, ancestry: Ancestry) -> None:
    store.add(task("b", "unknown"))
    for _ in range(2):
        ancestry.refuse_cycle(task("c", "b"))
    assert store.reads == 3, "the unknown one again, which may exist by now"
    with pytest.raises(DependencyCycle):
        ancestry.refuse_cycle(task("unknown", "b"))


def test_what_was_not_looked_at_to_the_end_is_not_settled(
    store: Store, ancestry: Ancestry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ANCESTORS", 2)
    for number in range(1, 5):
        store.add(task(str(number), str(number - 1)))
    ancestry.refuse_cycle(task("new", "4"))
    monkeypatch.setattr(module, "MAX_ANCESTORS", 100)
    with pytest.raises(DependencyCycle):
        ancestry.refuse_cycle(task("0", "4"))


def told(store: Store, *names: str) -> dict[TaskId, set[TaskId]]:
    found = with_blockers([store.tasks[name] for name in names], store.read)
    return {each.head.id: {blocker.head.id for blocker in blockers} for each, blockers in found}


@pytest.mark.rule("SK-5")
def test_what_a_task_waits_for_in_vain_is_found_through_others_and_round_a_circle(store: Store) -> None:
    dead, claim = TaskState(Status.DEAD), ClaimState(0, "holder", "me", ClaimTerm(1.0, "", 0.0))
    for head, state in {
        task("dead"): dead,
        task("done"): TaskState(Status.COMPLETED),
        task("a", "dead", "done"): TaskState(),
        task("b", "a", "c", "nobody"): TaskState(),
        task("c", "b"): TaskState(),
        task("d", "done"): TaskState(),
        task("tried", "dead"): TaskState(claim=claim),
    }.items():
        store.tasks[head.id] = Stored(head, state, 1, 0)
    assert told(store, "a", "b", "c", "d", "tried") == {
        "a": {"dead"},
        "b": {"dead"},
        "c": {"dead"},
        "d": set(),
        "tried": set(),
    }
    assert store.reads == 6, "each once"


@pytest.mark.rule("SK-5")
def test_a_task_that_runs_after_a_failure_waits_for_nothing_that_is_dead(store: Store) -> None:
    dead = TaskState(Status.DEAD)
    for head, state in {
        task("dead"): dead,
        replace(task("runs", "dead"), after_failure=AfterFailure.RUN): TaskState(),
        replace(task("fails", "dead"), after_failure=AfterFailure.FAIL): TaskState(),
        task("waits", "runs"): TaskState(),
        task("both", "runs", "dead"): TaskState(),
        replace(task("later", "fails"), after_failure=AfterFailure.RUN): TaskState(),
    }.items():
        store.tasks[head.id] = Stored(head, state, 1, 0)
    assert told(store, "runs", "fails", "waits", "both", "later") == {
        "runs": set(),
        "fails": {"dead"},
        "waits": set(),
        "both": {"dead"},
        "later": {"dead"},
    }


@pytest.mark.rule("SK-12")
def test_of_a_great_many_that_are_waited_for_some_are_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ANCESTORS", 1000)
    for number in range(5000):
        store.tasks[f"{number:04}"] = Stored(task(f"{number:04}"), TaskState(Status.CANCELLED), 1, 0)
    store.add(task("x", *store.tasks))
    assert len(told(store, "x")["x"]) == module.MAX_BLOCKERS
    assert store.reads == 1000


@pytest.mark.rule("SK-5")
def test_the_reads_for_one_new_task_are_bounded_and_the_next_one_goes_on(
    store: Store, ancestry: Ancestry
) -> None:
    """A long chain costs its producer no ten thousand reads in a row, and no read is made twice."""
    depth = 3 * module.MAX_READS
    for number in range(1, depth + 1):
        store.add(task(str(number), str(number - 1)))
    last = str(depth)
    for round_ in range(1, 4):
        ancestry.refuse_cycle(task("new", last))
        assert store.calls == round_ * module.MAX_READS
    with pytest.raises(DependencyCycle):
        ancestry.refuse_cycle(task("0", last))
    assert store.calls == store.reads == depth
