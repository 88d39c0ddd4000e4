"""The etcd registry under faults of servers and networks, on real servers."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import grpc
import pytest
import tenacity
from cryptography.hazmat.primitives import serialization

from rebalanser import Admin, Group, Settings
from rebalanser.core.group.types import ResourceSpec
from rebalanser.errors import (
    AccessDenied,
    InvalidUrl,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
    RetryLater,
)
from rebalanser.redaction import redact
from rebalanser.registry import RegistryCoordinator
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Created,
    Delete,
    Get,
    Grant,
    Granted,
    Guard,
    HistoryLost,
    KeepAlive,
    KeyValue,
    Outcome,
    Put,
    Range,
    Target,
    Transaction,
    Unchanged,
)
from rebalanser.registry.urls import parse_url
from rebalanser.testing.etcd_server import EtcdCluster, free_ports, make_certificates
from rebalanser.testing.registry_suite import EventRecorder
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until
from rebalanser_etcd import EtcdRegistry, codec, open_etcd
from rebalanser_etcd.endpoints import CallFailed, Endpoint, Endpoints, Repeat
from rebalanser_etcd.failures import judge
from rebalanser_etcd.registry import PLAIN_PASSWORD, connect_etcd
from rebalanser_etcd.watches import CLOSE_TIMEOUT_S, WatchStream, _Session
from support.proxy import TcpProxy

TIMEOUT_S = PATIENCE_S
COMPACT_EVERY_S = 0.005

Opener: TypeAlias = Callable[[str], EtcdRegistry]


@pytest.fixture
def connect() -> Iterator[Opener]:
    """Opens registries that are closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(contextlib.closing(open_etcd(parse_url(url), TIMEOUT_S)))


