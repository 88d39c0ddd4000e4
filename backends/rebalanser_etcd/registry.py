"""The ``Registry`` on etcd."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache, partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import tenacity
from etcd3 import etcdrpc

from rebalanser import forks
from rebalanser.errors import (
    Forked,
    InvalidUrl,
    LeaseNotFound,
    OutcomeUnknown,
    QuotaExceeded,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.registry.contract import (
    Absent,
    Capabilities,
    Done,
    Grant,
    Granted,
    KeepAlive,
    LeaseAge,
    Outcome,
    Registry,
    Reply,
    Request,
    Revoke,
    Sink,
    Target,
    Transaction,
    Watch,
)
from rebalanser.registry.urls import RegistryUrl
from rebalanser_etcd.codec import (
    MAX_OPERATIONS,
    MAX_REQUEST_BYTES,
    MIN_OPERATIONS,
    FollowUp,
    check_limits,
    to_outcome,
    to_request,
)
from rebalanser_etcd.discovery import LONGEST_LOOKUP_S, find_members
from rebalanser_etcd.endpoints import Account, CallFailed, Endpoints, Repeat, Trust
from rebalanser_etcd.failures import TOO_MANY_OPERATIONS
from rebalanser_etcd.known_bugs import unsafe_reasons
from rebalanser_etcd.watches import WatchStream

SRV_SCHEMES: Final = frozenset({"etcd+srv", "etcd+tls+srv"})
"""Schemes whose URLs name a domain without a port; its SRV records have hosts and ports."""
OPTIONS: Final = frozenset({"password_file"})
TLS_OPTIONS: Final = OPTIONS | {"ca", "cert", "key", "key_password_file", "server_name"}
USER_VARIABLE: Final = "REBALANSER_ETCD_USER"
PASSWORD_VARIABLE: Final = "REBALANSER_ETCD_PASSWORD"  # noqa: S105 (a name, not a password)
REVISION_TIMEOUT_S: Final = 5.0
TRIAL_S: Final = 2.0
"""Seconds beyond its timeout that the first call in a forked child may take."""
PLAIN_PASSWORD: Final = "the password is sent in clear text: use etcd+tls://"  # noqa: S105 (no password)

CAPABILITIES: Final = Capabilities(
    max_operations=MAX_OPERATIONS,
    max_request_bytes=MAX_REQUEST_BYTES,
    min_lease_ttl_s=1.0,
    # The leader looks for ended leases every half second; the rest is for the transaction that ends one.
    lease_detection_s=1.0,
    survives_process=True,
    shared_between_hosts=True,
)


class _Grpc:
    """Opens connections, in a forked child on trial.

    Where gRPC has not survived the fork, as without its support of forks, a call never ends, whatever its
    timeout.
    """

    def __init__(self) -> None:
        self._is_used = False
        self._is_inherited = False
        self._is_lost = False
        forks.in_child(self._forked)

    def open(self, opened: Callable[[], EtcdRegistry], timeout_s: float) -> EtcdRegistry:
        """Open a connection by a call that takes ``timeout_s`` at most, if gRPC works.

        Raises:
            Forked: it does not.
        """
        self._is_used = True
        if not self._is_inherited:
            return opened()
        registry = None if self._is_lost else self._tried(opened, timeout_s + TRIAL_S)
        if registry is None:
            self._is_lost = True
            raise Forked(
                "gRPC does not work in this child of fork: set GRPC_ENABLE_FORK_SUPPORT=1 in the parent, or "
                "open etcd:// after the fork only"
            )
        self._is_inherited = False
        return registry

    def _forked(self) -> None:
        self._is_inherited = self._is_used

    @staticmethod
    def _tried(opened: Callable[[], EtcdRegistry], timeout_s: float) -> EtcdRegistry | None:
        """The connection, None if there is no answer in time; the thread is left behind then."""
        answer: Future[EtcdRegistry] = Future()

        def run() -> None:
            try:
                answer.set_result(opened())
            except BaseException as error:  # the caller's
                answer.set_exception(error)

        threading.Thread(target=run, name="rebalanser-etcd-trial", daemon=True).start()
        wait([answer], timeout_s)
        return answer.result() if answer.done() else None


_GRPC: Final = _Grpc()


def open_etcd(url: RegistryUrl, timeout_s: float) -> EtcdRegistry:
    """Open the etcd at ``url``; wait at most ``timeout_s`` seconds for its first answer.

    The user and the password are in the URL; the password may be in the file of the option ``password_file``.
    The defaults are ``REBALANSER_ETCD_USER`` and ``REBALANSER_ETCD_PASSWORD``.

    Raises:
        InvalidUrl: an option is unknown, or a certificate file can't be read.
        RegistryUnavailable: no endpoint answered; the message says what was tried and for how long.
        RegistryRefused: the endpoints belong to different clusters, or their limit of operations is too low.
        AccessDenied: wrong credentials or a wrong certificate.
        Forked: gRPC was in use when this process was forked, and does not work here.
    """
    return _GRPC.open(partial(_opened, url, timeout_s), timeout_s)


def _opened(url: RegistryUrl, timeout_s: float) -> EtcdRegistry:
    deadline = time.monotonic() + timeout_s
    registry = connect_etcd(url, timeout_s)
    try:
        registry.read_revision(_left_s(deadline))
        registry.compare_endpoints(_left_s(deadline))
    except BaseException:
        registry.close()
        raise
    return registry


def connect_etcd(url: RegistryUrl, timeout_s: float = LONGEST_LOOKUP_S) -> EtcdRegistry:
    """Create a connection to the etcd at ``url`` without sending it a request.

    If the members are in SRV records, DNS is queried, for at most ``timeout_s`` seconds.

    Raises:
        InvalidUrl: an option is unknown, or a file can't be read.
        RegistryUnavailable: DNS names no member, or gave no answer.
        MissingExtra: an option or a scheme needs a package that is not installed.
    """
    addresses: Sequence[str] = url.addresses
    find = None
    if url.scheme in SRV_SCHEMES:
        find = partial(find_members, url.scheme, url.require_domain())
    else:
        url.require_ports()
    anchor = f"{url.root}/"

    def look(guards: int) -> Any:
        return to_request(Transaction((Absent(anchor),) * guards), anchor)

    trust, account = _trust(url), _account(url)
    reasons = (PLAIN_PASSWORD,) if account and trust is None and not _is_local(url) else ()
    if find is not None:
        addresses = find(min(timeout_s, LONGEST_LOOKUP_S))
    return EtcdRegistry(Endpoints(addresses, trust, account, look, find), anchor, reasons)


class EtcdRegistry(Registry):
    """A connection to an etcd cluster, as ``open_etcd`` returns it."""

    def __init__(self, endpoints: Endpoints, anchor: str, reasons: tuple[str, ...] = ()) -> None:
        """Create a registry. ``anchor`` is a key that the user may read; it need not exist."""
        self._reasons = reasons
        self._endpoints = endpoints
        self._anchor = anchor
        self._watches = WatchStream(endpoints, self.read_revision)
        self._min_lease_ttl_s = CAPABILITIES.min_lease_ttl_s
        self._max_operations = MAX_OPERATIONS

    @property
    def capabilities(self) -> Capabilities:
        """etcd's limits, and the known faults of the members that have answered so far.

        etcd does not report its shortest lease, which depends on its election timeout: ``min_lease_ttl_s`` is
        1 until a grant shows that it is longer. ``Granted.ttl_s`` has the true time to live.
        """
        limits = (self._max_operations, self._min_lease_ttl_s)
        return _capabilities(*limits, self._reasons, tuple(self._endpoints.versions), self._endpoints.absent)

    def execute(self, request: Request, timeout_s: float) -> Reply:
        """Carry out one request within ``timeout_s`` seconds, and return its answer; see the contract."""
        match request:
            case Transaction():
                return self._transact(request, timeout_s)
            case Grant(ttl_s):
                return self._grant(ttl_s, timeout_s)
            case KeepAlive(lease):
                return self._keep_alive(lease, timeout_s)
            case Revoke(lease):
                return self._revoke(lease, timeout_s)

    def lease_ages(self, leases: Sequence[int], timeout_s: float) -> Mapping[int, LeaseAge]:
        """Return the ages of live leases, by one small request for each; see the contract.

        etcd reports whole seconds. After an election of its leader it counts every lease from then on.
        """
        deadline = time.monotonic() + timeout_s
        ages = {}
        for lease in leases:
            ask = etcdrpc.LeaseTimeToLiveRequest(ID=lease)
            reply = self._endpoints.call("time_to_live", ask, _left_s(deadline), Repeat.READ)
            if reply.TTL >= 0:  # the rest is rounded down, so that the age may be a second too high
                age_s = max(0.0, float(reply.grantedTTL - reply.TTL - 1))
                ages[lease] = LeaseAge(age_s, float(reply.grantedTTL))
        return ages

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Call ``sink`` with every change of ``target`` from ``from_revision`` on; see the contract."""
        return self._watches.add(target, from_revision, sink)

    def close(self) -> None:
        """Close the connections and all watches, but no leases. Closing twice does nothing."""
        self._watches.close()
        self._endpoints.close()  # which ends what the thread of the watches may be waiting for
        self._watches.join()

    def read_revision(self, timeout_s: float = REVISION_TIMEOUT_S) -> int:
        """Return the store's current revision, by a linearizable read."""
        return self._transact(Transaction(), timeout_s).revision

    def compare_endpoints(self, timeout_s: float) -> None:
        """Check that all endpoints that answer belong to one store, and find out their ``--max-txn-ops``.

        Raises:
            RegistryRefused: they do not, or their limit is too low for a group's transactions.
        """
        self._max_operations = self._endpoints.compare(self._max_operations, timeout_s)
        if self._max_operations < MIN_OPERATIONS:
            raise RegistryRefused(
                f"etcd takes transactions of {self._max_operations} operations, and a group needs "
                f"{MIN_OPERATIONS}: raise --max-txn-ops, the default is {MAX_OPERATIONS}"
            )

    def _grant(self, ttl_s: float, timeout_s: float) -> Granted:
        asked_s = max(1, math.ceil(ttl_s))
        grant = etcdrpc.LeaseGrantRequest(TTL=asked_s)
        try:
            reply = self._endpoints.call("grant", grant, timeout_s, Repeat.NEVER)
        except OutcomeUnknown as unknown:
            if isinstance(unknown.__cause__, QuotaExceeded):
                raise unknown.__cause__ from None  # a lease whose id no client knows has no effect
            raise
        if asked_s < reply.TTL:
            self._min_lease_ttl_s = float(reply.TTL)
        return Granted(lease=reply.ID, ttl_s=float(reply.TTL))

    def _keep_alive(self, lease: int, timeout_s: float) -> Done:
        renew = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        reply = self._endpoints.call("keep_alive", renew, timeout_s, Repeat.HARMLESS)
        if reply.TTL <= 0:
            raise LeaseNotFound("the lease has ended")
        return Done(reply.header.raft_term)

    def _revoke(self, lease: int, timeout_s: float) -> Done:
        revoke = etcdrpc.LeaseRevokeRequest(ID=lease)
        try:
            self._endpoints.call("revoke", revoke, timeout_s, Repeat.HARMLESS)
        except LeaseNotFound:
            return Done()
        return Done()

    def _transact(self, transaction: Transaction, timeout_s: float) -> Outcome:
        check_limits(transaction, self._max_operations)
        request = to_request(transaction, self._anchor)
        carry_out = self._write if transaction.writes else self._read_whole
        try:
            return carry_out(transaction, request, timeout_s)
        except RequestTooLarge as error:
            if TOO_MANY_OPERATIONS in str(error):
                self._lower_limit(transaction.length - 1, timeout_s)
            raise

    def _lower_limit(self, max_operations: int, timeout_s: float) -> None:
        """Adopt the lower limit of a member that was away when the others were measured."""
        self._max_operations = min(self._max_operations, max_operations)
        self.compare_endpoints(timeout_s)

    def _read_whole(self, transaction: Transaction, request: Any, timeout_s: float) -> Outcome:
        """Read, and start again if a compaction removed the first page's revision before the last page."""
        deadline = time.monotonic() + timeout_s
        try:
            return self._read(transaction, request, timeout_s)  # nearly always the only try, as in Endpoints
        except CallFailed:
            pass
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(CallFailed),
            stop=lambda _state: time.monotonic() >= deadline,
            reraise=True,
        )
        try:
            return retrying(self._read, transaction, request, timeout_s)
        except CallFailed as failed:
            raise RegistryUnavailable(f"etcd compacts faster than it can be read: {failed}") from failed

    def _read(self, transaction: Transaction, request: Any, timeout_s: float) -> Outcome:
        reply = self._endpoints.call("transact", request, timeout_s, Repeat.READ)
        with _Pages(self._endpoints, timeout_s) as pages:
            return to_outcome(transaction, reply, pages)

    def _write(self, transaction: Transaction, request: Any, timeout_s: float) -> Outcome:
        reply = self._endpoints.call("transact", request, timeout_s, Repeat.NEVER)
        try:
            with _Pages(self._endpoints, timeout_s) as pages:
                return to_outcome(transaction, reply, pages)
        except (CallFailed, RegistryUnavailable) as error:
            raise OutcomeUnknown(
                f"etcd carried out the transaction, but what it read came incompletely: {error}"
            ) from error


