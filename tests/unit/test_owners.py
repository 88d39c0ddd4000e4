"""The cache of who owns what, on the memory registry."""

from __future__ import annotations

import queue
import threading
import uuid
from asyncio import CancelledError
from typing import TYPE_CHECKING

import pytest

from rebalanser import Admin, Group, Owners, Settings
from rebalanser.admin import MAX_CHANGED_KEYS
from rebalanser.core.group import Topic, TopicKind
from rebalanser.core.group.messages import Noticed
from rebalanser.errors import InvalidArgument, InvalidHandlers, RegistryUnavailable
from rebalanser.registry import GroupKeys, RegistryCoordinator
from rebalanser.registry.contract import Outcome
from rebalanser.registry.urls import DEFAULT_ROOT
from rebalanser.testing import MemoryRegistry
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Collection

    from rebalanser.admin import Owner
    from rebalanser.owners import OwnerChange
    from rebalanser.registry.contract import Reply, Request, Result, Sink, Target, Watch
    from rebalanser.registry.coordinator import HoldingsRead

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
    def away(_coordinator: RegistryCoordinator, _keys: Collection[str] | None = None) -> HoldingsRead:
        raise RegistryUnavailable("away")

    monkeypatch.setattr(RegistryCoordinator, "read_holdings", away)
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
            f"there is no such group yet action=owners_unknown group=group registry={url}"
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


@pytest.mark.parametrize("interval_s", ["5", 0, -1, float("nan"), float("inf"), True, None])
def test_an_interval_that_is_none_is_refused_at_once(interval_s: float) -> None:
    with pytest.raises(InvalidArgument, match=f"^interval_s is {interval_s!r}: give seconds above 0$"):
        Owners("group", "memory://interval", interval_s=interval_s)


def keys_in(results: Collection[Result]) -> int:
    return sum(len(each) if isinstance(each, tuple) else each is not None for each in results)


class OwnersReads:
    """Counts the keys that the threads of all ``Owners`` read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = 0
        execute = MemoryRegistry.execute

        def counted(registry: MemoryRegistry, request: Request, timeout_s: float) -> Reply:
            reply = execute(registry, request, timeout_s)
            if threading.current_thread().name.startswith("rebalanser-owners-"):
                assert isinstance(reply, Outcome)
                self.keys += keys_in(reply.results)
            return reply

        monkeypatch.setattr(MemoryRegistry, "execute", counted)


@pytest.mark.rule("RB-7")
def test_a_change_is_read_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    many = 500
    told: queue.SimpleQueue[OwnerChange] = queue.SimpleQueue()
    owners = Owners("group", url, interval_s=NEVER_S)
    owners.on_change(told.put)
    with Admin("group", url) as admin, node_of(url, "n"):
        admin.add(f"r-{number}" for number in range(many))
        admin.wait_balanced(PATIENCE_S)
        with owners:
            for _ in range(many + len("ab")):
                told.get(timeout=PATIENCE_S)
            reads = OwnersReads(monkeypatch)
            for number in range(3):
                admin.add(f"new-{number}")
                change = told.get(timeout=PATIENCE_S)
                assert change.after is not None
                assert (change.resource, change.before) == (f"new-{number}", None)
                assert change.after.label == "n"
            admin.remove("new-0")
            gone = told.get(timeout=PATIENCE_S)
            assert (gone.resource, gone.after) == ("new-0", None)
            assert len(owners.all) == many + len("ab") + 2
            assert 0 < reads.keys < 100
            assert owners.is_current


def test_what_a_watch_has_lost_is_read_as_a_whole(url: str) -> None:
    with node_of(url, "n"), Admin("group", url) as admin, admin.changes() as changed:
        admin.wait_balanced(PATIENCE_S)
        changed.clear()
        group, barriers = Topic(TopicKind.GROUP), Topic(TopicKind.BARRIERS)
        changed.note([Noticed(group, 1, keys=frozenset("x"))])
        assert changed.is_set()
        assert changed.owners({}) == {}, "nothing of owners has changed"
        assert not changed.is_set()
        changed.note([Noticed(barriers, 1, lost=True, keys=frozenset("x")), Noticed(group, 2)])
        assert changed.owners({}) is None
        assert changed.owners({}) == {}
        changed.note([Noticed(barriers, 3, keys=frozenset(map(str, range(MAX_CHANGED_KEYS + 1))))])
        assert changed.owners({}) is None


def test_whoever_is_gone_owns_nothing(url: str) -> None:
    with Admin("group", url) as admin:
        with node_of(url, "n"), node_of(url, "m"):
            admin.wait_balanced(PATIENCE_S)
            known = admin.owners()
        node = known["a"].node
        with admin.changes() as changed:
            key = GroupKeys(DEFAULT_ROOT, "group").node(node)
            changed.note([Noticed(Topic(TopicKind.GROUP), 1, keys=frozenset({key}))])
            assert changed.owners(known) == {
                resource: None for resource in known if known[resource].node == node
            }


def test_all_that_listen_share_one_watch(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Target] = []
    watch = MemoryRegistry.watch

    def counted(registry: MemoryRegistry, target: Target, revision: int, sink: Sink) -> Watch:
        opened.append(target)
        return watch(registry, target, revision, sink)

    with Admin("group", url) as admin:
        monkeypatch.setattr(MemoryRegistry, "watch", counted)
        with admin.changes() as first, admin.changes() as second:
            assert len(opened) == len(set(opened)) > 0
            admin.add("a")
            assert first.wait(PATIENCE_S)
            assert second.wait(PATIENCE_S)
