"""The etcd registry keeps the contract of registries, on a real server."""

from __future__ import annotations

import threading
import uuid
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.registry.contract import Put, Range, Target, Transaction
from rebalanser.registry.urls import parse_url
from rebalanser.testing.etcd_server import EtcdCluster
from rebalanser.testing.registry_suite import (
    EventRecorder,
    RegistryConformance,
    RegistryHarness,
    commit,
    key_values,
    put_all,
)
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_etcd import codec, open_etcd
from rebalanser_etcd.endpoints import Endpoints, Repeat
from support.proxy import TcpProxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rebalanser.registry.contract import Registry


class EtcdHarness(RegistryHarness):
    """Connections to one server, through a proxy; time is the server's own, so letting it pass is waiting."""

    min_ttl_s = 1.0

    def __init__(self, server: EtcdCluster, proxy: TcpProxy, folder: Path) -> None:
        """``folder`` is for the data of the server that may take the place of this one."""
        self._server = server
        self._proxy = proxy
        self._folder = folder
        self.prefix = f"conformance/{uuid.uuid4().hex}/"

    def open(self) -> Registry:
        return open_etcd(parse_url(self._server.url(endpoints=[self._proxy.address])), PATIENCE_S)

    def let_pass(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def lose_history(self, revision: int) -> None:
        self._server.call("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    def restart(self) -> None:
        """Return once it writes again: the suite does not expect a put that breaks off."""
        self._server.restart(0)
        registry = self.open()
        registry.execute(Transaction((), (Put(self.prefix + "restarted", b""),)), PATIENCE_S)
        registry.close()

    @contextmanager
    def cut_answers(self) -> Iterator[None]:
        self._proxy.mute()
        yield
        self._proxy.heal()

    @contextmanager
    def replace(self) -> Iterator[None]:
        with EtcdCluster(data_folder=self._folder) as other:
            self._lead_to(other)
            yield
        self._lead_to(self._server)

    def _lead_to(self, server: EtcdCluster) -> None:
        self._proxy.redirect(server.endpoints[0])
        self._proxy.cut()
        self._proxy.heal()


def end_leases(server: EtcdCluster) -> None:
    """End the leases of earlier tests, which would move the revision when they end by themselves."""
    for lease in server.call("/v3/lease/leases", {}).get("leases", ()):
        with suppress(ValueError):  # it has ended meanwhile
            server.call("/v3/lease/revoke", {"ID": lease["ID"]})


@pytest.mark.rule("RB-20", "RB-21", "RB-28", "RB-33")
@pytest.mark.lesson(16)
class TestEtcd(RegistryConformance):
    @pytest.fixture
    def harness(self, etcd: EtcdCluster, tmp_path: Path) -> Iterator[RegistryHarness]:
        end_leases(etcd)
        with TcpProxy(etcd.endpoints[0]) as proxy:
            yield EtcdHarness(etcd, proxy, tmp_path)


@pytest.mark.rule("RB-28")
def test_a_prefix_is_not_read_again_because_others_wrote(etcd: EtcdCluster) -> None:
    """A leader watches its group from what it has read on; other groups write to the same etcd."""
    prefix = f"conformance/{uuid.uuid4().hex}/"
    registry = open_etcd(parse_url(etcd.url()), PATIENCE_S)
    own, key = EventRecorder(PATIENCE_S), EventRecorder(PATIENCE_S)
    start = registry.read_revision() + 1
    registry.execute(Transaction((), (Put(f"{prefix}others", b""),)), PATIENCE_S)
    registry.watch(Target(f"{prefix}own/", prefix=True), start, own)
    registry.watch(Target(f"{prefix}key"), start, key)
    # etcd answers in order: once the second watch is told to read, the first one would have been too.
    key.wait_until(lambda told: bool(told), "a loss told of a single key")
    assert own.told == ()
    registry.close()


@pytest.mark.parametrize("limit", [0, 9, 10, 11, 25])
def test_later_keys_are_read_in_pages_of_one_revision(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """etcd cuts a page after it has left out the older keys, and says whether more of the others follow."""
    monkeypatch.setattr(codec, "PAGE_KEYS", 10)
    prefix = f"conformance/{uuid.uuid4().hex}/"
    registry = open_etcd(parse_url(etcd.url()), PATIENCE_S)
    keys = [f"{prefix}{number:03}" for number in range(100)]
    put_all(registry, [(key, b"old") for key in keys])
    earlier = registry.read_revision()
    put_all(registry, [(key, b"new") for key in keys[1::2]])
    call, pages = Endpoints.call, []

    def overtaken(endpoints: Endpoints, name: str, message: Any, timeout_s: float, repeat: Repeat) -> Any:
        if name == "range":
            pages.append(message)
            put_all(other, [(key, b"newer") for key in keys])
        return call(endpoints, name, message, timeout_s, repeat)

    with closing(open_etcd(parse_url(etcd.url()), PATIENCE_S)) as other, closing(registry):
        monkeypatch.setattr(Endpoints, "call", overtaken)
        found = key_values(commit(registry, Range(prefix, "", limit, earlier)).results[0])
    expected = keys[1::2][: limit or None]
    assert [(item.key, item.value) for item in found] == [(key, b"new") for key in expected]
    assert len(pages) == (len(expected) - 1) // 10
