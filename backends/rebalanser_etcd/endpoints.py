"""The endpoints of one etcd cluster: the choice of an endpoint, its credentials, and failover.

A request is sent only on an endpoint that has answered a ``Status`` on its current connection. So a broken
connection is nearly always found by a call that has no effect, not by one whose outcome is then unknown. An
endpoint that fails is set aside for a growing time and the next one takes over. Unary calls and the watch
stream share the endpoint and its connection: when a call finds it silent, the watches move too.

All endpoints must belong to one store, the one that answered first, and its revision must never go back. If
an answer shows otherwise, the connection can't be used any more: each later request is refused, so that nodes
stop access in time. There is no way to find out which of two stores is the right one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import tenacity
from etcd3 import etcdrpc

from rebalanser.errors import (
    AccessDenied,
    InvalidUrl,
    MissingExtra,
    OutcomeUnknown,
    RebalanserError,
    RegistryRefused,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.redaction import hide_secret
from rebalanser_etcd.failures import FailedCall, FailureEffect, judge

FIRST_REST_S: Final = 0.05
LONGEST_REST_S: Final = 0.5
LONGEST_PAUSE_S: Final = 2.0
LONGEST_PROOF_S: Final = 2.0
LONGEST_LOGIN_S: Final = 60.0
LONGEST_COMPARISON_S: Final = 1.0
ENCRYPTED: Final = b"ENCRYPTED"
"""Marker of an encrypted key in PEM."""
COMPARE_AGAIN_S: Final = 5.0
FIND_AGAIN_S: Final = 2.0

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a registry's connection and its backoff are its own
    ("grpc.enable_retries", 0),  # a request is sent once: sending it again is for the caller to decide
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 2000),  # despite its name the time that a connection attempt may take
    ("grpc.keepalive_time_ms", 10_000),  # etcd allows a ping each 5 s, and none while no call is open
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # else 60 s, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)


Metadata: TypeAlias = tuple[tuple[str, str], ...]

NEEDS_LEADER: Final = ("hasleader", "true")
"""With this metadata a member that is cut off from the others refuses at once, and ends its streams."""

CLOSED: Final = "this registry connection is closed"

_log = logging.getLogger("rebalanser.etcd")


class Repeat(Enum):
    """Permission to send a request again after a call whose effect is unknown."""

    READ = auto()
    """Allowed, as the request changes nothing."""
    HARMLESS = auto()
    """Allowed, as the request is idempotent."""
    NEVER = auto()


class Account:
    """A user of etcd's own authentication. A password in a file is read again for each login."""

    def __init__(self, user: str, password: str | Path) -> None:
        """Create a user; ``password`` is the password, or a file that has it.

        Raises:
            InvalidUrl: the file can't be read.
        """
        self.user = user
        self._file = password if isinstance(password, Path) else None
        self._password = self._read(self._file) if self._file else str(password)
        hide_secret(self._password)

    @property
    def password(self) -> str:
        """The current password; the previous one while its file can't be read."""
        if self._file is not None:
            with contextlib.suppress(InvalidUrl):
                self._password = self._read(self._file)
                hide_secret(self._password)
        return self._password

    @staticmethod
    def _read(file: Path) -> str:
        try:
            return file.read_text().rstrip("\r\n")
        except (OSError, ValueError) as error:
            raise InvalidUrl(f"the file of password_file cannot be read: {error}") from error


