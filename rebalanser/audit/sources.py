"""Sources of a history: files, folders, globs of them, and Kafka topics, all checked before Spark works."""

from __future__ import annotations

import glob
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from rebalanser.errors import FixConfiguration, RetryLater
from rebalanser.redaction import hide_secret, url_options

LINES: Final = (".jsonl", ".jsonl.gz")
ROWS: Final = (".parquet",)
USER_VARIABLE: Final = "REBALANSER_KAFKA_USER"
PASSWORD_VARIABLE: Final = "REBALANSER_KAFKA_PASSWORD"  # noqa: S105 - a name, no password
CONNECT_TIMEOUT_S: Final = 5.0

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_GLOB: Final = re.compile(r"([\\*?\[\]{}])")
_PORT: Final = 9092
_PEM_OPTIONS: Final = {"ssl.ca.location": ("ssl.truststore.location", "ssl.truststore.type")}
_PASSED_ON: Final = ("ssl.", "sasl.", "security.")


class NoHistory(FixConfiguration):
    """No source has anything that an audit can read; the message says what there is instead."""


class InvalidTopic(FixConfiguration):
    """The URL of a Kafka topic cannot be used as written, or the cluster has no such topic."""


class KafkaUnreachable(RetryLater):
    """No broker at the address answered."""


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """A Kafka topic for Spark's connector. Safe to print: the account is not shown."""

    name: str
    servers: str
    """``HOST:PORT,…``"""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The connector's settings, the password included."""

    @classmethod
    def from_url(cls, url: str) -> KafkaTopic:
        """Parse ``kafka://[USER:PASSWORD@]HOST:PORT,…/TOPIC[?OPTION=VALUE&…]``.

        User and password come from the URL, else from ``REBALANSER_KAFKA_USER`` and
        ``REBALANSER_KAFKA_PASSWORD``; with a user the default is SCRAM over TLS. Options are
        ``security.protocol``, ``sasl.mechanism``, ``ssl.ca.location`` and Kafka's own ``ssl.*``, ``sasl.*``.

        Raises:
            InvalidTopic: no broker or topic is named, or an option or the account can't be used.
        """
        parts = urlsplit(url)
        account, _, hosts = parts.netloc.rpartition("@")
        shown = f"kafka://{hosts}{parts.path}"
        name = parts.path.strip("/")
        if not hosts or not name or "/" in name:
            raise InvalidTopic(f"{shown} has no topic; write kafka://HOST:PORT/TOPIC")
        servers = ",".join(host if _has_port(host) else f"{host}:{_PORT}" for host in hosts.split(","))
        try:
            asked = url_options(parts.query)
        except ValueError as error:
            raise InvalidTopic(f"{error} in the URL {shown}") from None
        for option in asked:
            if not option.startswith(_PASSED_ON):
                raise InvalidTopic(
                    f"{shown} has the unknown option {option!r}; allowed are ssl.*, sasl.*, security.*"
                )
        settings = _security(shown, account, asked)
        return cls(name, servers, {f"kafka.{option}": value for option, value in settings.items()})

    def __str__(self) -> str:
        return f"kafka://{self.servers}/{self.name}"

    def check(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect to a broker, so that a wrong address fails in seconds and not in Spark's minutes.

        Raises:
            KafkaUnreachable: none at the address accepts a connection within ``timeout_s`` seconds.
        """
        reasons = []
        for server in self.servers.split(","):
            host, _, port = server.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
            except (OSError, ValueError, OverflowError) as error:
                reasons.append(f"{server}: {getattr(error, 'strerror', None) or error}")
            else:
                return
        raise KafkaUnreachable(f"no Kafka broker answers for {self} ({'; '.join(reasons)})")


@dataclass(frozen=True, slots=True)
class Places:
    """Sources of an audit by type, each path in Spark's form."""

    line_files: tuple[str, ...] = ()
    line_folders: tuple[str, ...] = ()
    row_files: tuple[str, ...] = ()
    row_folders: tuple[str, ...] = ()
    topics: tuple[KafkaTopic, ...] = ()


def places(sources: Iterable[str | os.PathLike[str]]) -> Places:
    """Sort the sources by type.

    A source is a JSONL or Parquet file, a folder with such files in it or in its folders, a glob of those, or
    the URL of a Kafka topic. A file named by itself is taken as JSONL unless its name ends in ``.parquet``. A
    place that is not on this machine, such as ``s3a://…``, is not checked here: a name that ends in
    ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` is a file or glob there, any other a folder of JSONL.

    Raises:
        NoHistory: a path does not exist, or has no file of a history in it.
        InvalidTopic: a URL of a Kafka topic cannot be used.
    """
    parts = [part for source in sources for part in _places_of(os.fspath(source))]
    if not parts:
        raise NoHistory("no source: give files, folders or kafka://HOST:PORT/TOPIC")
    return Places(
        line_files=_distinct(item for part in parts for item in part.line_files),
        line_folders=_distinct(item for part in parts for item in part.line_folders),
        row_files=_distinct(item for part in parts for item in part.row_files),
        row_folders=_distinct(item for part in parts for item in part.row_folders),
        topics=tuple(topic for part in parts for topic in part.topics),
    )


def _distinct(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(paths))


def _places_of(source: str) -> Iterator[Places]:
    scheme = _SCHEME.match(source)
    if scheme and scheme[1].lower() == "kafka":
        yield Places(topics=(KafkaTopic.from_url(source),))
    elif scheme and scheme[1].lower() != "file":
        yield _elsewhere(source)
    else:
        path = unquote(urlsplit(source).path) if scheme else source
        for found in _existing(path):
            yield _folder(found) if found.is_dir() else _file(found)


def _elsewhere(source: str) -> Places:
    if source.endswith(LINES):
        return Places(line_files=(source,))
    return Places(row_files=(source,)) if source.endswith(ROWS) else Places(line_folders=(source,))


def _existing(path: str) -> Sequence[Path]:
    """The path itself, or the matches of the glob."""
    if Path(path).exists():
        return [Path(path)]
    found = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - an absolute path too
    if not found:
        raise NoHistory(f"{path} does not exist")
    return [Path(one) for one in found]


def _file(path: Path) -> Places:
    _refuse_hidden(path)
    if path.name.endswith(ROWS):
        return Places(row_files=(spark_path(path),))
    return Places(line_files=(spark_path(path),))


def _folder(folder: Path) -> Places:
    """The files of a history in a folder.

    Folders that Spark wrote as a Parquet table are taken as folders of Parquet.
    """
    files = [Path(place) / name for place, _, names in os.walk(folder) for name in names if name[0] != "."]
    lines = [file for file in files if file.name.endswith(LINES)]
    rows = [file for file in files if file.name.endswith(ROWS)]
    if not lines and not rows:
        raise NoHistory(f"{folder} has no *.jsonl, *.jsonl.gz or *.parquet files; found: {_suffixes(files)}")
    for file in [*lines, *rows]:
        _refuse_hidden(file.relative_to(folder))
    here = (spark_path(folder),)
    return Places(line_folders=here if lines else (), row_folders=here if rows else ())


def _refuse_hidden(path: Path) -> None:
    """Refuse a file or folder that Spark would silently skip."""
    if any(part.startswith("_") for part in path.parts):
        raise NoHistory(f"{path} can't be read: Spark skips names that begin with '_'; rename it")


def _suffixes(files: Sequence[Path]) -> str:
    counts = Counter(file.suffix or "files without suffix" for file in files).most_common(3)
    if not counts:
        return "nothing"
    return ", ".join(f"{count} {suffix}" for suffix, count in counts)


def spark_path(path: Path) -> str:
    """The URI of a path on this machine, with the characters of globs escaped."""
    return "file://" + escaped(str(path.resolve()))


def escaped(path: str) -> str:
    """A path with the characters of globs escaped."""
    return _GLOB.sub(r"\\\1", path)


def _has_port(host: str) -> bool:
    return re.search(r":\d+$", host) is not None and (host.count(":") == 1 or "]" in host)


def _security(shown: str, account: str, asked: Mapping[str, str]) -> dict[str, str]:
    """Kafka's settings for the account and the encryption."""
    name, _, secret = account.partition(":")
    user = unquote(name) or os.environ.get(USER_VARIABLE)
    password = unquote(secret) or os.environ.get(PASSWORD_VARIABLE)
    mechanism = asked.get("sasl.mechanism", asked.get("sasl.mechanisms"))
    with_tls = any(option.startswith("ssl.") for option in asked)
    by_default = "SASL_SSL" if user or mechanism else "SSL" if with_tls else "PLAINTEXT"
    settings = {
        option: value for option, value in asked.items() if option not in {*_PEM_OPTIONS, "sasl.mechanisms"}
    }
    settings["security.protocol"] = asked.get("security.protocol", by_default).upper()
    for option, (location, kind) in _PEM_OPTIONS.items():
        if option in asked:
            settings |= {location: asked[option], kind: "PEM"}
    if not settings["security.protocol"].startswith("SASL_"):
        return settings
    settings["sasl.mechanism"] = (mechanism or "SCRAM-SHA-512").upper()
    if user:
        if not password:
            raise InvalidTopic(f"{shown} names the user {user!r} but no password: set {PASSWORD_VARIABLE}")
        hide_secret(password)
        settings["sasl.jaas.config"] = _login(settings["sasl.mechanism"], user, password)
    return settings


def _login(mechanism: str, user: str, password: str) -> str:
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    return (
        f"org.apache.kafka.common.security.{module} required "
        f'username="{_quoted(user)}" password="{_quoted(password)}";'
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
