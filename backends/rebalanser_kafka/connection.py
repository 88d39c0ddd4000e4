"""Connection settings of a Kafka cluster: URL, options and environment as librdkafka's configuration.

``kafka://[USER:PASSWORD@]HOST:PORT,…/CLUSTER[?OPTION=VALUE&…]``: the path names *our* cluster, the prefix of
its topics; the options are librdkafka's own names for security and the network. Settings that the
protocols depend on, such as ``acks`` or ``isolation.level``, cannot be set from outside.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import quote

import tenacity
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from rebalanser.errors import AccessDenied, InvalidUrl, RebalanserError, RegistryUnavailable
from rebalanser.redaction import hide_secret, names_secret, redact
from rebalanser.registry.urls import DEFAULT_ROOT, RegistryUrl, parse_url
from rebalanser_kafka.failures import error_of, is_denied

USER_VARIABLE: Final = "REBALANSER_KAFKA_USER"
PASSWORD_VARIABLE: Final = "REBALANSER_KAFKA_PASSWORD"  # noqa: S105 (a name, not a password)
METADATA_REFRESH_MS: Final = 10_000
"""Milliseconds between two requests for the brokers. A client repeats its request only then if it got an
answer without brokers, as while a broker is fenced."""
MAX_CLUSTER_NAME: Final = 128
"""Maximum characters of a cluster's name: a topic's name has 249, and the group's name follows the
cluster's."""

_CLUSTER_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_OPTIONS: Final = frozenset(
    {
        "broker.address.family",
        "client.dns.lookup",
        "client.id",
        "client.rack",
        "enable.ssl.certificate.verification",
        "metadata.max.age.ms",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "security.protocol",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.timeout.ms",
    }
)
_OPTION_PREFIXES: Final = ("ssl.", "sasl.")
_OF_THE_ACCOUNT: Final = frozenset({"sasl.username", "sasl.password"})
_OURS: Final = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "delivery.timeout.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "isolation.level",
        "linger.ms",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "max.poll.interval.ms",
        "message.send.max.retries",
        "message.timeout.ms",
        "metadata.broker.list",
        "partition.assignment.strategy",
        "request.required.acks",
        "retries",
        "session.timeout.ms",
        "transaction.timeout.ms",
        "transactional.id",
    }
)
_MECHANISM_NAMES: Final = ("sasl.mechanism", "sasl.mechanisms")
_DEFAULT_MECHANISM: Final = "SCRAM-SHA-512"
_LISTEN_S: Final = 0.05
"""Seconds to wait, after a failed attempt, for librdkafka's report about the connection."""
_LIBRDKAFKA: Final = logging.getLogger("rebalanser.kafka.librdkafka")


@dataclass(frozen=True, slots=True)
class Connection:
    """Address, account and settings of one Kafka cluster. ``describe`` and ``repr`` hide all secrets."""

    cluster: str
    """Prefix of all our topics, groups and transactional ids; empty if topics have their full names."""
    servers: str
    """``HOST:PORT,…``: the brokers to connect to first."""
    user: str | None = None
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    """librdkafka's settings that producers, consumers and admin clients share, the password among them."""

    @classmethod
    def from_url(cls, url: RegistryUrl | str, timeout_s: float = 10.0) -> Connection:
        """Read the settings from a URL and the environment; nothing is sent.

        A request that a broker has not answered after ``timeout_s`` seconds is given up, with its connection.
        User and password come from the URL, else from ``REBALANSER_KAFKA_USER`` and
        ``REBALANSER_KAFKA_PASSWORD``. With a user the default is SASL over TLS: a password is never sent in
        the clear.

        Raises:
            InvalidUrl: the cluster's name, an option or the account is invalid; the message says why.
        """
        url = parse_url(url) if isinstance(url, str) else url
        url.require_ports()
        _refuse_options(url)
        servers = ",".join(url.addresses)
        user, account = _account(url)
        timeout_ms = str(int(min(max(timeout_s, 1.0), 60.0) * 1000))
        config = {
            "bootstrap.servers": servers,
            "client.id": "rebalanser",
            "socket.timeout.ms": timeout_ms,
            "socket.connection.setup.timeout.ms": timeout_ms,
            "socket.nagle.disable": "true",
            "reconnect.backoff.ms": "50",
            "reconnect.backoff.max.ms": "500",  # librdkafka's 10 s would be added to every outage
            **{name: value for name, value in url.options.items() if name not in _MECHANISM_NAMES},
            **account,
        }
        for name, value in config.items():
            if names_secret(name) or name in {"ssl.key.pem", "sasl.oauthbearer.config"}:
                hide_secret(value)
        return cls(_cluster_name(url), servers, user, MappingProxyType(config))

    @property
    def _user_in_words(self) -> str:
        return "no user is given" if self.user is None else f"the user is {self.user!r}"

    def with_user(self, error: RebalanserError) -> RebalanserError:
        """Return the error; an ``AccessDenied`` also names the refused user."""
        return AccessDenied(f"{error} ({self._user_in_words})") if isinstance(error, AccessDenied) else error

    @contextmanager
    def naming_user(self) -> Iterator[None]:
        """Name the refused user in an ``AccessDenied`` raised by the body."""
        try:
            yield
        except AccessDenied as error:
            raise self.with_user(error) from None

    def describe(self) -> str:
        """Return the connection in one line, without its password."""
        user = f"{quote(self.user, safe='')}:***@" if self.user else ""
        protocol = self.config.get("security.protocol", "PLAINTEXT")
        mechanism = self.config.get("sasl.mechanism")
        security = f"{protocol}, {mechanism}" if mechanism else protocol
        path = f"/{self.cluster}" if self.cluster else ""
        return f"kafka://{user}{self.servers}{path} ({security})"

    def __str__(self) -> str:
        return self.describe()


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """Cluster and brokers of the first metadata answer."""

    cluster_id: str
    """Kafka's own id of its cluster: the same from every broker and after every restart."""
    brokers: tuple[str, ...]
    """``HOST:PORT`` of the brokers that are up."""