class _Pages:
    """Reads further pages of a range aside; each page has the time limit of a request.

    The thread for it is started with the first page, as most transactions have none.
    """

    def __init__(self, endpoints: Endpoints, timeout_s: float) -> None:
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self._aside: ThreadPoolExecutor | None = None

    def __call__(self, page: Any) -> Callable[[], Any]:
        """Send a request for a page; return what waits for its answer."""
        if self._aside is None:
            self._aside = ThreadPoolExecutor(1, "rebalanser-etcd-pages")
        return self._aside.submit(
            self._endpoints.call, "range", page, timeout_s=self._timeout_s, repeat=Repeat.READ
        ).result

    def __enter__(self) -> FollowUp:
        return self

    def __exit__(self, *_: object) -> None:
        if self._aside is not None:
            self._aside.shutdown()


@lru_cache(maxsize=16)  # asked for with every request
def _capabilities(
    max_operations: int,
    min_lease_ttl_s: float,
    reasons: tuple[str, ...],
    versions: tuple[str, ...],
    absent: tuple[str, ...],
) -> Capabilities:
    unknown = (f"{each} has not answered: its cluster is not known" for each in absent)
    return replace(
        CAPABILITIES,
        max_operations=max_operations,
        min_lease_ttl_s=min_lease_ttl_s,
        unsafe_reasons=(*reasons, *unsafe_reasons(versions), *unknown),
    )


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _account(url: RegistryUrl) -> Account | None:
    user = url.user or os.environ.get(USER_VARIABLE)
    if url.password is not None:
        password: str | Path | None = url.password
    elif "password_file" in url.options:
        password = Path(url.options["password_file"])
    else:
        password = os.environ.get(PASSWORD_VARIABLE)
    if user and password is None:
        raise InvalidUrl(f"{url} names the user {user!r} but no password: set {PASSWORD_VARIABLE}")
    return Account(user, password) if user and password is not None else None


