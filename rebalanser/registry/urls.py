"""Registry URLs and the backends that open them.

=========================================  ===========================================================
``memory://NAME``                          in this process only, for tests
``sqlite:///PATH?file_mode=0640``          a file on this host; ``sqlite:////abs`` is an absolute path
``etcd://[USER:PASSWORD@]H:P,H:P/PREFIX``  an etcd cluster
``etcd+tls://…?ca=F&cert=F&key=F``         the same over TLS; the guide on etcd has more options
``etcd+srv://DOMAIN/PREFIX``               the same by SRV records; ``etcd+tls+srv://`` over TLS
``kafka://H:P,H:P/CLUSTER``                a Kafka cluster, in which each group has a log
=========================================  ===========================================================

A backend is a callable registered by scheme under the entry-point group ``rebalanser.backends``. It opens a
``Registry``, in which this package stores groups, or a ``GroupStore``, which stores groups in its own way.
Nothing here knows a scheme: a URL is parsed by its form, the backend checks what it needs of it
(``RegistryUrl.require_ports``), and its entry point names the extra that installs its packages.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from rebalanser.errors import InvalidName, InvalidUrl, MissingExtra, NotARegistry, UnknownScheme
from rebalanser.redaction import hide_secret, redact, url_options
from rebalanser.registry.contract import Capabilities, Registry
from rebalanser.registry.coordinator import Coordinator

ENTRY_POINT_GROUP: Final = "rebalanser.backends"
DEFAULT_ROOT: Final = "rebalanser"
REGISTRY_VARIABLE: Final = "REBALANSER_REGISTRY"
"""Environment variable for the registry's URL, if the application passes none."""
KAFKA_VARIABLE: Final = "REBALANSER_KAFKA"
"""Environment variable for the address of Kafka, if the application passes none."""
MAX_TOPIC_CHARS: Final = 249
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]+")


def check_topic_name(name: str) -> str:
    """Return the name of a Kafka topic, if it is valid.

    Raises:
        InvalidName: it is invalid; the message says what is allowed.
    """
    if not _TOPIC.fullmatch(name) or name in {".", ".."} or len(name) > MAX_TOPIC_CHARS:
        raise InvalidName(
            f"{name[:MAX_TOPIC_CHARS]!r} cannot name a topic: use at most {MAX_TOPIC_CHARS} ASCII letters, "
            "digits, '.', '_' and '-', but not '.' or '..' alone"
        )
    return name


@dataclass(frozen=True, slots=True)
class RegistryUrl:
    """A parsed registry URL. Its ``str()`` and ``repr()`` hide password and options, for logs."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    """Names or addresses with their ports, 0 where the URL has none; empty if ``/`` follows ``://``."""
    path: str = ""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def root(self) -> str:
        """The prefix of all keys of all groups, without a leading or trailing slash."""
        return (self.path.strip("/") if self.hosts else "") or DEFAULT_ROOT

    @property
    def addresses(self) -> tuple[str, ...]:
        """The hosts as text: ``HOST:PORT``, or ``HOST`` without a port; IPv6 addresses in brackets."""
        return tuple(
            (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "") for host, port in self.hosts
        )

    def require_ports(self) -> None:
        """Check that it names at least one host, and a port for each.

        Raises:
            InvalidUrl: a host or a port is missing.
        """
        if not self.hosts:
            raise InvalidUrl(f"{self} names no host; write {self.scheme}://HOST:PORT")
        for (_, port), address in zip(self.hosts, self.addresses, strict=True):
            if not port:
                raise InvalidUrl(f"{address!r} in the URL {self.scheme}://… is not HOST:PORT")

    def require_domain(self) -> str:
        """Return its domain name, whose SRV records name hosts and ports.

        Raises:
            InvalidUrl: it names several hosts, a port, or an address.
        """
        domain = self.hosts[0][0] if self.hosts else ""
        # A number after a colon may be a password whose host was forgotten.
        shown = ",".join(re.sub(r":\d+$", ":***", each) for each in self.addresses)
        if len(self.hosts) != 1 or self.hosts[0][1] or ":" in domain or _ADDRESS.fullmatch(domain):
            raise InvalidUrl(
                f"{self.scheme}:// finds hosts and ports by DNS SRV: it needs a domain name without a port, "
                f"such as {self.scheme}://example.org, not {shown!r}; "
                f"for addresses use {self.scheme.removesuffix('+srv')}://"
            )
        return domain

    def __str__(self) -> str:
        user = f"{self.user}:***@" if self.user else ""
        return f"{self.scheme}://{user}{','.join(self.addresses)}{self.path}"


_HOST: Final = re.compile(r"[\w.~\-]+|\[[\da-fA-F:.]+\]")
_ADDRESS: Final = re.compile(r"[\d.]+")
"""An IPv4 address: the last label of a domain name is never a number."""


def _host(text: str, scheme: str) -> tuple[str, int]:
    match = _HOST.match(text)
    host, rest = (match[0], text[match.end() :]) if match else ("", text)
    port = rest.removeprefix(":")
    if not host or (rest and not (rest.startswith(":") and port.isdigit() and 0 < int(port) < 65536)):
        # What follows a colon may be a password whose host was forgotten.
        shown = text if ":" not in rest else f"{text.partition(':')[0]}:***"
        raise InvalidUrl(f"{shown!r} in the URL {scheme}://… is not HOST:PORT")
    return (host.strip("[]"), int(port)) if port else (host.strip("[]").rstrip("."), 0)