ErrorSink = Callable[[KafkaError], None]
"""Called with errors of a client that belong to no request, such as a lost connection."""


def client_config(
    connection: Connection, settings: Mapping[str, Any], on_error: ErrorSink | None = None
) -> dict[str, Any]:
    """Return a client's whole configuration: the connection's, then ``settings``.

    ``on_error`` is called by the client's ``poll``. Only librdkafka's critical log lines are kept: it would
    repeat "connection refused" twice a second on stderr.
    """
    config: dict[str, Any] = {
        "topic.metadata.refresh.interval.ms": METADATA_REFRESH_MS,
        **connection.config,
        "logger": _Aside(),
        "log_level": 2,
        **settings,
    }
    config["error_cb"] = on_error or _ignore
    return config


class _Aside:
    """Passes librdkafka's log lines on as details: an error of ours reports each of them again."""

    def log(self, _level: int, line: str, *parts: object) -> None:
        """Called by a client's ``poll``, as ``logging.Logger.log`` would be."""
        _LIBRDKAFKA.debug("%s", redact(line % parts if parts else line), extra={"action": "librdkafka"})


def _ignore(_error: KafkaError) -> None:
    """Ignore an error: for clients whose requests each report their own errors."""


class _NotYet(Exception):
    """No answer yet; the reasons are kept elsewhere."""


class _FirstReach:
    """Repeats a metadata request until it is answered, and keeps the reasons of the failures."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._reasons: dict[str, KafkaError] = {}
        try:
            self._admin = AdminClient(client_config(connection, {}, self._note))
        except (KafkaException, ValueError, TypeError) as exception:
            reason = redact(error_of(exception).str())
            raise InvalidUrl(f"{connection.describe()} cannot be used: {reason}") from None
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s

    def ask(self) -> BrokerInfo:
        """Return the brokers' answer, or raise the error that prevented it."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_NotYet),
            stop=lambda _state: time.monotonic() >= self._deadline,
            reraise=True,
        )
        try:
            return retrying(self._ask_once)
        except _NotYet:
            raise RegistryUnavailable(self._story("does not answer")) from None

    def _ask_once(self) -> BrokerInfo:
        left_s = self._deadline - time.monotonic()
        try:
            metadata = self._admin.list_topics(timeout=max(0.001, min(0.25, left_s)))
        except KafkaException as exception:
            self._note(error_of(exception))
            self._admin.poll(_LISTEN_S)
            if any(is_denied(error) for error in self._reasons.values()):
                raise AccessDenied(self._story("refuses")) from None
            raise _NotYet from None
        brokers = tuple(f"{broker.host}:{broker.port}" for _, broker in sorted(metadata.brokers.items()))
        return BrokerInfo(cluster_id=str(metadata.cluster_id), brokers=brokers)

    def _note(self, error: KafkaError) -> None:
        if error.code() not in {KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT}:
            self._reasons[error.name()] = error

    def _story(self, verb: str) -> str:
        reasons = "; ".join(redact(error.str()) for error in self._reasons.values()) or "no answer at all"
        tried_s = time.monotonic() - self._began
        servers = self._connection.servers
        return f"{self._connection.describe()} {verb}: tried {servers} for {tried_s:.1f} s ({reasons})"