def _read(file: Path | None, option: str) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise InvalidUrl(f"the file of {option} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Credentials:
    """The contents of the TLS files."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    passphrase: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Trust:
    """The TLS files: trusted certificates, and the client's certificate and key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    key_password_file: Path | None = None
    server_name: str | None = None
    """The name in the servers' certificates, if it differs from the URL's host."""

    def read(self) -> Credentials:
        """Read the files.

        Raises:
            InvalidUrl: a file can't be read.
        """
        passphrase = _read(self.key_password_file, "key_password_file")
        if passphrase is not None:
            passphrase = passphrase.rstrip(b"\r\n")
            hide_secret(passphrase.decode(errors="replace"))
        return Credentials(_read(self.ca, "ca"), _read(self.cert, "cert"), _read(self.key, "key"), passphrase)

    def unlocked(self, found: Credentials) -> bytes | None:
        """Return the private key without its passphrase, as gRPC needs it.

        Raises:
            InvalidUrl: the passphrase is missing or wrong.
            MissingExtra: the key has a passphrase, and the package for that is not installed.
        """
        if found.key is None or ENCRYPTED not in found.key:
            return found.key
        if not found.passphrase:
            if self.key_password_file:
                raise InvalidUrl(f"{self.key_password_file} is empty, but the key {self.key} is encrypted")
            raise InvalidUrl(f"the key {self.key} is encrypted; add key_password_file=FILE to the URL")
        try:
            from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - for this option only
            from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtra(
                f"key_password_file needs the package cryptography ({error}); pip install 'rebalanser[etcd]'"
            ) from error
        try:
            opened = serialization.load_pem_private_key(found.key, found.passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidUrl(
                f"the key {self.key} can't be opened with the passphrase in {self.key_password_file}: {error}"
            ) from error
        return opened.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


class CallFailed(Exception):
    """A call that ended with an error status, with its verdict."""

    def __init__(self, verdict: FailedCall) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


class Endpoint:
    """One member: its address, its lazily connected channel, and the calls on it."""

    def __init__(self, address: str, trust: Trust | None) -> None:
        self.address = address
        self.login: Any = None
        """The future of a login under way; a request that stops waiting leaves it to the next one.

        Checking a password keeps a server busy, even after its client has gone. If all nodes had to log in
        again, and each repeated its login after a timeout, the server would never finish.
        """
        self.proven = False
        self.failures = 0
        self.rests_until = 0.0
        self._trust = trust
        self._unusable = ""
        self._connecting = threading.Lock()
        self._connect(trust.read() if trust else Credentials())

    def _connect(self, found: Credentials) -> None:
        if self._trust is None:
            self.channel: grpc.Channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        else:
            name = self._trust.server_name
            options = (*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else []))
            credentials = grpc.ssl_channel_credentials(found.ca, self._trust.unlocked(found), found.cert)
            self.channel = grpc.secure_channel(self.address, credentials, options)
        self._credentials = found
        kv = etcdrpc.KVStub(self.channel)
        lease = etcdrpc.LeaseStub(self.channel)
        self._calls: dict[str, Callable[..., Any]] = {
            "authenticate": etcdrpc.AuthStub(self.channel).Authenticate,
            "status": etcdrpc.MaintenanceStub(self.channel).Status,
            "transact": kv.Txn,
            "range": kv.Range,
            "grant": lease.LeaseGrant,
            "revoke": lease.LeaseRevoke,
            "time_to_live": lease.LeaseTimeToLive,
            # One request and one answer of the stream, as a unary call: the same on the wire, and no
            # thread is needed that feeds the stream.
            "keep_alive": self.channel.unary_unary(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=etcdrpc.LeaseKeepAliveRequest.SerializeToString,
                response_deserializer=etcdrpc.LeaseKeepAliveResponse.FromString,
            ),
        }
        self.watch: Callable[..., Any] = etcdrpc.WatchStub(self.channel).Watch

    def renew_trust(self) -> bool:
        """Reconnect if TLS files were replaced since the last connection. Return True if they were."""
        if self._trust is None:
            return False
        with self._connecting:
            outdated = self.channel
            try:
                found = self._trust.read()
                if found == self._credentials:
                    return False
                self._connect(found)
            except (
                InvalidUrl,
                MissingExtra,
            ) as error:  # it is being replaced now, or its new content is wrong
                if str(error) != self._unusable:
                    self._unusable = str(error)
                    _log.warning(
                        "replaced TLS files can't be used, keeping the old ones: %s",
                        error,
                        extra={"action": "tls_files_unusable"},
                    )
                return False
        outdated.close()
        return True

    def send(self, call: str, message: Any, metadata: Metadata, timeout_s: float) -> Any:
        """Send one request and return its reply, or raise ``CallFailed``."""
        try:
            return self._calls[call](message, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise CallFailed(judge(error.code(), error.details() or "")) from None
        except ValueError:  # what gRPC raises on a closed channel
            raise CallFailed(FailedCall(FailureEffect.NONE, RegistryUnavailable, CLOSED)) from None

    def begin(self, call: str, message: Any, metadata: Metadata, timeout_s: float) -> Any:
        """Send one request and return the future of its reply, or raise ``CallFailed``."""
        method: Any = self._calls[call]
        try:
            return method.future(message, timeout=timeout_s, metadata=metadata)
        except ValueError:  # what gRPC raises on a closed channel
            raise CallFailed(FailedCall(FailureEffect.NONE, RegistryUnavailable, CLOSED)) from None


class _Tries:
    """The tries of one request on several endpoints."""

    def __init__(self, timeout_s: float, repeat: Repeat = Repeat.READ) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + timeout_s
        self.repeat = repeat
        self.met: dict[str, FailedCall] = {}
        self.perhaps_done = False
        self.authenticated_again = False
        self.busy = 0
        """Number of consecutive answers "too many requests"."""

    def left_s(self) -> float:
        """Seconds until the request's time limit; always above 0."""
        return max(0.001, self.deadline - time.monotonic())

    def pause_s(self) -> float:
        """Seconds to wait for an overloaded etcd, with random jitter."""
        if not self.busy:
            return 0.0
        longest_s: float = min(FIRST_REST_S * 2.0**self.busy, LONGEST_PAUSE_S)
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)

    def note(self, address: str, verdict: FailedCall) -> None:
        """Keep an endpoint's error; a later timeout does not replace a cause."""
        if address not in self.met or verdict.effect is not FailureEffect.UNKNOWN:
            self.met[address] = verdict

    def story(self) -> str:
        """Return the tried endpoints and the time, in one line."""
        tried = ", ".join(f"{address} ({verdict.text})" for address, verdict in self.met.items())
        return f"tried {tried or 'no endpoint'} for {time.monotonic() - self.began:.1f} s"


class _TryAgain(Exception):
    """Try another endpoint, or the same a little later."""


class Endpoints:
    """All endpoints of a cluster behind one ``call``. Every method may be called from any thread."""

    def __init__(
        self,
        addresses: Sequence[str],
        trust: Trust | None,
        account: Account | None,
        look: Callable[[int], Any],
        find: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Create the endpoints without connecting.

        ``look`` builds the request for a linearizable read with that many guards, to compare endpoints.
        ``find`` finds the addresses again after one of them failed.
        """
        self._trust = trust
        self._find = find
        self._find_at = 0.0
        self._not_found = ""
        self._all = [Endpoint(address, trust) for address in addresses]
        random.shuffle(self._all)  # so that the nodes of a group spread over the members
        self._current = self._all[0]
        self._account = account
        self._metadata: Metadata | None = None if account else (NEEDS_LEADER,)
        self._authenticating = threading.Lock()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Endpoint], None]] = []
        self._closed = False
        self._look = look
        self._cluster = 0
        self._newest = 0
        self._wrong: str | None = None
        self._absent = set(self._all)
        self._compare_at = 0.0
        self.versions: set[str] = set()

    @property
    def absent(self) -> tuple[str, ...]:
        """Addresses of the endpoints that have not answered yet, whose cluster is therefore unknown."""
        return tuple(sorted(endpoint.address for endpoint in self._absent))

    def on_rest(self, listener: Callable[[Endpoint], None]) -> None:
        """Call ``listener`` with each endpoint that is set aside, in the thread that found it failing."""
        self._listeners.append(listener)

    def call(self, call: str, message: Any, timeout_s: float, repeat: Repeat) -> Any:
        """Send one request and return its reply, within ``timeout_s`` seconds.

        Raises:
            RegistryUnavailable: it had no effect; the message says what was tried and for how long.
            OutcomeUnknown: it may have taken effect, now or later.
            RegistryRefused, LeaseNotFound: etcd answered with a refusal, or it is another store than before.
            CallFailed: the requested revision is compacted.
        """
        tries = _Tries(timeout_s, repeat)
        try:
            return self._try(
                call, message, tries
            )  # the fast path of nearly every call, a tenth of a ms shorter
        except _TryAgain:
            return self._try_again(call, message, tries)

    def ready(self, timeout_s: float) -> tuple[Endpoint, Metadata]:
        """Return a proven endpoint, and the metadata for a stream on it.

        Raises:
            CallFailed: it could not be proven within ``timeout_s`` seconds; it is set aside.
        """
        endpoint = self._choose()
        try:
            return endpoint, self._prove(endpoint, _Tries(timeout_s))
        except CallFailed as failed:
            if not (self._is_handshake(failed.verdict) and endpoint.renew_trust()):
                self._learn(endpoint, failed.verdict)
            raise

    def compare(self, longest: int, timeout_s: float) -> int:
        """Compare all endpoints that answer. Return the longest transaction of each, at most ``longest``.

        The endpoints read one after the other, twice: if two stores have the same cluster id, such as copies,
        the revision goes back.

        Raises:
            RegistryRefused: they belong to different clusters, or to different stores.
        """
        deadline = time.monotonic() + min(timeout_s, LONGEST_COMPARISON_S)
        self._ask(self._all, "status", etcdrpc.StatusRequest(), deadline)
        here = [endpoint for endpoint in self._all if endpoint not in self._absent]
        taken, refused, length = 0, longest + 1, longest
        while refused - taken > 1:
            if self._ask(here, "transact", self._look(length), deadline):
                taken = length
            else:
                refused = length
            length = (taken + refused) // 2
        if len(here) > 1:
            self._ask(here, "transact", self._look(taken), deadline)
        return taken

    def check_store(self, endpoint: Endpoint, header: Any, newest: int = 0) -> None:
        """Check that an answer is from the store that answered first, at revision ``newest`` or later.

        Raises:
            RegistryRefused: it is not. This connection can't be used any more.
        """
        with self._lock:
            first = self._wrong is None
            self._absent.discard(endpoint)
            self._cluster = self._cluster or header.cluster_id
            if header.cluster_id != self._cluster:
                self._wrong = (
                    f"{endpoint.address} belongs to the etcd cluster {header.cluster_id:x}, and this "
                    f"connection was opened to {self._cluster:x}: a URL must name the members of one "
                    "cluster; correct it, or restart this process if the cluster was replaced"
                )
            elif newest > header.revision:
                self._wrong = (
                    f"{endpoint.address} went back from revision {newest} to {header.revision}: it has lost "
                    "data, was restored without --bump-revision, or is a copy of another; make sure that it "
                    "is the right one, and restart this process"
                )
            else:
                return
            wrong = self._wrong
        if first:
            _log.error(wrong, extra={"action": "store_refused"})
        raise RegistryRefused(wrong)

    def doubt(self, endpoint: Endpoint, *, token: bool = False) -> None:
        """Prove the endpoint again before the next request, and log in again if ``token`` is set."""
        endpoint.proven = False
        if token and self._account:
            self._metadata = None

    def close(self) -> None:
        """Close all connections; calls under way fail."""
        with self._lock:
            self._closed = True
            endpoints = self._all
        for endpoint in endpoints:
            endpoint.channel.close()

    def _try_again(self, call: str, message: Any, tries: _Tries) -> Any:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TryAgain),
            stop=lambda state: time.monotonic() + state.upcoming_sleep >= tries.deadline,
            wait=lambda _state: max(self._rest_left_s(), tries.pause_s()),
            reraise=True,
        )
        try:
            retrying.sleep(min(tries.pause_s(), tries.left_s()))
            return retrying(self._try, call, message, tries)
        except _TryAgain:
            if tries.perhaps_done:
                raise OutcomeUnknown(f"etcd gave no answer; {tries.story()}") from None
            if tries.busy:
                self._set_aside(self._current)  # for the next request: another may be less overloaded
                raise RegistryUnavailable(f"etcd is overloaded; {tries.story()}") from None
            raise RegistryUnavailable(f"etcd does not answer; {tries.story()}") from None

    def _try(self, call: str, message: Any, tries: _Tries) -> Any:
        if self._closed:
            raise RegistryUnavailable(CLOSED)
        if self._wrong is not None:
            raise RegistryRefused(self._wrong)
        endpoint = self._choose()
        sent = False
        try:
            metadata = self._prove(endpoint, tries)
            newest = self._newest
            sent = True
            # A request that is sent only once can wait as long as its caller does.
            patience_s = tries.left_s() if tries.repeat is Repeat.NEVER else self._share_s(tries)
            reply = endpoint.send(call, message, metadata, patience_s)
        except CallFailed as failed:
            if self._is_handshake(failed.verdict) and endpoint.renew_trust():
                raise _TryAgain from failed
            tries.note(endpoint.address, failed.verdict)
            self._learn(endpoint, failed.verdict)
            self._decide(endpoint, failed, tries, sent=sent)
        endpoint.failures = 0
        self._accept(endpoint, call, reply, newest, tries)
        if self._absent:
            self._compare_absent(metadata)
        return reply

    def _accept(self, endpoint: Endpoint, call: str, reply: Any, newest: int, tries: _Tries) -> None:
        """Accept a reply from the right store; only transactions read the latest revision."""
        linearizable = call == "transact"
        try:
            self.check_store(endpoint, reply.header, newest if linearizable else 0)
        except RegistryRefused as refused:
            if tries.repeat is Repeat.READ:
                raise
            raise OutcomeUnknown(f"it was carried out elsewhere: {refused}") from refused
        if linearizable:
            with self._lock:
                self._newest = max(self._newest, reply.header.revision)

    def _ask(self, endpoints: Iterable[Endpoint], call: str, message: Any, deadline: float) -> bool:
        """Send a request to all of them at once. Return False if one says that it is too long."""
        metadata, newest = self._metadata or (NEEDS_LEADER,), self._newest
        asked = []
        for endpoint in endpoints:
            left_s = max(0.001, deadline - time.monotonic())
            with contextlib.suppress(CallFailed):  # closed meanwhile
                asked.append((endpoint, endpoint.begin(call, message, metadata, left_s)))
        taken = [self._compared(endpoint, call, future, newest) for endpoint, future in asked]
        return all(taken)

    def _compared(self, endpoint: Endpoint, call: str, future: Any, newest: int) -> bool:
        """Handle the answer of an endpoint. Return False if the message was too long for it."""
        try:
            reply = future.result()
        except grpc.RpcError as error:
            return judge(error.code(), error.details() or "").error is not RequestTooLarge
        except grpc.FutureCancelledError:
            return True
        self._accept(endpoint, call, reply, newest, _Tries(0.0))
        if call == "status":
            self.versions.add(reply.version)
        return True

    def _compare_absent(self, metadata: Metadata) -> None:
        """Try endpoints that never answered now and then, without waiting, as other clients may use them."""
        now = time.monotonic()
        with self._lock:
            if now < self._compare_at:
                return
            self._compare_at = now + COMPARE_AGAIN_S
            absent, newest = list(self._absent), self._newest
        for endpoint in absent:
            with contextlib.suppress(CallFailed):  # closed meanwhile
                asked = endpoint.begin("transact", self._look(1), metadata, LONGEST_COMPARISON_S)
                asked.add_done_callback(partial(self._compared_late, endpoint, newest))

    def _compared_late(self, endpoint: Endpoint, newest: int, asked: Any) -> None:
        with contextlib.suppress(RegistryRefused):  # the next request reports it
            self._compared(endpoint, "transact", asked, newest)

    def _decide(self, endpoint: Endpoint, failed: CallFailed, tries: _Tries, *, sent: bool) -> NoReturn:
        verdict = failed.verdict
        tries.busy = tries.busy + 1 if verdict.effect is FailureEffect.BUSY else 0
        match verdict.effect:
            case FailureEffect.BUSY:
                pass
            case FailureEffect.UNKNOWN if sent and tries.repeat is Repeat.NEVER:
                raise OutcomeUnknown(f"etcd gave no answer; {tries.story()}") from failed
            case FailureEffect.PERHAPS_REFUSED if tries.repeat is not Repeat.READ:
                refused = verdict.error(f"{endpoint.address}: {verdict.text}")
                raise OutcomeUnknown(f"it may have taken effect: {refused}") from refused
            case FailureEffect.UNKNOWN:
                tries.perhaps_done |= sent and tries.repeat is Repeat.HARMLESS
            case FailureEffect.NONE:
                self._refuse_handshakes(tries)
            case FailureEffect.STALE_TOKEN if self._account and not tries.authenticated_again:
                tries.authenticated_again = True
            case FailureEffect.COMPACTED:
                raise failed
            case _:
                raise verdict.error(f"{endpoint.address}: {verdict.text}") from failed
        raise _TryAgain from failed

    def _is_handshake(self, verdict: FailedCall) -> bool:
        return verdict.error is AccessDenied and verdict.effect is FailureEffect.NONE

    def _refuse_handshakes(self, tries: _Tries) -> None:
        """Raise AccessDenied at once if no endpoint accepts the certificate: waiting would not help."""
        if len(tries.met) == len(self._all) and all(map(self._is_handshake, tries.met.values())):
            raise AccessDenied(f"etcd was not reached; {tries.story()}")

    def _choose(self) -> Endpoint:
        with self._lock:
            now = time.monotonic()
            if self._current.rests_until > now:
                self._current = min(self._all, key=lambda each: max(each.rests_until, now))
            return self._current

    def _rest_left_s(self) -> float:
        return max(0.0, min(each.rests_until for each in self._all) - time.monotonic())

    def _share_s(self, tries: _Tries) -> float:
        """Return the share of the remaining time for one endpoint, so that each can be tried."""
        return max(0.001, tries.left_s() / len(self._all))

    def _prove(self, endpoint: Endpoint, tries: _Tries) -> Metadata:
        """Check that the endpoint answers and has a leader. Return the metadata for a request."""
        metadata = self._metadata or self._authenticate(endpoint, tries)
        if not endpoint.proven:
            patience_s = min(LONGEST_PROOF_S, self._share_s(tries))
            self._look_at(endpoint, metadata, patience_s)
            endpoint.proven = True
        return metadata

    def _look_at(self, endpoint: Endpoint, metadata: Metadata, patience_s: float) -> None:
        newest = self._newest
        try:
            status = endpoint.send("status", etcdrpc.StatusRequest(), metadata, patience_s)
        except CallFailed as failed:
            if failed.verdict.error is not AccessDenied or failed.verdict.effect is not FailureEffect.REFUSED:
                raise
            # Some releases, such as 3.6.9 to 3.6.11, show their status only to administrators.
            reply = endpoint.send("transact", self._look(1), metadata, patience_s)
            self.check_store(endpoint, reply.header, newest)
            self.versions.add("")
            return
        if status.leader == 0:
            raise CallFailed(FailedCall(FailureEffect.NONE, RegistryUnavailable, "this member has no leader"))
        self.check_store(endpoint, status.header)
        self.versions.add(status.version)

    def _authenticate(self, endpoint: Endpoint, tries: _Tries) -> Metadata:
        account = self._account
        if account is None:
            return (NEEDS_LEADER,)
        with self._authenticating:
            if self._metadata is not None:
                return self._metadata
            if endpoint.login is None:
                request = etcdrpc.AuthenticateRequest(name=account.user, password=account.password)
                endpoint.login = endpoint.begin("authenticate", request, (), LONGEST_LOGIN_S)
            login = endpoint.login
        try:
            reply = login.result(min(LONGEST_PROOF_S, self._share_s(tries)))
        except grpc.FutureTimeoutError:
            raise CallFailed(
                FailedCall(FailureEffect.UNKNOWN, RegistryUnavailable, "it has not logged in yet")
            ) from None
        except grpc.FutureCancelledError:
            raise CallFailed(FailedCall(FailureEffect.NONE, RegistryUnavailable, CLOSED)) from None
        except grpc.RpcError as error:
            self._end_login(endpoint, login)
            verdict = judge(error.code(), error.details() or "")
            if "authentication is not enabled" not in verdict.text:
                raise CallFailed(verdict) from None
            return self._end_login(endpoint, login, (NEEDS_LEADER,))
        return self._end_login(endpoint, login, (NEEDS_LEADER, ("token", reply.token)))

    def _end_login(self, endpoint: Endpoint, login: Any, metadata: Metadata | None = None) -> Metadata:
        """Handle the result of a login, once for all requests that waited for it."""
        with self._authenticating:
            if endpoint.login is login:
                endpoint.login = None
                self._metadata = metadata
            return metadata or self._metadata or (NEEDS_LEADER,)

    def _learn(self, endpoint: Endpoint, verdict: FailedCall) -> None:
        """Update the state of an endpoint after a failure, for the next request."""
        if verdict.effect is FailureEffect.STALE_TOKEN:
            self.doubt(endpoint, token=True)
        if verdict.effect in {FailureEffect.NONE, FailureEffect.UNKNOWN}:
            self._set_aside(endpoint)

    def _set_aside(self, endpoint: Endpoint) -> None:
        with self._lock:
            endpoint.proven = False
            endpoint.failures += 1
            rest_s = min(FIRST_REST_S * 2 ** (endpoint.failures - 1), LONGEST_REST_S)
            endpoint.rests_until = time.monotonic() + rest_s
            find = self._find if not self._closed and time.monotonic() >= self._find_at else None
            if find is not None:
                self._find_at = math.inf
        for listener in self._listeners:
            listener(endpoint)
        if find is not None:  # in another thread, as heartbeats must not wait for DNS
            threading.Thread(
                target=self._find_again, args=(find,), name="etcd-discovery", daemon=True
            ).start()

    def _find_again(self, find: Callable[[], Sequence[str]]) -> None:
        """Find the current members; one thread at a time does."""
        try:
            self._replace(set(find()))
        except RebalanserError as error:
            if str(error) != self._not_found:
                self._not_found = str(error)
                _log.warning(
                    "DNS lookup of the members failed: %s", error, extra={"action": "members_not_found"}
                )
        finally:
            self._find_at = time.monotonic() + FIND_AGAIN_S

    def _replace(self, addresses: AbstractSet[str]) -> None:
        """Use these members, and former ones only as long as they answer."""
        known = {endpoint.address for endpoint in self._all}
        new = [Endpoint(address, self._trust) for address in addresses - known]
        random.shuffle(new)
        with self._lock:
            others = [endpoint for endpoint in self._all if endpoint.address not in addresses]
            gone = [endpoint for endpoint in others if endpoint.failures or not endpoint.proven]
            if self._closed:
                gone = new
            else:
                self._all = [*new, *(each for each in self._all if each not in gone)]
                self._absent = {*self._absent.difference(gone), *new}
                if self._current in gone:
                    self._current = self._all[0]
        for endpoint in gone:
            endpoint.channel.close()
