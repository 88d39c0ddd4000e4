"""The cache of who owns what, on the memory registry."""

from __future__ import annotations

import queue
import threading
import uuid
from asyncio import CancelledError
from typing import TYPE_CHECKING

import pytest

from rebalanser import Admin, Group, Owners, Settings
from rebalanser.errors import InvalidHandlers, RegistryUnavailable
from rebalanser.registry import RegistryCoordinator
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from rebalanser.admin import Owner
    from rebalanser.owners import OwnerChange
    from rebalanser.registry import GroupView

QUICK = Settings(lease_ttl_s=60.0, min_rebalance_interval_s=0.0, connect_timeout_s=PATIENCE_S)
NEVER_S = 3600.0


def node_of(url: str, label: str) -> Group:
    settings = QUICK.model_copy(update={"attributes": {"address": f"{label}:80"}})
    made = Group("group", url, node=label, settings=settings, resources=["a", "b"])
    made.on_start(lambda _owned: None)
    made.on_stop(lambda _owned: None)
    return made


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.mark.rule("RB-7")
def test_owners_follow_by_watches_alone(url: str) -> None:
    told: queue.SimpleQueue[OwnerChange] = queue.SimpleQueue()
    owners = Owners("group", url, interval_s=NEVER_S)
    seen: list[OwnerChange] = []
    owners.on_change(seen.append)
    owners.on_change(told.put)
    with owners:
        assert owners.all == {}
        with node_of(url, "n") as node:
            changes = [told.get(timeout=PATIENCE_S) for _ in "ab"]
            assert sorted((c.resource, c.before) for c in changes) == [("a", None), ("b", None)]
            node.wait_settled(PATIENCE_S)
            owner = owners.get("a")
            assert owner is not None
            assert (owner.label, owner.token) == ("n", node.resources["a"].token)
            assert owner.attributes == {"address": "n:80"}
            with node_of(url, "m"):
                moved = told.get(timeout=PATIENCE_S)
                while moved.after is None or moved.after.label != "m":
                    moved = told.get(timeout=PATIENCE_S)
                assert owners.get(moved.resource) == moved.after
        gone = told.get(timeout=PATIENCE_S)
        while gone.after is not None or owners.all:
            gone = told.get(timeout=PATIENCE_S)
        assert owners.get("a") is None
        assert owners.is_current
    assert all(change.before != change.after for change in seen)


def test_what_is_known_stays_while_the_registry_is_away(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look, away, tried = Admin.owners, threading.Event(), threading.Semaphore(0)

    def failing(admin: Admin) -> dict[str, Owner]:
        if away.is_set():
            tried.release()
            raise RegistryUnavailable("away")
        return look(admin)

    with node_of(url, "n") as node, Admin("group", url) as admin:
        admin.wait_balanced(PATIENCE_S)
        monkeypatch.setattr(Admin, "owners", failing)
        with Owners("group", url, interval_s=0.01) as owners:
            known = owners.all
            assert known["a"].token == node.resources["a"].token
            away.set()
            for _ in range(3):
                assert tried.acquire(timeout=PATIENCE_S)
            assert owners.all == known
            assert not owners.is_current
            away.clear()
    stale = [record for record in caplog.records if getattr(record, "action", "") == "owners_stale"]
    assert len(stale) == 1, "it is said once"


@pytest.mark.parametrize("error", [ValueError("not ours"), SystemExit(1), CancelledError()])
def test_a_hook_that_raises_stops_nothing(
    url: str, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    told: queue.SimpleQueue[OwnerChange] = queue.SimpleQueue()
    owners = Owners("group", url, interval_s=NEVER_S)

    @owners.on_change
    def fail(_change: OwnerChange) -> None:
        raise error

    owners.on_change(told.put)
    with owners, node_of(url, "n"), Admin("group", url) as admin:
        assert {told.get(timeout=PATIENCE_S).resource for _ in "ab"} == {"a", "b"}
        admin.add("c")
        assert told.get(timeout=PATIENCE_S).resource == "c"
    assert "hook_failed" in {getattr(record, "action", "") for record in caplog.records}


def test_hooks_are_called_in_a_thread_of_their_own(url: str) -> None:
    owners, entered, told = Owners("group", url, interval_s=NEVER_S), threading.Event(), threading.Event()

    @owners.on_change
    def wait(_change: OwnerChange) -> None:
        assert entered.wait(PATIENCE_S)
        told.set()

    with node_of(url, "n"), Admin("group", url) as admin:
        admin.wait_balanced(PATIENCE_S)
        with owners:
            entered.set()
            assert told.wait(PATIENCE_S)


def test_an_error_that_nobody_expects_leaves_the_cache_out_of_date_and_no_longer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, broken = Admin.owners, threading.Event()

    def failing(admin: Admin) -> dict[str, Owner]:
        if broken.is_set():
            raise RuntimeError("can't start new thread")
        return look(admin)

    monkeypatch.setattr(Admin, "owners", failing)
    with node_of(url, "n"), Owners("group", url, interval_s=0.01) as owners:
        broken.set()
        wait_until(lambda: not owners.is_current)
        broken.clear()
        wait_until(lambda: owners.is_current)


def test_a_registry_that_is_away_at_first_is_an_error_and_leaves_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_coordinator: RegistryCoordinator) -> GroupView:
        raise RegistryUnavailable("away")

    monkeypatch.setattr(RegistryCoordinator, "read", away)
    with pytest.raises(RegistryUnavailable), Owners("group", url, interval_s=0.01):
        pytest.fail("it has never looked")
    assert "rebalanser-owners-group" not in {thread.name for thread in threading.enumerate()}


def test_they_are_current_only_while_a_group_that_is_there_is_followed(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: queue.SimpleQueue[OwnerChange] = queue.SimpleQueue()
    owners = Owners("group", url, interval_s=NEVER_S)
    owners.on_change(told.put)
    assert not owners.is_current, "it was not entered"
    with owners:
        assert not owners.is_current, "there is no such group"
        assert [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "owners_unknown"] == [
            f"there is no such group (yet) action=owners_unknown group=group registry={url}"
        ]
        with Admin("group", url) as admin:
            admin.add("c")
            wait_until(lambda: owners.is_current)
            assert owners.all == {}
        with node_of(url, "n"):
            assert {told.get(timeout=PATIENCE_S).resource for _ in "abc"} == {"a", "b", "c"}
            assert owners.is_current
    assert not owners.is_current, "it is closed"
    with owners:
        assert owners.is_current, "it is followed again"
        with node_of(url, "n"):
            while {"a", "b", "c"} != owners.all.keys():
                told.get(timeout=PATIENCE_S)


def test_a_hook_that_can_not_be_called_with_a_change_is_refused() -> None:
    def of_nothing() -> None:
        """Take nothing."""

    with pytest.raises(InvalidHandlers, match=r"called with a change, and .*of_nothing can't be"):
        Owners("group", "memory://hooks").on_change(of_nothing)  # type: ignore[arg-type]
