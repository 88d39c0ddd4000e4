"""The etcd registry under faults of servers and networks, on real servers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest
import tenacity
from rebalanser_etcd import EtcdRegistry, open_etcd

from rebalanser.errors import (
    AccessDenied,
    InvalidUrl,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryUnavailable,
    RetryLater,
)
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Created,
    Get,
    Grant,
    Granted,
    Guard,
    HistoryLost,
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
from rebalanser.testing.proxy import TcpProxy
from rebalanser.testing.registry_suite import Recorder
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio

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
def recorder() -> Recorder:
    return Recorder(PATIENCE_S)


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


def losses_after(first: Changed, recorder: Recorder) -> list[HistoryLost]:
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
    members: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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
    members: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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
    etcd: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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
    members: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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
    members: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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
    etcd: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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


def test_a_long_range_survives_compactions(etcd: EtcdCluster, connect: Opener, prefix: str) -> None:
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
    members: EtcdCluster, connect: Opener, recorder: Recorder, prefix: str
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
        with pytest.raises(OutcomeUnknown, match=r"may have been.*storage quota"):  # noqa: PT012
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


def test_a_stale_token_is_renewed(tmp_path: Path, connect: Opener, recorder: Recorder, prefix: str) -> None:
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
        ):
            with pytest.raises(AccessDenied, match="TLS was refused"):
                connect(f"etcd+tls://{location}?{options}")
        with pytest.raises(RegistryUnavailable, match=r"etcd\+tls:// or etcd://"):
            open_etcd(parse_url(f"etcd://{location}"), 0.5)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd+tls://127.0.0.1:1/?ca=/nowhere.pem", "file of ca cannot be read"),
        ("etcd+tls://127.0.0.1:1/?cert=/a.pem", "needs cert and key together"),
        ("etcd+tls://127.0.0.1:1/?cacert=/a.pem", "unknown option 'cacert'; known are ca, cert, key"),
        ("etcd://127.0.0.1:1/?ca=/a.pem", r"need etcd\+tls://"),
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
    recorders = [Recorder(PATIENCE_S) for _ in range(400)]
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
    etcd: EtcdCluster, recorder: Recorder, prefix: str
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