def reach(connection: Connection, timeout_s: float) -> BrokerInfo:
    """Wait for the first metadata answer of any broker.

    Raises:
        InvalidUrl: librdkafka refuses the settings, or a certificate file cannot be read.
        RegistryUnavailable: no broker answered within ``timeout_s`` seconds; says what was tried.
        AccessDenied: a broker answered and refused the account. A wrong certificate cannot be told from a
            network that fails, so it is named in a RegistryUnavailable.
    """
    return _FirstReach(connection, timeout_s).ask()


def _cluster_name(url: RegistryUrl) -> str:
    name = url.path.strip("/") or DEFAULT_ROOT
    if not _CLUSTER_NAME.fullmatch(name) or name in {".", ".."} or len(name) > MAX_CLUSTER_NAME:
        raise InvalidUrl(
            f"{name!r} in {url} cannot name a cluster: its topics begin with it, so only ASCII letters, "
            f"digits, '.', '_' and '-' are allowed, at most {MAX_CLUSTER_NAME} of them"
        )
    return name


def _refuse_options(url: RegistryUrl) -> None:
    for name in url.options:
        if name in _OURS:
            raise InvalidUrl(f"{name!r} in {url} is Rebalanser's to set: its safety rests on it")
        if name in _OF_THE_ACCOUNT:
            raise InvalidUrl(
                f"{name!r} in {url}: write USER:PASSWORD@ before the hosts, or set {USER_VARIABLE} and "
                f"{PASSWORD_VARIABLE}"
            )
        if name not in _OPTIONS and not name.startswith(_OPTION_PREFIXES):
            raise InvalidUrl(
                f"{url} has the unknown option {name!r}; known are ssl.*, sasl.*, "
                f"{', '.join(sorted(_OPTIONS))}"
            )


def _account(url: RegistryUrl) -> tuple[str | None, dict[str, str]]:
    """Return the user, and the settings of its account. A password is sent in the clear only if the URL asks
    for that explicitly."""
    user = url.user or os.environ.get(USER_VARIABLE) or None
    password = url.password if url.password is not None else os.environ.get(PASSWORD_VARIABLE)
    mechanism = next((url.options[name] for name in _MECHANISM_NAMES if name in url.options), None)
    with_tls = any(name.startswith("ssl.") for name in url.options)
    by_default = "SASL_SSL" if user or mechanism else "SSL" if with_tls else "PLAINTEXT"
    protocol = url.options.get("security.protocol", by_default).upper()
    settings = {"security.protocol": protocol}
    if not protocol.startswith("SASL_"):
        if url.user or mechanism:
            raise InvalidUrl(
                f"{url} names a user or a mechanism, but security.protocol={protocol} asks for none"
            )
        return None, settings
    settings["sasl.mechanism"] = mechanism or _DEFAULT_MECHANISM
    if user:
        if password is None:
            raise InvalidUrl(f"{url} names the user {user!r} but no password: set {PASSWORD_VARIABLE}")
        hide_secret(password)
        settings |= {"sasl.username": user, "sasl.password": password}
    elif mechanism is None or mechanism.upper().startswith(("PLAIN", "SCRAM")):
        raise InvalidUrl(f"{url} asks for {protocol} but names no user: set {USER_VARIABLE}")
    return user, settings


_PAUSE_S: Final = 0.1
_LEAST_S: Final = 0.001
T = TypeVar("T")


def patiently(ask: Callable[[float], T], timeout_s: float) -> T:
    """Return the answer of ``ask``, a read that gets the seconds left; retry while the broker is away.

    Raises:
        RegistryUnavailable: the last one that ``ask`` raised within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    asking = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RegistryUnavailable),
        wait=tenacity.wait_fixed(_PAUSE_S),
        stop=lambda _state: time.monotonic() + _PAUSE_S >= deadline,
        reraise=True,
    )
    return asking(lambda: ask(max(_LEAST_S, deadline - time.monotonic())))