def url_or_default(url: str | None) -> str:
    """Return the given URL, else that of ``REBALANSER_REGISTRY``.

    Raises:
        InvalidUrl: there is neither, or the given one is not a text.
    """
    if url is not None and not isinstance(url, str):
        raise InvalidUrl(f"a registry URL is text such as sqlite:///groups.db, not {type(url).__name__}")
    chosen = os.environ.get(REGISTRY_VARIABLE) or None if url is None else url
    if chosen is None:
        raise InvalidUrl(
            f"no registry is named: pass its URL, such as sqlite:///groups.db, or set {REGISTRY_VARIABLE}"
        )
    return chosen


def with_scheme(address: str, scheme: str) -> str:
    """Return the URL of a bare ``HOST:PORT,…``; an address that has a scheme as it is."""
    return address if "://" in address else f"{scheme}://{address}"


def parse_url(text: str) -> RegistryUrl:
    """Parse a registry URL: ``SCHEME://[USER[:PASSWORD]@][HOST[:PORT],…][/PATH][?NAME=VALUE&…]``.

    Raises:
        InvalidUrl: it has no scheme, its hosts are not ``HOST`` or ``HOST:PORT``, or an option has no value.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not scheme:
        raise InvalidUrl(
            f"{redact(text)!r} is not a registry URL such as sqlite:///groups.db or etcd://HOST:PORT"
        )
    if not rest or rest.startswith(("/", "?")):  # a path, in which other characters have no meaning
        path, _, options = rest.partition("?")
        return RegistryUrl(scheme, path=path, options=_options(options, scheme))
    account, _, location = rest.rpartition("@")
    try:
        parts = urlsplit(f"//{location}")
    except ValueError:  # whose message has a part of the URL
        raise InvalidUrl(f"the part after {scheme}:// is not HOST:PORT/PATH") from None
    user, colon, password = account.partition(":")
    hide_secret(unquote(password))
    return RegistryUrl(
        scheme=scheme,
        hosts=tuple(_host(part, scheme) for part in parts.netloc.split(",")),
        path=parts.path,
        user=unquote(user) or None,
        password=unquote(password) if colon else None,
        options=_options(parts.query, scheme),
    )


def _options(query: str, scheme: str) -> dict[str, str]:
    try:
        return url_options(query)
    except ValueError as error:
        raise InvalidUrl(f"{error} in the URL {scheme}://…") from None


class GroupStore(ABC):
    """A connection to a store of groups that is not a registry. The caller that opened it closes it."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Abilities and limits of the store."""

    @abstractmethod
    def look(self, timeout_s: float) -> None:
        """Check that the store answers within ``timeout_s`` seconds.

        Raises:
            RegistryUnavailable: it did not answer in time.
        """

    @abstractmethod
    def open_group(
        self,
        group: str,
        now: Callable[[], float],
        timeout_s: float,
        connect_timeout_s: float,
        *,
        create: bool = True,
    ) -> Coordinator:
        """Open a group. The coordinator stays open when this connection is closed.

        Without ``create`` nothing is made: a group that the store has nothing of is refused.

        ``now`` is the monotonic clock of deadlines (seconds). ``timeout_s`` bounds each command,
        ``connect_timeout_s`` the opening.

        Raises:
            RegistryUnavailable: it did not answer in time.
            UnknownGroup: without ``create`` only: there is no such group.
            FixConfiguration: a person must change something first.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""


Opener: TypeAlias = Callable[[RegistryUrl, float], Registry | GroupStore]
"""``open(url, timeout_s)``: returns a backend that has answered once, or raises an error that says what was
tried."""


def known_schemes(group: str = ENTRY_POINT_GROUP) -> dict[str, EntryPoint]:
    """Return the installed backends of an entry-point group, by URL scheme."""
    return {point.name: point for point in entry_points(group=group)}


def load_opener(scheme: str, group: str = ENTRY_POINT_GROUP, keeps: str = "") -> Any:
    """Load the object that is registered for a scheme in an entry-point group.

    Args:
        scheme: of a URL.
        group: of the entry points.
        keeps: what its stores keep, for the message if the scheme is one of groups only.

    Raises:
        UnknownScheme: no backend has this scheme; the message names the known ones.
        MissingExtra: the backend's packages are not installed; the message names the entry point's extra.
    """
    schemes = known_schemes(group)
    point = schemes.get(scheme)
    if point is None:
        lacks = keeps and scheme in known_schemes()
        found = f"{scheme}:// keeps no {keeps}" if lacks else f"no backend for {scheme}://"
        raise UnknownScheme(f"{found}; known: {', '.join(sorted(schemes)) or 'none'}")
    try:
        return point.load()
    except ImportError as error:
        if point.dist is None or not point.extras:
            raise
        extras = f"{point.dist.name}[{','.join(point.extras)}]"
        raise MissingExtra(
            f"{scheme}:// needs packages that are not installed ({error}); pip install '{extras}'"
        ) from error


def open_backend(url: str | RegistryUrl, timeout_s: float = 10.0) -> Registry | GroupStore:
    """Open the store at ``url``; wait at most ``timeout_s`` seconds for its first answer.

    Raises:
        UnknownScheme: no backend has this scheme.
        MissingExtra: the backend's packages are not installed.
        RegistryUnavailable: it did not answer in time; the message says what was tried.
        RegistryRefused: it answered with a refusal.
    """
    parsed = parse_url(url) if isinstance(url, str) else url
    opener: Opener = load_opener(parsed.scheme)
    return opener(parsed, timeout_s)


def open_registry(url: str | RegistryUrl, timeout_s: float = 10.0) -> Registry:
    """Open the registry at ``url``, for keys of the application; raises what ``open_backend`` does.

    Raises:
        NotARegistry: the store keeps groups, but no keys.
    """
    opened = open_backend(url, timeout_s)
    if isinstance(opened, Registry):
        return opened
    opened.close()
    raise NotARegistry(f"{parse_url(url) if isinstance(url, str) else url} keeps groups, but no keys")
