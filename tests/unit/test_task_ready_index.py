"""Tasks that may be claimed, by the names of their functions: the same as a list that is searched."""

from __future__ import annotations

from random import Random

import pytest

from rebalanser.core.tasks.model import Head, Stored, TaskState
from rebalanser.core.tasks.owner import PartitionOwner
from rebalanser.core.tasks.ready_index import ReadyByName

NAMES = ("a", "b", "c")


def head(number: int, name: str, priority: int = 0) -> Head:
    return Head(f"{number:040x}", "q", name, priority)


@pytest.mark.rule("SK-5")
@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_some_names_is_that_of_a_list_that_is_searched(seed: int) -> None:
    random = Random(seed)
    ready, known = ReadyByName(), dict[str, Head]()
    for step in range(500):
        match random.randrange(3):
            case 0:
                number = random.randrange(50)
                fresh = head(number, NAMES[step % 3], number % 2)
                fresh = known.setdefault(fresh.id, fresh)
                ready.add(fresh)
            case 1:
                gone = head(random.randrange(50), "a")
                gone = known.pop(gone.id, gone)
                ready.drop(gone)
            case _:
                names = random.choice([None, (), ("a",), ("c", "a"), ("d", "b")])
                fitting = [each for each in known.values() if names is None or each.name in names]
                best = min(fitting, key=lambda each: (-each.priority, each.id), default=None)
                assert ready.has(names) == (best is not None)
                assert ready.best(names) == (None if best is None else (-best.priority, best.id))
                if best is not None:
                    ready.drop(known.pop(best.id))
        assert set(ready.names()) == {each.name for each in known.values()}


@pytest.mark.rule("SK-5", "SK-12")
def test_tasks_that_nobody_asks_for_are_in_nobodys_way_and_are_kept() -> None:
    owner = PartitionOwner(0, 1)
    for number in range(1000):
        owner.learn(Stored(head(number, "strange"), TaskState(), 1, 0), 0.0)
    assert owner.best(0.0, 0.0, ("mine",)) is None
    assert owner.next_wakeup(0.0, 0.0, ("mine",)) is None, "only news can bring one"
    owner.learn(Stored(head(5000, "mine"), TaskState(), 2, 0), 0.0)
    assert owner.next_wakeup(0.0, 0.0, ("mine",)) == 0.0
    assert owner.best(0.0, 0.0, ("mine",)) == (0, f"{5000:040x}")
    assert owner.next_wakeup(0.0, 0.0, ("other",)) is None
    assert owner.names() == {"mine", "strange"}
    for number in (0, 1):
        assert owner.best(0.0, 0.0) == (0, f"{number:040x}")
        owner.take(f"{number:040x}")