@pytest.fixture
def members(etcd_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three healthy members, made whole again after the test."""
    yield etcd_cluster
    etcd_cluster.restart_all()


@pytest.fixture
def recorder() -> EventRecorder:
    return EventRecorder(PATIENCE_S)


@pytest.fixture
def prefix() -> str:
    return f"faults/{random.randbytes(8).hex()}/"


def transact(registry: EtcdRegistry, transaction: Transaction, timeout_s: float = TIMEOUT_S) -> Outcome:
    outcome = registry.execute(transaction, timeout_s)
    assert isinstance(outcome, Outcome)
    return outcome


def read(registry: EtcdRegistry, key: str, timeout_s: float = TIMEOUT_S) -> KeyValue | None:
    (found,) = transact(registry, Transaction((), (Get(key),)), timeout_s).results
    assert found is None or isinstance(found, KeyValue)
    return found


def put(registry: EtcdRegistry, key: str, value: bytes = b"", timeout_s: float = TIMEOUT_S) -> Changed:
    revision = transact(registry, Transaction((), (Put(key, value),)), timeout_s).revision
    return Changed(key, revision, value)


def losses_after(first: Changed, recorder: EventRecorder) -> list[HistoryLost]:
    """Losses told after the watch began: at first a scout may tell one that the watch itself makes good."""
    return [lost for lost in recorder.losses if lost.revision > first.revision]


def put_surely(registry: EtcdRegistry, key: str) -> Changed:
    """Put a key that is absent, reading back whatever is unknown."""
    wanted = Transaction((Absent(key),), (Put(key, b""),), (Get(key),))
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RetryLater),
        stop=tenacity.stop_after_delay(PATIENCE_S),
        wait=tenacity.wait_fixed(0.05),
        reraise=True,
    )
    outcome = retrying(transact, registry, wanted, 2.0)
    (found,) = outcome.results
    return Changed(key, found.mod_revision if isinstance(found, KeyValue) else outcome.revision, b"")


def serving_member(registry: EtcdRegistry, endpoints: tuple[str, ...]) -> int:
    """The index of the endpoint that requests go to and, once it runs, the watch stream too."""
    return endpoints.index(registry._endpoints._current.address)


class Increments:
    """One writer of a shared counter: a JSON object with the sum, and how often each writer has counted."""

    def __init__(self, registry: EtcdRegistry, key: str, name: str) -> None:
        self._registry = registry
        self._key = key
        self._name = name
        self.unknown = 0
        self.refused = 0

    def count_to(self, goal: int) -> None:
        """Count up to ``goal`` under guards, checking every claim of the registry about an outcome."""
        deadline = time.monotonic() + PATIENCE_S
        claimed = 0
        while claimed < goal:
            assert time.monotonic() < deadline, f"{self._name} counted {claimed} of {goal}"
            with contextlib.suppress(RetryLater):
                claimed = self._once(claimed)

    def _once(self, claimed: int) -> int:
        stored = read(self._registry, self._key, 2.0)
        state = json.loads(stored.value) if stored else {"sum": 0}
        mine = state.get(self._name, 0)
        assert mine in {claimed, claimed + 1}, "an answered increment is lost, or one counted twice"
        if mine == claimed + 1:
            assert self.unknown, "an increment took effect though the registry said that it had none"
            return int(mine)
        state |= {"sum": state["sum"] + 1, self._name: mine + 1}
        guard: Guard = Unchanged(self._key, stored.mod_revision) if stored else Absent(self._key)
        write = Transaction((guard,), (Put(self._key, json.dumps(state).encode()),))
        try:
            return claimed + int(transact(self._registry, write, 2.0).succeeded)
        except OutcomeUnknown:
            self.unknown += 1
            raise
        except RegistryUnavailable:
            self.refused += 1
            raise


@pytest.mark.rule("RB-28")
def test_no_increment_is_lost_or_doubled_when_leaders_are_killed(
    members: EtcdCluster, connect: Opener, prefix: str
) -> None:
    goal = 150
    writers = [Increments(connect(members.url()), prefix + "counter", f"writer-{n}") for n in range(4)]
    with ThreadPoolExecutor(len(writers)) as threads:
        counting = [threads.submit(writer.count_to, goal) for writer in writers]
        for _ in range(2):
            time.sleep(0.3)
            leader = members.wait_leader()
            members.kill(leader)
            time.sleep(1.0)
            members.restart(leader)
        for future in counting:
            future.result()
    stored = read(connect(members.url()), prefix + "counter")
    assert stored is not None
    assert json.loads(stored.value) == {
        "sum": goal * len(writers),
        **{f"writer-{n}": goal for n in range(len(writers))},
    }


@pytest.mark.rule("RB-28")
def test_a_watch_survives_the_death_of_its_member(
    members: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    registry = connect(members.url())
    written = [put(registry, f"{prefix}0")]
    registry.watch(Target(prefix, prefix=True), written[0].revision, recorder)
    recorder.wait_for(*written)
    for number in range(1, 4):
        member = serving_member(registry, members.endpoints)
        members.kill(member)
        written += [put_surely(registry, f"{prefix}{number}-{each}") for each in range(20)]
        members.restart(member)
    recorder.wait_for(*written)
    assert [change.revision for change in recorder.changes] == sorted(change.revision for change in written)
    assert losses_after(written[0], recorder) == []


@pytest.mark.rule("RB-28")
def test_a_watch_survives_a_change_of_leader_and_restarts_of_all_members(
    members: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    registry = connect(members.url())
    written = [put(registry, f"{prefix}0")]
    registry.watch(Target(prefix, prefix=True), written[0].revision, recorder)
    recorder.wait_for(*written)
    leader = members.wait_leader()
    members.stop_member(leader)
    written.append(put_surely(registry, f"{prefix}led by another"))
    members.restart(leader)
    for member in range(members.members):
        members.restart(member)
        written.append(put_surely(registry, f"{prefix}after restart {member}"))
    recorder.wait_for(*written)
    assert losses_after(written[0], recorder) == []


@pytest.mark.rule("RB-28")
@pytest.mark.lesson(18)
def test_a_cut_stream_is_resumed_without_a_gap(
    etcd: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    direct = connect(etcd.url())
    with TcpProxy(etcd.endpoints[0]) as proxy:
        watcher = connect(etcd.url(endpoints=[proxy.address]))
        written = [put(direct, f"{prefix}first")]
        watcher.watch(Target(prefix, prefix=True), written[0].revision, recorder)
        recorder.wait_for(*written)
        for number in range(5):
            proxy.cut()
            written += [put(direct, f"{prefix}{number}-{each}") for each in range(10)]
            proxy.heal()
        recorder.wait_for(*written)
        assert recorder.changes == written
        assert losses_after(written[0], recorder) == []
        watcher.close()


@pytest.mark.rule("RB-28")
def test_a_silent_network_moves_requests_and_watches_elsewhere(
    members: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    direct = connect(members.url())
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(TcpProxy(endpoint)) for endpoint in members.endpoints[:2]]
        addresses = tuple(proxy.address for proxy in proxies)
        registry = connect(members.url(endpoints=addresses))
        first = put(registry, f"{prefix}first")
        registry.watch(Target(prefix, prefix=True), first.revision, recorder)
        recorder.wait_for(first)
        silent = proxies[serving_member(registry, addresses)]
        silent.stall()
        hidden = put(direct, f"{prefix}hidden")
        assert read(registry, hidden.key) is not None
        recorder.wait_for(hidden)
        silent.heal()
        recorder.wait_for(put(registry, f"{prefix}last"))
        assert losses_after(first, recorder) == []
        registry.close()


@pytest.mark.rule("RB-28")
def test_a_silent_stream_is_noticed_without_any_request(
    members: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    direct = connect(members.url())
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(TcpProxy(endpoint)) for endpoint in members.endpoints[:2]]
        addresses = tuple(proxy.address for proxy in proxies)
        registry = connect(members.url(endpoints=addresses))
        first = put(registry, f"{prefix}first")
        registry.watch(Target(prefix, prefix=True), first.revision, recorder)
        recorder.wait_for(first)
        proxies[serving_member(registry, addresses)].stall()
        recorder.wait_for(put(direct, f"{prefix}hidden"))
        registry.close()


@pytest.mark.rule("RB-28")
@pytest.mark.lesson(18)
def test_a_compaction_while_the_watch_is_down_is_told(
    etcd: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    direct = connect(etcd.url())
    with TcpProxy(etcd.endpoints[0]) as proxy:
        watcher = connect(etcd.url(endpoints=[proxy.address]))
        first = put(direct, f"{prefix}first")
        watcher.watch(Target(prefix, prefix=True), first.revision, recorder)
        recorder.wait_for(first)
        proxy.cut()
        hidden = [put(direct, f"{prefix}hidden-{each}") for each in range(10)]
        etcd.call("/v3/kv/compaction", {"revision": str(hidden[-1].revision), "physical": True})
        proxy.heal()
        recorder.wait_for_all(hidden)
        later = put(direct, f"{prefix}later")
        recorder.wait_for(later)
        (lost,) = losses_after(first, recorder)
        assert lost.revision >= hidden[-2].revision
        watcher.close()


def test_a_long_range_survives_compactions(
    etcd: EtcdCluster, connect: Opener, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "PAGE_KEYS", 2_000)
    registry = connect(etcd.url())
    keys = [f"{prefix}{number:05}" for number in range(4_100)]
    for start in range(0, len(keys), 100):
        transact(registry, Transaction((), tuple(Put(key, b"") for key in keys[start : start + 100])))
    compacting = threading.Event()

    def compact() -> None:
        while not compacting.wait(COMPACT_EVERY_S):
            revision = put(registry, f"{prefix}~").revision
            etcd.call("/v3/kv/compaction", {"revision": str(revision)})

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(compact)
        for _ in range(5):
            (found,) = transact(registry, Transaction((), (Range(f"{prefix}0"),))).results
            assert isinstance(found, tuple)
            assert [item.key for item in found] == keys
        compacting.set()
        done.result()


@pytest.mark.rule("RB-28")
def test_a_paused_member_makes_writes_unknown_and_reads_go_elsewhere(
    members: EtcdCluster, connect: Opener, prefix: str
) -> None:
    registry = connect(members.url())
    before = put(registry, f"{prefix}before")
    paused = serving_member(registry, members.endpoints)
    members.pause(paused)
    with pytest.raises(OutcomeUnknown, match=members.endpoints[paused]):
        put(registry, f"{prefix}unknown", timeout_s=0.5)
    stored = read(registry, before.key)
    assert stored is not None
    assert stored.mod_revision == before.revision
    assert serving_member(registry, members.endpoints) != paused
    members.resume(paused)


def test_guards_alone_are_not_answered_by_a_member_that_is_cut_off(
    members: EtcdCluster, connect: Opener, prefix: str
) -> None:
    """Else a node would take its key for alive that the others have removed: this is its proof of life."""
    proof = Transaction((Created(f"{prefix}node", put(connect(members.url()), f"{prefix}node").revision),))
    leader = members.wait_leader()
    registry = connect(members.url(endpoints=[members.endpoints[leader]]))
    assert transact(registry, proof).succeeded
    for member in set(range(members.members)) - {leader}:
        members.pause(member)
    with pytest.raises(RegistryUnavailable):
        transact(registry, proof, timeout_s=1.0)


@pytest.mark.rule("RB-28")
def test_without_a_quorum_nothing_is_answered_and_afterwards_all_goes_on(
    members: EtcdCluster, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    registry = connect(members.url())
    first = put(registry, f"{prefix}first")
    registry.watch(Target(prefix, prefix=True), first.revision, recorder)
    recorder.wait_for(first)
    members.kill(0)
    members.kill(1)
    for _ in range(2):
        with pytest.raises(RetryLater):
            put(registry, f"{prefix}without", timeout_s=1.5)
    with pytest.raises(RegistryUnavailable):
        read(registry, f"{prefix}without", timeout_s=1.5)
    members.restart_all()
    recorder.wait_for(put_surely(registry, f"{prefix}again"))


@pytest.mark.lesson(19)
def test_a_full_server_says_that_nodes_cannot_join(tmp_path: Path, connect: Opener, prefix: str) -> None:
    with EtcdCluster(data_folder=tmp_path, quota_bytes=2_000_000) as server:
        registry = connect(server.url())
        with pytest.raises(OutcomeUnknown, match=r"may have taken effect.*storage quota"):  # noqa: PT012
            for number in range(400):
                put(registry, f"{prefix}{number}", b"x" * 500_000)
        with pytest.raises(QuotaExceeded, match=r"no node can join.*compact.*defrag.*alarm disarm"):
            registry.execute(Grant(10), TIMEOUT_S)
        if not any("refuses reads too" in reason for reason in registry.capabilities.unsafe_reasons):
            assert read(registry, f"{prefix}0") is not None


def test_credentials(tmp_path: Path, connect: Opener, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdCluster(data_folder=tmp_path, auth=("alice", "s3cr:t@/")) as server:
        host = server.endpoints[0]
        put(connect(server.url()), f"{prefix}url")
        for url in (f"etcd://alice:guess-me@{host}/", f"etcd://nobody:guess-me@{host}/"):
            with pytest.raises(AccessDenied, match="wrong user or password") as denied:
                connect(url)
            assert "guess-me" not in str(denied.value)
        with pytest.raises(AccessDenied, match="asks for a user and a password"):
            connect(f"etcd://{host}/")
        with pytest.raises(InvalidUrl, match="REBALANSER_ETCD_PASSWORD"):
            connect(f"etcd://alice@{host}/")
        monkeypatch.setenv("REBALANSER_ETCD_USER", "alice")
        monkeypatch.setenv("REBALANSER_ETCD_PASSWORD", "s3cr:t@/")
        put(connect(f"etcd://{host}/"), f"{prefix}environment")


@pytest.mark.rule("RB-33")
def test_a_user_needs_no_more_than_the_prefix(tmp_path: Path, connect: Opener) -> None:
    with EtcdCluster(data_folder=tmp_path, auth=("root", "root-secret")) as server:
        begin, end = (base64.b64encode(key).decode() for key in (b"ours/", b"ours0"))
        permission = {"permType": "READWRITE", "key": begin, "range_end": end}
        server.call("/v3/auth/role/add", {"name": "rebalanser"})
        server.call("/v3/auth/role/grant", {"name": "rebalanser", "perm": permission})
        server.call("/v3/auth/user/add", {"name": "orders", "password": "orders-secret"})
        server.call("/v3/auth/user/grant", {"user": "orders", "role": "rebalanser"})
        url = f"etcd://orders:orders-secret@{server.endpoints[0]}/ours"
        group = Group("few", url, settings=Settings(lease_ttl_s=2))
        group.on_start(lambda _: None)
        group.on_stop(lambda _: None)
        with Admin("few", url) as admin, group:
            admin.add("a", "b")
            admin.wait_balanced(timeout_s=PATIENCE_S)
            admin.drain("nobody")
            state = admin.state()
            assert state.owned == 2
            assert len(admin._coordinator.heartbeats([state.nodes[0].node])) == 1
        with pytest.raises(AccessDenied, match="no permission"):
            put(connect(url), "others/key")
        with pytest.raises(AccessDenied, match="no permission"):
            connect(f"etcd://orders:orders-secret@{server.endpoints[0]}/others")


def test_a_stale_token_is_renewed(
    tmp_path: Path, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    with EtcdCluster(data_folder=tmp_path, auth=("alice", "secret")) as server:
        registry = connect(server.url())
        stale = (("hasleader", "true"), ("token", "stale.1"))
        registry._endpoints._metadata = stale
        written = put(registry, f"{prefix}put")
        registry._endpoints._metadata = stale
        registry.watch(Target(prefix, prefix=True), written.revision, recorder)
        recorder.wait_for(written)
        registry._endpoints._metadata = stale
        assert isinstance(registry.execute(Grant(10), TIMEOUT_S), Granted)
        server.restart(0)
        recorder.wait_for(put_surely(registry, f"{prefix}after the restart"))


def test_credentials_for_a_server_without_authentication(
    etcd: EtcdCluster, connect: Opener, prefix: str
) -> None:
    put(connect(f"etcd://alice:secret@{etcd.endpoints[0]}/"), f"{prefix}key")


def test_certificates(tmp_path: Path, connect: Opener, prefix: str) -> None:
    others = make_certificates(tmp_path / "others")
    with EtcdCluster(data_folder=tmp_path / "etcd", tls=True, client_cert_auth=True) as server:
        put(connect(server.url()), f"{prefix}key")
        mine = server.certificates
        assert mine is not None
        location = f"{server.endpoints[0]}/"
        client = f"cert={mine.client_cert}&key={mine.client_key}"
        for options in (
            f"ca={others.ca}&{client}",
            client,
            f"ca={mine.ca}",
            f"ca={mine.ca}&cert={others.client_cert}&key={others.client_key}",
            f"ca={mine.ca}&{client}&server_name=etcd.example",
        ):
            with pytest.raises(AccessDenied, match="TLS was refused"):
                connect(f"etcd+tls://{location}?{options}")
        put(connect(f"etcd+tls://{location}?ca={mine.ca}&{client}&server_name=localhost"), f"{prefix}named")
        with pytest.raises(RegistryUnavailable, match=r"etcd\+tls:// or etcd://"):
            open_etcd(parse_url(f"etcd://{location}"), 0.5)


def test_certificates_that_are_replaced_are_used_without_a_restart(
    tmp_path: Path, connect: Opener, recorder: EventRecorder, prefix: str
) -> None:
    with EtcdCluster(data_folder=tmp_path / "etcd", tls=True, client_cert_auth=True) as server:
        registry = connect(server.url())
        first = put(registry, f"{prefix}first")
        registry.watch(Target(prefix, prefix=True), first.revision, recorder)
        recorder.wait_for(first)
        mine, others = server.certificates, make_certificates(tmp_path / "others")
        assert mine is not None
        for name in ("ca", "server_cert", "server_key"):
            shutil.copy(getattr(others, name), getattr(mine, name))
        server.kill(0)
        server._start_server(0)
        for name in ("client_cert", "client_key"):  # only now: what is refused meanwhile is tried again
            with pytest.raises((AccessDenied, RegistryUnavailable)):
                put(registry, f"{prefix}half replaced", timeout_s=1.0)
            shutil.copy(getattr(others, name), getattr(mine, name))
        server.wait_healthy()
        recorder.wait_for(put_surely(registry, f"{prefix}replaced"))


def encrypt(key: Path, passphrase: bytes, to: Path) -> None:
    """Write a private key with a passphrase."""
    opened = serialization.load_pem_private_key(key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(passphrase)
    form = serialization.PrivateFormat.PKCS8
    to.write_bytes(opened.private_bytes(serialization.Encoding.PEM, form, encryption))


def test_a_key_with_a_passphrase_is_opened_and_both_may_be_replaced(
    tmp_path: Path, connect: Opener, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with EtcdCluster(data_folder=tmp_path / "etcd", tls=True, client_cert_auth=True) as server:
        mine, others = server.certificates, make_certificates(tmp_path / "others")
        assert mine is not None
        key, passphrase, client_cert = tmp_path / "key", tmp_path / "passphrase", tmp_path / "client_cert"
        encrypt(others.client_key, b"another secret", key)
        passphrase.write_text("another secret\n")
        shutil.copy(others.client_cert, client_cert)
        options = f"ca={mine.ca}&cert={client_cert}&key={key}&key_password_file={passphrase}"
        registry = connect_etcd(parse_url(f"etcd+tls://{server.endpoints[0]}/?{options}"))
        with contextlib.closing(registry):
            with pytest.raises(AccessDenied, match="TLS was refused"):
                put(registry, f"{prefix}others")
            shutil.copy(mine.client_cert, client_cert)
            encrypt(mine.client_key, b"my secret", key)
            with pytest.raises((AccessDenied, RegistryUnavailable)) as refused:  # only half of it is replaced
                put(registry, f"{prefix}half", timeout_s=1.0)
            assert "can't be opened with the passphrase" in caplog.text
            assert "secret" not in caplog.text + str(refused.value)
            passphrase.write_text("my secret\n")
            put_surely(registry, f"{prefix}mine")
        put(connect(f"etcd+tls://{server.endpoints[0]}/?{options}"), f"{prefix}again")


def test_a_password_in_a_file_is_read_again(tmp_path: Path, connect: Opener, prefix: str) -> None:
    file = tmp_path / "password"
    file.write_text("first-secret\n")
    with EtcdCluster(data_folder=tmp_path / "etcd", auth=("root", "first-secret")) as server:
        registry = connect(f"etcd://root@{server.endpoints[0]}/?password_file={file}")
        put(registry, f"{prefix}first")
        server.call("/v3/auth/user/changepw", {"name": "root", "password": "second-secret"})
        file.write_text("second-secret\n")
        registry._endpoints._metadata = (("hasleader", "true"), ("token", "stale.1"))
        put(registry, f"{prefix}second")
        assert redact("second-secret") == "***"


def test_a_password_in_the_environment_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBALANSER_ETCD_USER", "alice")
    monkeypatch.setenv("REBALANSER_ETCD_PASSWORD", "surrounding-secret")
    connect_etcd(parse_url("etcd://127.0.0.1:1/")).close()
    assert redact("refused: surrounding-secret") == "refused: ***"


@pytest.mark.parametrize(
    ("url", "warned"),
    [
        ("etcd://ann:secret@10.1.2.3:2379/", True),
        ("etcd://ann:secret@localhost:2379,etcd.example:2379/", True),
        ("etcd+tls://ann:secret@10.1.2.3:2379/", False),
        ("etcd://10.1.2.3:2379/", False),
        ("etcd://ann:secret@127.0.0.1:2379,[::1]:2379,localhost:2379/", False),
    ],
)
def test_a_password_in_clear_text_is_warned_about(url: str, warned: bool) -> None:
    with contextlib.closing(connect_etcd(parse_url(url))) as registry:
        assert (PLAIN_PASSWORD in registry.capabilities.unsafe_reasons) is warned


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd+tls://127.0.0.1:1/?ca=/nowhere.pem", "file of ca cannot be read"),
        ("etcd+tls://127.0.0.1:1/?cert=/a.pem", "needs cert and key together"),
        (
            "etcd+tls://127.0.0.1:1/?cacert=/a.pem",
            "unknown option 'cacert'; known are ca, cert, key, key_password_file",
        ),
        ("etcd+tls://127.0.0.1:1/?key_password_file=/a", "key_password_file without key and cert"),
        ("etcd://127.0.0.1:1/?key_password_file=/a", r"key_password_file needs etcd\+tls://"),
        ("etcd://127.0.0.1:1/?ca=/a.pem", r"ca needs etcd\+tls://"),
        ("etcd://alice@127.0.0.1:1/?password_file=/nowhere", "file of password_file cannot be read"),
    ],
)
def test_options_that_cannot_be_used(connect: Opener, url: str, message: str) -> None:
    with pytest.raises(InvalidUrl, match=message):
        connect(url)


def test_an_unreachable_cluster_is_named_with_all_its_endpoints() -> None:
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=r"tried .* for ") as unavailable:
        open_etcd(parse_url(f"etcd://{','.join(endpoints)}/"), 1.0)
    assert time.monotonic() - began < 5.0 * patience_ratio()
    for endpoint in endpoints:
        assert f"{endpoint} (Failed to connect to remote host: Connection refused)" in str(unavailable.value)


def test_one_dead_endpoint_of_two_does_not_matter(etcd: EtcdCluster, connect: Opener, prefix: str) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    for number in range(8):  # which of the two is tried first is left to chance
        put(connect(etcd.url(endpoints=[dead, etcd.endpoints[0]])), f"{prefix}{number}")


def test_many_watches_come_and_go_while_others_write(etcd: EtcdCluster, connect: Opener, prefix: str) -> None:
    registry = connect(etcd.url())
    start = put(registry, f"{prefix}start").revision + 1
    recorders = [EventRecorder(PATIENCE_S) for _ in range(400)]
    etcd.pause(0)
    try:  # beginning a watch does not wait for the server
        watches = [
            registry.watch(Target(f"{prefix}{number}"), start, recorder)
            for number, recorder in enumerate(recorders)
        ]
    finally:
        etcd.resume(0)

    def stop_odd_ones() -> None:
        for watch in watches[1::2]:
            watch.close()

    with ThreadPoolExecutor(4) as threads:
        stopping = threads.submit(stop_odd_ones)
        written = list(threads.map(lambda n: put(registry, f"{prefix}{n}", b"%d" % n), range(400)))
        stopping.result()
    for change, recorder in list(zip(written, recorders, strict=True))[::2]:
        recorder.wait_for(change)
        assert recorder.changes == [change]
    assert all(set(recorder.changes) <= {change} for change, recorder in zip(written, recorders, strict=True))


def test_a_closed_registry_leaves_no_thread_and_no_file(
    etcd: EtcdCluster, recorder: EventRecorder, prefix: str
) -> None:
    def open_use_and_close() -> None:
        registry = open_etcd(parse_url(etcd.url()), TIMEOUT_S)
        change = put(registry, f"{prefix}key")
        registry.watch(Target(prefix, prefix=True), change.revision, recorder)
        recorder.wait_for(change)
        registry.close()
        registry.close()
        with pytest.raises(RegistryUnavailable, match="closed"):
            put(registry, f"{prefix}key")

    open_use_and_close()
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a listing, not paths)
    threads = set(threading.enumerate())
    times = 10
    for _ in range(times):
        open_use_and_close()
    waiting = tenacity.Retrying(
        retry=tenacity.retry_if_result(bool),
        stop=tenacity.stop_after_delay(5),
        wait=tenacity.wait_fixed(0.05),
    )
    waiting(lambda: set(threading.enumerate()) - threads)
    waiting(lambda: len(os.listdir("/proc/self/fd")) >= files + times)  # noqa: PTH208


@pytest.mark.rule("RB-1", "RB-28")
def test_two_clusters_behind_one_url_are_refused(etcd: EtcdCluster, tmp_path: Path) -> None:
    with EtcdCluster(data_folder=tmp_path) as other:
        url = etcd.url(endpoints=[etcd.endpoints[0], other.endpoints[0]])
        for _ in range(4):  # which of the two is tried first is left to chance
            with pytest.raises(RegistryRefused, match="must name the members of one cluster"):
                open_etcd(parse_url(url), TIMEOUT_S)


@pytest.mark.rule("RB-1", "RB-28")
def test_a_copy_that_says_that_it_is_the_same_cluster_is_refused(tmp_path: Path, prefix: str) -> None:
    """The id of a cluster follows from how it was set up: copies share it, and so may two made alike."""
    with EtcdCluster(data_folder=tmp_path / "one") as one:
        with contextlib.closing(open_etcd(parse_url(one.url()), TIMEOUT_S)) as registry:
            put(registry, f"{prefix}before")
            one.kill(0)
            shutil.copytree(tmp_path / "one" / "member-0", tmp_path / "two" / "member-0")
            one.restart(0)
            put_surely(registry, f"{prefix}after")
        with EtcdCluster(data_folder=tmp_path / "two") as two:
            url = one.url(endpoints=[one.endpoints[0], two.endpoints[0]])
            for _ in range(4):
                with pytest.raises(RegistryRefused, match="went back from revision"):
                    open_etcd(parse_url(url), TIMEOUT_S)


@pytest.mark.rule("RB-1", "RB-28")
@pytest.mark.parametrize("keeps_id", [True, False])
def test_a_store_that_is_replaced_while_it_is_used_is_refused_for_good(
    tmp_path: Path, connect: Opener, recorder: EventRecorder, prefix: str, keeps_id: bool
) -> None:
    with EtcdCluster(data_folder=tmp_path / "one") as one, TcpProxy(one.endpoints[0]) as proxy:
        registry = connect(one.url(endpoints=[proxy.address]))
        first = put(registry, f"{prefix}first")
        registry.watch(Target(prefix, prefix=True), first.revision, recorder)
        recorder.wait_for(first)
        granted = registry.execute(Grant(10), TIMEOUT_S)
        assert isinstance(granted, Granted)
        if keeps_id:
            one.kill(0)
            shutil.copytree(tmp_path / "one" / "member-0", tmp_path / "two" / "member-0")
            one.restart(0)
            for number in range(10):
                put_surely(registry, f"{prefix}lost {number}")
        with EtcdCluster(data_folder=tmp_path / "two") as two:
            proxy.redirect(two.endpoints[0])
            proxy.cut()
            proxy.heal()
            message = "went back from" if keeps_id else "belongs to the etcd cluster"
            refused = refusal(registry, Transaction((), (Get(first.key),)))
            assert message in str(refused)
            proxy.redirect(one.endpoints[0])
            for request in (Transaction((), (Put(first.key, b""),)), KeepAlive(granted.lease)):
                with pytest.raises(RegistryRefused, match=message):
                    registry.execute(request, TIMEOUT_S)
        registry.close()


def refusal(registry: EtcdRegistry, transaction: Transaction) -> RegistryRefused:
    """Repeat a request until it is refused."""

    def ask() -> RegistryRefused | None:
        try:
            transact(registry, transaction, 2.0)
        except RegistryRefused as refused:
            return refused
        except RetryLater:
            return None
        return None

    refused = wait_until(ask)
    assert isinstance(refused, RegistryRefused)
    return refused


@pytest.mark.rule("RB-1", "RB-28")
def test_a_write_that_another_cluster_carried_out_is_of_unknown_outcome(
    etcd: EtcdCluster, connect: Opener, tmp_path: Path, prefix: str
) -> None:
    with EtcdCluster(data_folder=tmp_path) as other, TcpProxy(etcd.endpoints[0]) as proxy:
        registry = connect(etcd.url(endpoints=[proxy.address]))
        put(registry, f"{prefix}here")
        proxy.redirect(other.endpoints[0])
        proxy.cut()
        proxy.heal()
        (endpoint,) = registry._endpoints._all
        wait_until(lambda: healed(endpoint.channel))
        endpoint.proven = True  # as if the connection had been made anew just before the request was sent
        with pytest.raises(OutcomeUnknown, match=r"elsewhere.*belongs to the etcd cluster"):
            put(registry, f"{prefix}there")
        with pytest.raises(RegistryRefused):
            put(registry, f"{prefix}again")
        registry.close()


@pytest.mark.rule("RB-28")
def test_a_watch_that_another_cluster_answers_is_noticed(
    etcd: EtcdCluster,
    connect: Opener,
    recorder: EventRecorder,
    tmp_path: Path,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with EtcdCluster(data_folder=tmp_path) as other, TcpProxy(etcd.endpoints[0]) as proxy:
        registry = connect(etcd.url(endpoints=[proxy.address]))
        first = put(registry, f"{prefix}first")
        registry.watch(Target(prefix, prefix=True), first.revision, recorder)
        recorder.wait_for(first)
        # As if the connection were made anew between the proof of the endpoint and the watch.
        monkeypatch.setattr(registry._endpoints, "_look_at", lambda *_: None)
        proxy.redirect(other.endpoints[0])
        proxy.cut()
        proxy.heal()
        wait_until(lambda: registry._endpoints._wrong)
        registry.close()


def healed(channel: grpc.Channel) -> bool:
    """True if the channel is connected again."""
    try:
        grpc.channel_ready_future(channel).result(PATIENCE_S)
    except grpc.FutureTimeoutError:
        return False
    return True


@pytest.mark.rule("RB-28")
def test_an_endpoint_that_was_down_at_first_is_compared_once_it_answers(
    etcd: EtcdCluster, connect: Opener, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another node may go on with it alone, if that one was opened while only it answered."""
    monkeypatch.setattr("rebalanser_etcd.endpoints.COMPARE_AGAIN_S", 0.1)
    with EtcdCluster(data_folder=tmp_path) as other:
        other.kill(0)
        registry = connect(etcd.url(endpoints=[etcd.endpoints[0], other.endpoints[0]]))
        put(registry, f"{prefix}key")
        assert f"{other.endpoints[0]} has not answered" in " ".join(registry.capabilities.unsafe_reasons)
        other.restart(0)
        refused = refusal(registry, Transaction((), (Get(f"{prefix}key"),)))
        assert f"{other.endpoints[0]} belongs to the etcd cluster" in str(refused)


@pytest.mark.parametrize("limit", [16, 37, 127])
def test_a_lower_limit_of_operations_is_found_out_and_kept(
    tmp_path: Path, connect: Opener, limit: int
) -> None:
    with EtcdCluster(data_folder=tmp_path, extra_args=[f"--max-txn-ops={limit}"]) as server:
        registry = connect(server.url())
        assert registry.capabilities.max_operations == limit
        transact(registry, Transaction((), tuple(Put(f"{n}", b"") for n in range(limit))))
        with pytest.raises(RequestTooLarge, match=f"etcd takes {limit}"):
            transact(registry, Transaction((), (Get("a"),) * (limit + 1)))
        with contextlib.closing(
            RegistryCoordinator(registry, "rebalanser", "limits", time.monotonic, TIMEOUT_S)
        ) as group:
            specs = [ResourceSpec(f"{n}") for n in range(3 * limit)]
            assert group.put_resources(specs, lambda _: None) == len(specs)
            assert len(group.read().group.resources) == len(specs)


@pytest.mark.rule("RB-29")
def test_a_lower_limit_of_operations_that_shows_later_is_kept_from_then_on(
    tmp_path: Path, connect: Opener
) -> None:
    """As if a member that takes less was away when the limits were measured, and alone answers then."""
    with EtcdCluster(data_folder=tmp_path) as server:
        registry = connect(server.url())
        group = RegistryCoordinator(registry, "rebalanser", "limits", time.monotonic, TIMEOUT_S)
        server.flags.append("--max-txn-ops=37")
        server.restart(0)
        assert registry.capabilities.max_operations == 128
        specs = [ResourceSpec(f"{n}") for n in range(300)]
        with pytest.raises(RegistryUnavailable, match="takes 37 operations in a transaction now"):
            group.put_resources(specs, lambda _: None)
        assert registry.capabilities.max_operations == 37
        assert group.put_resources(specs, lambda _: None) == len(specs)
        with pytest.raises(RequestTooLarge, match="etcd takes 37"):
            transact(registry, Transaction((), (Get("a"),) * 38))
        server.flags.append("--max-txn-ops=15")
        server.restart(0)
        with pytest.raises(RegistryRefused, match="raise --max-txn-ops"):
            transact(registry, Transaction((), (Get("a"),) * 37))


def test_a_limit_of_operations_that_no_group_fits_in_is_refused(tmp_path: Path) -> None:
    with (
        EtcdCluster(data_folder=tmp_path, extra_args=["--max-txn-ops=15"]) as server,
        pytest.raises(RegistryRefused, match="raise --max-txn-ops"),
    ):
        open_etcd(parse_url(server.url()), TIMEOUT_S)


class Overloaded:
    """Stands in for what endpoints send: status is answered, and transactions only after ``refusals``."""

    def __init__(self, refusals: float, guarded: bool = False) -> None:
        self._refusals = refusals
        self._shim = guarded
        self.asked: list[str] = []

    def send(self, endpoint: Endpoint, call: str, *_: object) -> object:
        header = SimpleNamespace(cluster_id=1, revision=1)
        if call == "status":
            if self._shim:
                raise CallFailed(judge(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied"))
            return SimpleNamespace(leader=1, version="3.6.16", header=header)
        self.asked.append(endpoint.address)
        if len(self.asked) <= self._refusals:
            raise CallFailed(judge(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests"))
        return SimpleNamespace(header=header)


def three_endpoints(monkeypatch: pytest.MonkeyPatch, server: Overloaded) -> tuple[Endpoints, list[Endpoint]]:
    """Endpoints that a stand-in answers for, and those of them that were set aside."""
    monkeypatch.setattr(
        Endpoint, "send", lambda endpoint, call, *arguments: server.send(endpoint, call, *arguments)
    )
    endpoints = Endpoints([f"127.0.0.1:{port}" for port in free_ports(3)], None, None, lambda _: None)
    monkeypatch.setattr(endpoints, "_compare_absent", lambda _: None)
    set_aside: list[Endpoint] = []
    endpoints.on_rest(set_aside.append)
    return endpoints, set_aside


def test_a_busy_server_is_asked_again_later_and_no_other_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Overloaded(refusals=3)
    endpoints, set_aside = three_endpoints(monkeypatch, server)
    began = time.monotonic()
    endpoints.call("transact", None, TIMEOUT_S, Repeat.NEVER)
    assert time.monotonic() - began >= 0.05 + 0.1 + 0.2  # half of each pause at least
    assert len(server.asked) == 4
    assert len(set(server.asked)) == 1
    assert set_aside == []
    endpoints.close()


def test_a_server_that_hides_its_status_from_ordinary_users_can_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Overloaded(refusals=0, guarded=True)
    endpoints, set_aside = three_endpoints(monkeypatch, server)
    endpoints.call("transact", None, TIMEOUT_S, Repeat.NEVER)
    assert len(server.asked) == 2  # once to prove the endpoint
    assert set_aside == []
    assert endpoints.versions == {""}
    endpoints.close()


def test_what_a_busy_server_never_took_had_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Overloaded(refusals=math.inf)
    endpoints, set_aside = three_endpoints(monkeypatch, server)
    with pytest.raises(RegistryUnavailable, match=r"overloaded.*too many requests"):
        endpoints.call("transact", None, 1.0, Repeat.NEVER)
    assert len(server.asked) <= 6
    assert [each.address for each in set_aside] == [server.asked[0]]  # once for all of the request's tries
    endpoints.close()


@pytest.mark.rule("RB-28")
def test_watches_go_on_after_an_error_that_nobody_expected(
    etcd: EtcdCluster,
    connect: Opener,
    recorder: EventRecorder,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = connect(etcd.url())
    deliver = WatchStream._deliver
    errors = [MemoryError(), KeyError(7)]

    def deliver_at_last(stream: WatchStream, session: _Session, response: object) -> None:
        if errors:
            raise errors.pop()
        deliver(stream, session, response)

    monkeypatch.setattr(WatchStream, "_deliver", deliver_at_last)
    first = put(registry, f"{prefix}first")
    registry.watch(Target(prefix, prefix=True), first.revision, recorder)
    recorder.wait_for(first)
    assert caplog.text.count("the watches begin again") == 2


def test_closing_does_not_wait_for_a_server_that_is_silent(
    etcd: EtcdCluster, recorder: EventRecorder, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalanser_etcd.endpoints.LONGEST_PROOF_S", PATIENCE_S)
    monkeypatch.setattr("rebalanser_etcd.watches.READY_TIMEOUT_S", PATIENCE_S)
    with TcpProxy(etcd.endpoints[0]) as proxy:
        registry = open_etcd(parse_url(etcd.url(endpoints=[proxy.address])), TIMEOUT_S)
        proxy.stall()
        registry._endpoints._current.proven = False
        registry.watch(Target(prefix, prefix=True), 1, recorder)
        thread = registry._watches._thread
        assert thread is not None
        began = time.monotonic()
        registry.close()
        assert time.monotonic() - began < CLOSE_TIMEOUT_S / 2
        assert not thread.is_alive()


def test_a_login_is_not_sent_again_while_the_server_is_busy_with_it(
    tmp_path: Path, connect: Opener, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking a password costs the server more time here than a request has."""
    with EtcdCluster(
        data_folder=tmp_path, auth=("alice", "secret"), extra_args=["--bcrypt-cost=14"]
    ) as server:
        registry = connect(server.url())
        sent: list[str] = []
        begin = Endpoint.begin

        def count(endpoint: Endpoint, call: str, *arguments: Any) -> object:
            sent.append(call)
            return begin(endpoint, call, *arguments)

        monkeypatch.setattr(Endpoint, "begin", count)
        registry._endpoints._metadata = (("hasleader", "true"), ("token", "stale.1"))

        def ask() -> bool:
            with contextlib.suppress(RegistryUnavailable):
                return transact(registry, Transaction((), (Get(prefix),)), 0.2).succeeded
            return False

        wait_until(ask)
        assert sent == ["authenticate"]


def test_a_long_read_delays_no_heartbeat(etcd: EtcdCluster, connect: Opener, prefix: str) -> None:
    registry = connect(etcd.url())
    keys = [f"{prefix}{number:05}" for number in range(20_000)]
    for start in range(0, len(keys), 128):
        transact(registry, Transaction((), tuple(Put(key, b"v" * 50) for key in keys[start : start + 128])))
    granted = registry.execute(Grant(10), TIMEOUT_S)
    assert isinstance(granted, Granted)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(transact, registry, Transaction((), (Range(prefix),)))
        beats = 0
        while not reading.done():
            registry.execute(KeepAlive(granted.lease), TIMEOUT_S)
            read(registry, f"{prefix}header")
            beats += 1
        (found,) = reading.result().results
    assert isinstance(found, tuple)
    assert len(found) == len(keys)
    assert beats > 3, "with one lock for all requests they would wait for the read to end"
    for start in range(0, len(keys), 128):
        transact(registry, Transaction((), tuple(Delete(key) for key in keys[start : start + 128])))


def tokens_of_a_node(url: str, meanwhile: Callable[[], object] = lambda: None) -> list[int]:
    """Run a node until it owns both resources of its group, and return their tokens."""
    group = Group("restored", url, settings=Settings(lease_ttl_s=2))
    group.on_start(lambda _: None)
    group.on_stop(lambda _: None)
    with group:
        wait_until(lambda: len(group.resources) == 2)
        meanwhile()
        return [owned.token for owned in group.resources.values()]


def save_snapshot(etcd: EtcdCluster, file: Path) -> None:
    request = urllib.request.Request(f"http://{etcd.endpoints[0]}/v3/maintenance/snapshot", b"{}")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer, file.open("wb") as into:
        for line in answer:
            into.write(base64.b64decode(json.loads(line)["result"].get("blob", "")))


@pytest.mark.rule("RB-1", "RB-12")
@pytest.mark.parametrize("as_told", [True, False])
def test_tokens_only_grow_over_a_restore_as_the_guide_says(
    tmp_path: Path, connect: Opener, etcdutl: Path, as_told: bool
) -> None:
    """They go back without the options of the guide. A process that still runs refuses the restored store.

    The snapshot has the lease of a node that has left since.
    """
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "etcd.md").read_text()
    told = re.search(r"`etcdutl (snapshot restore FILE [^`]*)`", guide)
    assert told is not None
    with EtcdCluster(data_folder=tmp_path / "etcd") as etcd:
        with Admin("restored", etcd.url()) as admin:
            admin.add("a", "b")
        tokens_of_a_node(etcd.url(), lambda: save_snapshot(etcd, tmp_path / "snapshot"))
        forgotten = connect(etcd.url())
        for _ in range(100):
            put(forgotten, "later")
        latest = max(tokens_of_a_node(etcd.url()))
        etcd.stop()
        member = etcd.data_folder / "member-0"
        peer = f"http://127.0.0.1:{etcd._peer_ports[0]}"
        restore = told[1] if as_told else "snapshot restore FILE"
        shutil.rmtree(member)
        subprocess.run(
            [
                etcdutl,
                *restore.replace("FILE", str(tmp_path / "snapshot")).split(),
                "--name=m0",
                f"--data-dir={member}",
                f"--initial-cluster=m0={peer}",
                f"--initial-advertise-peer-urls={peer}",
            ],
            check=True,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        etcd.restart_all()
        assert (min(tokens_of_a_node(etcd.url())) > latest) == as_told
        with pytest.raises(RegistryRefused):
            read(forgotten, "later")


@pytest.mark.rule("RB-1", "RB-21", "RB-28")
def test_a_group_stops_when_its_store_is_replaced(tmp_path: Path) -> None:
    stopped = threading.Event()
    with EtcdCluster(data_folder=tmp_path / "one") as one, TcpProxy(one.endpoints[0]) as proxy:
        url = one.url(endpoints=[proxy.address])
        group = Group("replaced", url, settings=Settings(lease_ttl_s=2))
        group.on_start(lambda _: None)
        group.on_stop(lambda _: stopped.set())
        with Admin("replaced", one.url()) as admin, group:
            admin.add("a")
            admin.wait_balanced(timeout_s=PATIENCE_S)
            with EtcdCluster(data_folder=tmp_path / "two") as two:
                proxy.redirect(two.endpoints[0])
                proxy.cut()
                proxy.heal()
                assert stopped.wait(PATIENCE_S)
                proxy.redirect(one.endpoints[0])
                assert not group.resources