def _is_local(url: RegistryUrl) -> bool:
    """Return True if no packet leaves this host."""
    for host, _ in url.hosts:
        try:
            if not ip_address(host).is_loopback:
                return False
        except ValueError:
            if host != "localhost":
                return False
    return True


def _trust(url: RegistryUrl) -> Trust | None:
    tls = url.scheme in {"etcd+tls", "etcd+tls+srv"}
    known = TLS_OPTIONS if tls else OPTIONS
    unknown = sorted(set(url.options) - known)
    if unknown:
        hint = f"known are {', '.join(sorted(known))}"
        if unknown[0] in TLS_OPTIONS:
            hint = f"{unknown[0]} needs {url.scheme.replace('etcd', 'etcd+tls')}://"
        raise InvalidUrl(f"{url} has the unknown option {unknown[0]!r}; {hint}")
    if not tls:
        return None
    if ("cert" in url.options) != ("key" in url.options):
        raise InvalidUrl(f"{url} needs cert and key together")
    if "key_password_file" in url.options and "key" not in url.options:
        raise InvalidUrl(f"{url} has key_password_file without key and cert")
    names = ("ca", "cert", "key", "key_password_file")
    files = {name: Path(url.options[name]) for name in names if name in url.options}
    # Forged records could name a server with a valid certificate of its own, so check the domain.
    domain = url.require_domain() if url.scheme in SRV_SCHEMES else None
    return Trust(**files, server_name=url.options.get("server_name", domain))
