"""Weights are changed on their own: whatever else is said of a resource stays, whoever says it when."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from rebalanser import Admin
from rebalanser.errors import InvalidArgument, RegistryUnavailable
from rebalanser.registry.contract import Reply, Request, Transaction
from rebalanser.registry.coordinator import MAX_OPERATOR_TRIES
from rebalanser.testing import MemoryRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.rule("AU-7", "RB-29")


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def admin(url: str) -> Iterator[Admin]:
    with Admin("orders", url, timeout_s=0.0) as opened:
        yield opened


def said(admin: Admin) -> dict[str, tuple[float, str | None, dict[str, str]]]:
    return {each.resource: (each.weight, each.pin, dict(each.attributes)) for each in admin.resources()}


def before_each_weighing(monkeypatch: pytest.MonkeyPatch, meddle: Callable[[], object]) -> None:
    """Have somebody else do something each time between the reading of the resources and their writing."""
    execute = MemoryRegistry.execute
    meddling = False

    def meddled(self: MemoryRegistry, request: Request, timeout_s: float) -> Reply:
        nonlocal meddling
        if isinstance(request, Transaction) and request.guards and not meddling:
            meddling = True
            meddle()
            meddling = False
        return execute(self, request, timeout_s)

    monkeypatch.setattr(MemoryRegistry, "execute", meddled)


def test_pins_and_attributes_stay(admin: Admin) -> None:
    admin.add("pinned", pin="node-1", attributes={"zone": "a"})
    admin.add("plain", "same")
    done: list[tuple[int, int]] = []
    weights = {"pinned": 2.0, "plain": 0.5, "same": 1.0, "gone": 3.0}
    assert admin.weigh(weights, progress=lambda *each: done.append(each)) == 2
    assert said(admin) == {
        "pinned": (2.0, "node-1", {"zone": "a"}),
        "plain": (0.5, None, {}),
        "same": (1.0, None, {}),
    }
    assert done[-1] == (4, 4)
    assert admin.weigh(weights) == 0
    assert admin.weigh({}) == 0


def test_what_another_operator_says_at_the_same_time_stays(
    admin: Admin, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.add("a", "b", "c")
    with Admin("orders", url) as other:
        changes = [
            lambda: other.add("a", pin="node-2", attributes={"zone": "z"}),
            lambda: other.remove("b"),
        ]
        before_each_weighing(monkeypatch, lambda: changes.pop(0)() if changes else None)
        assert admin.weigh({"a": 2.0, "b": 2.0, "c": 2.0}) == 2
        assert changes == []
    assert said(admin) == {"a": (2.0, "node-2", {"zone": "z"}), "c": (2.0, None, {})}


def test_who_is_always_too_late_is_told_to_come_again(
    admin: Admin, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.add("a")
    with Admin("orders", url) as other:
        seen: list[int] = []

        def meddle() -> None:
            seen.append(other.add("a", attributes={"number": str(len(seen))}))

        before_each_weighing(monkeypatch, meddle)
        with pytest.raises(RegistryUnavailable, match="other operator requests"):
            admin.weigh({"a": 2.0})
    assert len(seen) == MAX_OPERATOR_TRIES
    assert said(admin)["a"] == (1.0, None, {"number": str(MAX_OPERATOR_TRIES - 1)})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_changes_nothing(admin: Admin, weight: float) -> None:
    admin.add("a", "b")
    with pytest.raises(InvalidArgument, match=r"weights.b: Input should be (greater than 0|a finite number)"):
        admin.weigh({"a": 2.0, "b": weight})
    assert said(admin)["a"][0] == 1.0


def test_thousands_of_resources_take_few_transactions(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"partition-{number}" for number in range(3_000)]
    admin.add(names)
    written: list[None] = []
    before_each_weighing(monkeypatch, lambda: written.append(None))
    assert admin.weigh(dict.fromkeys(names, 2.0)) == 3_000
    assert len(written) < 30
