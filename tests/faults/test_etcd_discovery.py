"""Members of etcd found in DNS: a DNS server of the test's own, and real etcd servers."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import dns.flags
import dns.message
import dns.rcode
import dns.resolver
import dns.rrset
import pytest

from rebalanser import Admin, Group, Settings
from rebalanser.errors import (
    AccessDenied,
    InvalidUrl,
    MissingExtra,
    OutcomeUnknown,
    RegistryRefused,
    RegistryUnavailable,
    RetryLater,
)
from rebalanser.registry.contract import Outcome, Put, Target, Transaction
from rebalanser.registry.urls import parse_url
from rebalanser.testing.etcd_server import EtcdCluster, free_ports
from rebalanser.testing.registry_suite import EventRecorder
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from rebalanser_etcd import EtcdRegistry, open_etcd
from rebalanser_etcd.discovery import find_members
from rebalanser_etcd.registry import PLAIN_PASSWORD, connect_etcd
from support.proxy import TcpProxy

PLAIN, TLS = "_etcd-client._tcp.etcd.test", "_etcd-client-ssl._tcp.etcd.test"


class NameServer:
    """A DNS server on loopback that knows SRV records, and no other."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        """``HOST:PORT`` by the name of the record."""
        self.silent = False
        self.failing = False
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            data, client = self._socket.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            name = query.question[0].name
            self.asked.append(name.to_text(omit_final_dot=True))
            if not self.silent:
                self._socket.sendto(self._answer(query, name.to_text(omit_final_dot=True)).to_wire(), client)

    def _answer(self, query: dns.message.Message, name: str) -> dns.message.Message:
        answer = dns.message.make_response(query, recursion_available=True)
        if self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif name not in self.records:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif self.records[name]:
            hosts = (address.rpartition(":") for address in self.records[name])
            values = [f"0 0 {port} {host}." for host, _, port in hosts]
            answer.answer.append(dns.rrset.from_text_list(f"{name}.", 60, "IN", "SRV", values))
        return answer

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()

    def resolver() -> dns.resolver.Resolver:
        made = make(configure=False)
        made.nameservers, made.port = ["127.0.0.1"], server.port
        return made

    make = dns.resolver.Resolver
    monkeypatch.setattr(dns.resolver, "Resolver", resolver)
    yield server
    server.close()


Opener = Callable[[str], EtcdRegistry]


@pytest.fixture
def connect() -> Iterator[Opener]:
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(contextlib.closing(open_etcd(parse_url(url), PATIENCE_S)))


def by_name(address: str) -> str:
    """An address on loopback with a name, as SRV records have it."""
    return address.replace("127.0.0.1", "localhost")


def names(server: EtcdCluster) -> list[str]:
    return list(map(by_name, server.endpoints))


def put(registry: EtcdRegistry, key: str, timeout_s: float = PATIENCE_S) -> int:
    reply = registry.execute(Transaction(then=(Put(key, b""),)), timeout_s)
    assert isinstance(reply, Outcome)
    return reply.revision


def put_surely(registry: EtcdRegistry, key: str) -> int:
    def tried() -> int | None:
        with contextlib.suppress(RetryLater):
            return put(registry, key, 2.0)
        return None

    return wait_until(tried)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(data_folder=tmp_path_factory.mktemp("etcd")) as server:
        yield server


def test_members_are_found(etcd: EtcdCluster, name_server: NameServer, connect: Opener) -> None:
    name_server.records[PLAIN] = [*names(etcd), *names(etcd), "localhost:1"]
    registry = connect("etcd+srv://etcd.test/found")
    put(registry, "found/key")
    assert registry.capabilities.unsafe_reasons[-1].startswith("localhost:1 has not answered")
    assert set(name_server.asked) == {PLAIN}


@pytest.mark.rule("RB-1")
def test_a_group_lives_at_such_a_url(etcd: EtcdCluster, name_server: NameServer) -> None:
    name_server.records[PLAIN] = names(etcd)
    url = "etcd+srv://etcd.test./group"
    group = Group("orders", url, settings=Settings(lease_ttl_s=2))
    group.on_start(lambda _: None)
    group.on_stop(lambda _: None)
    with Admin("orders", url) as admin, group:
        admin.add("a")
        assert admin.wait_balanced(PATIENCE_S).owned == 1


def test_members_that_moved_are_found_again(
    etcd: EtcdCluster, name_server: NameServer, connect: Opener
) -> None:
    recorder = EventRecorder(PATIENCE_S)
    with TcpProxy(etcd.endpoints[0]) as before, TcpProxy(etcd.endpoints[0]) as after:
        name_server.records[PLAIN] = [by_name(before.address)]
        registry = connect("etcd+srv://etcd.test/moved")
        revision = put(registry, "moved/first")
        registry.watch(Target("moved/", prefix=True), revision, recorder)
        wait_until(lambda: recorder.told)
        name_server.records[PLAIN] = [by_name(after.address)]
        put(registry, "moved/second")
        assert len(name_server.asked) == 1, "what works is not looked for"
        before.cut()
        revision = put_surely(registry, "moved/third")
        wait_until(lambda: any(event.revision >= revision for event in recorder.told))
        assert [each.address for each in registry._endpoints._all] == [by_name(after.address)]
        assert registry._endpoints.absent == ()


def test_a_member_that_answers_stays_though_dns_names_it_no_more(
    etcd: EtcdCluster, name_server: NameServer, connect: Opener
) -> None:
    with TcpProxy(etcd.endpoints[0]) as one, TcpProxy(etcd.endpoints[0]) as two:
        addresses = {by_name(one.address), by_name(two.address)}
        name_server.records[PLAIN] = list(addresses)
        registry = connect("etcd+srv://etcd.test/stays")
        put(registry, "stays/first")
        endpoints = registry._endpoints
        used = endpoints._current
        (other,) = (each for each in endpoints._all if each is not used)
        name_server.records[PLAIN] = names(etcd)
        endpoints._set_aside(other)
        wait_until(lambda: {each.address for each in endpoints._all} == {used.address, *names(etcd)})
        put(registry, "stays/second")
        assert endpoints._current is used


def test_nothing_is_opened_after_closing(etcd: EtcdCluster, name_server: NameServer) -> None:
    name_server.records[PLAIN] = names(etcd)
    endpoints = connect_etcd(parse_url("etcd+srv://etcd.test/"))._endpoints
    endpoints.close()
    before = list(endpoints._all)
    endpoints._replace({"localhost:1"})
    assert endpoints._all == before


@pytest.mark.rule("RB-1")
def test_another_cluster_in_their_place_is_refused(
    etcd: EtcdCluster, name_server: NameServer, connect: Opener, tmp_path: Path
) -> None:
    with TcpProxy(etcd.endpoints[0]) as before, EtcdCluster(data_folder=tmp_path) as other:
        name_server.records[PLAIN] = [by_name(before.address)]
        registry = connect("etcd+srv://etcd.test/other")
        put(registry, "other/first")
        name_server.records[PLAIN] = names(other)
        before.cut()

        def refused() -> bool:
            try:
                put(registry, "other/second", 1.0)
            except RegistryRefused:
                return True
            except (RetryLater, OutcomeUnknown):
                return False
            raise AssertionError("another cluster was written to")

        wait_until(refused)
        assert put(connect(other.url("other")), "other/key") == 2, "nothing was written to the other cluster"


def test_members_stay_while_dns_is_away(
    etcd: EtcdCluster, name_server: NameServer, connect: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    with TcpProxy(etcd.endpoints[0]) as proxy:
        name_server.records[PLAIN] = [by_name(proxy.address)]
        registry = connect("etcd+srv://etcd.test/stay")
        name_server.failing = True
        proxy.cut()
        with pytest.raises(RetryLater):
            put(registry, "stay/first", 1.0)
        wait_until(lambda: "DNS gave no answer about" in caplog.text)
        name_server.failing, name_server.records = False, {}
        proxy.heal()
        put_surely(registry, "stay/second")


def test_the_certificate_must_have_the_domain(
    tmp_path: Path, name_server: NameServer, connect: Opener
) -> None:
    with EtcdCluster(data_folder=tmp_path, tls=True, client_cert_auth=True) as server:
        files = server.certificates
        assert files is not None
        options = f"ca={files.ca}&cert={files.client_cert}&key={files.client_key}"
        name_server.records |= {TLS: names(server), "_etcd-client-ssl._tcp.localhost": names(server)}
        with pytest.raises(AccessDenied, match="TLS was refused"):
            connect(f"etcd+tls+srv://etcd.test/?{options}")
        put(connect(f"etcd+tls+srv://etcd.test/tls?{options}&server_name=localhost"), "tls/named")
        put(connect(f"etcd+tls+srv://localhost/tls?{options}"), "tls/domain")
        with pytest.raises(InvalidUrl, match=r"ca needs etcd\+tls\+srv://"):
            connect(f"etcd+srv://etcd.test/?{options}")


@pytest.mark.parametrize(
    ("scheme", "there", "message"),
    [
        ("etcd+srv", {}, f"DNS has no SRV record {PLAIN}$"),
        ("etcd+srv", {PLAIN: []}, f"DNS has no SRV record {PLAIN}$"),
        ("etcd+srv", {TLS: ["localhost:1"]}, rf"{PLAIN}, but {TLS}: use etcd\+tls\+srv://"),
        ("etcd+tls+srv", {PLAIN: ["localhost:1"]}, rf"{TLS}, but {PLAIN}: use etcd\+srv://"),
    ],
)
def test_a_missing_record_is_named(
    name_server: NameServer, scheme: str, there: dict[str, list[str]], message: str
) -> None:
    name_server.records = there
    with pytest.raises(RegistryUnavailable, match=message):
        open_etcd(parse_url(f"{scheme}://etcd.test/"), 1.0)


def test_a_service_that_is_said_not_to_be_there_is_none(name_server: NameServer) -> None:
    name_server.records[PLAIN] = [":0"]
    with pytest.raises(RegistryUnavailable, match="no SRV record"):
        find_members("etcd+srv", "etcd.test")


def test_no_answer_is_said_in_time(name_server: NameServer) -> None:
    name_server.failing = True
    with pytest.raises(RegistryUnavailable, match=f"DNS gave no answer about {PLAIN}: .*SERVFAIL"):
        find_members("etcd+srv", "etcd.test")
    name_server.silent = True
    with pytest.raises(RegistryUnavailable, match=f"DNS gave no answer about {PLAIN}: .*lifetime expired"):
        open_etcd(parse_url("etcd+srv://etcd.test/"), 0.5)


def test_members_that_do_not_answer_are_named(name_server: NameServer) -> None:
    (port,) = free_ports(1)
    name_server.records[PLAIN] = [f"localhost:{port}"]
    with pytest.raises(RegistryUnavailable, match=f"etcd does not answer; tried localhost:{port}"):
        open_etcd(parse_url("etcd+srv://etcd.test/"), 1.0)


@pytest.mark.parametrize("domain", ["a..b", "x" * 64 + ".test"])
def test_what_can_be_no_name_is_refused(name_server: NameServer, domain: str) -> None:
    with pytest.raises(InvalidUrl, match="can't be a name in DNS"):
        find_members("etcd+srv", domain)


def test_the_package_that_asks_dns_is_named_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, forget_modules: Callable[[str], None]
) -> None:
    forget_modules("dns")
    monkeypatch.setitem(sys.modules, "dns", None)
    with pytest.raises(MissingExtra, match=r"dnspython.*pip install 'rebalanser\[etcd\]'"):
        find_members("etcd+srv", "etcd.test")


def test_a_password_in_clear_text_is_warned_about(name_server: NameServer) -> None:
    name_server.records |= {PLAIN: ["localhost:1"], TLS: ["localhost:1"]}
    for scheme, warned in (("etcd+srv", True), ("etcd+tls+srv", False)):
        with contextlib.closing(connect_etcd(parse_url(f"{scheme}://ann:secret@etcd.test/"))) as registry:
            assert (PLAIN_PASSWORD in registry.capabilities.unsafe_reasons) is warned
