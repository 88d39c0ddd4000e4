"""Real Kafka brokers for tests, demos and benchmarks: the jars, and clusters of them on loopback.

``python -m rebalanser.testing.kafka_server`` prints the folder with Kafka's jars, and gets them first if they
are missing; with ``--run`` it runs a broker on 127.0.0.1:9092 until Ctrl-C. If a Kafka already runs,
``KAFKA=HOST:PORT,HOST:PORT`` names it and nothing is started.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import typer

from rebalanser.testing.server_cluster import ServerCluster
from rebalanser.testing.servers import (
    ServerFailed,
    ServerMissing,
    SourceFailed,
    addresses_in,
    cache_folder,
    copy_from_image,
    exclusive,
    free_ports,
    make_certificates,
    run,
    workshop,
)
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from confluent_kafka.admin._metadata import ClusterMetadata

VERSION: Final = "4.3.1"
OLDEST_JAVA: Final = 17
IMAGE_VARIABLE: Final = "KAFKA_IMAGE"
"""Variable with a container image that has Kafka in ``/opt/kafka``: the last resort."""
HINT: Final = "set KAFKA=HOST:PORT of a running Kafka, or install Java >= 17 and Maven"

_LOOK_S: Final = 2.0 * patience_ratio()
"""Timeout of each of the requests that are repeated until a broker answers."""

_POM: Final = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>rebalanser.invalid</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.25.4</version>
    </dependency>
  </dependencies>
</project>
"""
"""Maven project of Kafka and a binding of its log calls to log4j; without, a failed start prints nothing."""

_SMALL: Final = {
    "auto.create.topics.enable": "false",
    "log.cleaner.dedupe.buffer.size": "2097152",
    "num.io.threads": "4",
    "num.network.threads": "2",
    "offsets.topic.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
}
_QUICK: Final = {
    "broker.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "6000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "100",
    "log.cleaner.backoff.ms": "200",
    "log.initial.task.delay.ms": "500",
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "replica.lag.time.max.ms": "2000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}
"""Settings with shorter times than Kafka's defaults, for tests."""
_JVM: Final = (
    "-Xms64m",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dlog4j2.level=WARN",
)


class KafkaMissing(ServerMissing):
    """No Kafka could be found or installed; the message has one line for each way that was tried."""


class KafkaFailed(ServerFailed):
    """A broker did not start or did not get ready; the message has the end of its log."""


def addresses_from_environment() -> tuple[str, ...]:
    """The ``HOST:PORT`` parts of the environment variable ``KAFKA``; empty if it is not set."""
    return addresses_in("KAFKA")


def find_java() -> Path | None:
    """The java command of ``$JAVA_HOME``, else of the PATH, if its version is 17 or later."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else None
    java = java or shutil.which("java")
    if java is None:
        return None
    try:
        said = subprocess.run(  # noqa: S603
            [java, "-version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)', said.stderr)
    return Path(java) if found and int(found[1]) >= OLDEST_JAVA else None


def find_kafka() -> Path | None:
    """The folder with Kafka's jars in the cache: those of our version, else of another."""
    for libs in (_cached(VERSION), *sorted(cache_folder().glob("kafka-*/libs"), reverse=True)):
        if libs.is_dir():
            return libs
    return None


def install_kafka() -> Path:
    """The folder with Kafka's jars; if there is none they come from Maven or from an image.

    Parallel callers wait for each other and share the result. The first call takes some seconds to a minute.

    Raises:
        KafkaMissing: there is no Java, or nothing worked; the message says why, for each way.
    """
    if find_java() is None:
        raise KafkaMissing(f"no kafka: {HINT}\nJava: no java command of version >= {OLDEST_JAVA} on the PATH")
    if found := find_kafka():
        return found
    with exclusive("kafka"):
        if found := find_kafka():
            return found
        reasons = []
        for source in (_get_with_maven, _copy_from_image):
            try:
                return source()
            except SourceFailed as failed:
                reasons.append(str(failed))
    raise KafkaMissing("\n".join([f"no kafka: {HINT}", *reasons]))


def _cached(version: str) -> Path:
    return cache_folder() / f"kafka-{version}" / "libs"


def _keep(way: str, libs: Path) -> Path:
    """Move a complete folder of jars into the cache in one step, so that no process ever runs half of it."""
    server = next(libs.glob("kafka_2.13-*.jar"), None)
    if server is None:
        raise SourceFailed(f"{way}: there is no kafka_2.13 jar in what it brought")
    target = _cached(server.stem.removeprefix("kafka_2.13-"))
    home = libs.parent / "kafka"
    home.mkdir()
    libs.rename(home / "libs")
    home.rename(target.parent)
    return target


def _get_with_maven() -> Path:
    maven = shutil.which("mvn")
    if maven is None:
        raise SourceFailed("Maven: no mvn command on the PATH")
    with workshop("kafka") as folder:
        (folder / "pom.xml").write_text(_POM)
        quietly = ("--batch-mode", "--quiet", "-Dstyle.color=never")
        goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=libs")
        run("Maven", [maven, *quietly, *goal], cwd=folder, timeout=5 * PATIENCE_S, telling_line=0)
        return _keep("Maven", folder / "libs")


def _copy_from_image() -> Path:
    with workshop("kafka") as folder:
        return _keep("container", copy_from_image(IMAGE_VARIABLE, "/opt/kafka/libs", folder))


class KafkaCluster(ServerCluster):
    """One or three Kafka brokers on loopback, which end with the context or this process.

    Each is a broker and a controller (KRaft). Brokers are counted from 0, which is also their id in Kafka.
    With three, topics have three replicas of which two must be in sync. ``settings`` are added to those of
    every broker, or replace them. Without a ``data_folder`` it makes one, which ``stop`` deletes. ``port`` is
    the port of a single broker for clients; others are free ones. If ``quick`` is false all times and their
    limits are Kafka's defaults, for benchmarks.

    With ``sasl`` (user, password) clients must log in, with the mechanism PLAIN or SCRAM-SHA-256. With
    ``tls`` connections are encrypted; a client certificate is checked if a client sends one. Brokers speak to
    each other through a listener of their own, INTERNAL, that has neither.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        data_folder: Path | None = None,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        quick: bool = True,
        sasl: tuple[str, str] | None = None,
        tls: bool = False,
    ) -> None:
        self._own_folder = contextlib.ExitStack()
        folder = data_folder or Path(
            self._own_folder.enter_context(tempfile.TemporaryDirectory(prefix="kafka-"))
        )
        super().__init__("kafka", "broker", brokers, folder)
        self.sasl = sasl
        self.certificates = make_certificates(self.data_folder / "certificates") if tls else None
        self._settings = dict(settings or {})
        self._quick = quick
        self._java: list[str] = []
        ports = free_ports(3 * brokers)
        self._client_ports = ports[:brokers] if port is None else [port]
        self._internal_ports = ports[brokers : 2 * brokers]
        self._controller_ports = ports[2 * brokers :]
        self._advertised = [f"127.0.0.1:{port}" for port in self._client_ports]

    @property
    def brokers(self) -> int:
        """Number of brokers in the cluster, running or not."""
        return len(self._processes)

    @property
    def addresses(self) -> tuple[str, ...]:
        """``127.0.0.1:PORT`` of every broker's listener for clients, running or not."""
        return tuple(f"127.0.0.1:{port}" for port in self._client_ports)

    @property
    def bootstrap(self) -> str:
        """Value of a client's ``bootstrap.servers``: the addresses that brokers advertise."""
        return ",".join(self._advertised)

    def advertise(self, addresses: Sequence[str]) -> None:
        """Advertise these addresses to clients, such as those of proxies, from the next ``start`` on."""
        if len(addresses) != self.brokers:
            raise ValueError(f"{self.brokers} brokers need as many addresses, not {len(addresses)}")
        self._advertised = list(addresses)

    def url(self, cluster: str) -> str:
        """The URL of a Rebalanser cluster of this name on these brokers, without the security settings."""
        return f"kafka://{self.bootstrap}/{quote(cluster, safe='')}"

    @property
    def client_settings(self) -> dict[str, str]:
        """The librdkafka settings of a client that connects: addresses and security. It prints no log."""
        settings = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self._security_protocol.lower(),
            "log_level": "0",
        }
        if self.sasl:
            user, password = self.sasl
            settings |= {"sasl.mechanism": "PLAIN", "sasl.username": user, "sasl.password": password}
        if self.certificates:
            settings["ssl.ca.location"] = str(self.certificates.ca)
        return settings

    def start(self) -> None:
        """Start all brokers and wait until they serve.

        Raises:
            KafkaMissing: there is no Kafka or no Java, and none could be installed.
            KafkaFailed: a broker ended or did not get ready; with the end of its log.
        """
        if importlib.util.find_spec("confluent_kafka") is None:
            raise KafkaMissing("no client to see whether brokers are ready: install rebalanser[kafka]")
        libs = install_kafka()
        self._java = [str(find_java()), *_JVM, "-cp", f"{libs}/*"]
        with self._starting():
            self._format()
            for broker in range(self.brokers):
                self._start_server(broker)
            self.wait_ready()

    def stop(self) -> None:
        """Kill all brokers. Data and logs stay in a given data folder. Stopping twice does nothing."""
        super().stop()
        self._own_folder.close()

    def stop_broker(self, broker: int) -> None:
        """End a broker with SIGTERM and wait until it has gone; it hands its partitions over first."""
        self._processes[broker].terminate()

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every broker that runs answers a metadata request and is registered with all others.

        Every partition then has a leader, and those replicas in sync whose brokers run.

        Raises:
            KafkaFailed: a broker ended, or the time ran out; with the end of its log.
        """
        running = frozenset(broker for broker in range(self.brokers) if self._processes[broker].should_serve)
        for broker in sorted(running):
            self._wait_for(broker, functools.partial(self._is_ready, broker, running), timeout_s)

    @property
    def _security_protocol(self) -> str:
        encryption = "SSL" if self.certificates else "PLAINTEXT"
        return f"SASL_{encryption}" if self.sasl else encryption

    def _is_ready(self, broker: int, running: frozenset[int]) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._client_ports[broker])).close()
        except OSError:
            return False
        metadata = self._metadata_of(broker)
        if metadata is None or not running <= metadata.brokers.keys():
            return False
        partitions = (each for topic in metadata.topics.values() for each in topic.partitions.values())
        return all(
            each.leader in running and running.intersection(each.replicas) <= set(each.isrs)
            for each in partitions
            if running.intersection(each.replicas)
        )

    def _metadata_of(self, broker: int) -> ClusterMetadata | None:
        """The metadata of one broker. A new client knows no other broker to ask."""
        from confluent_kafka import KafkaException  # noqa: PLC0415
        from confluent_kafka.admin import AdminClient  # noqa: PLC0415

        only_this_one = {"bootstrap.servers": self.addresses[broker]}
        try:
            return AdminClient({**self.client_settings, **only_this_one}).list_topics(timeout=_LOOK_S)
        except KafkaException:
            return None

    def _failure(self, server: int) -> KafkaFailed:
        return KafkaFailed(self._processes[server].failure("is not ready"))

    def _start_server(self, server: int) -> None:
        self._processes[server].start([*self._java, "kafka.Kafka", str(self._properties(server))])

    def _wait_serving(self, _restarted: Sequence[int], /) -> None:
        self.wait_ready()  # all that run: partitions of the others may have waited for this one

    def _properties(self, broker: int) -> Path:
        return self.data_folder / f"broker-{broker}.properties"

    def _format(self) -> None:
        """Write every broker's settings, and prepare its storage if it is new."""
        quorum = ",".join(
            f"{broker}@127.0.0.1:{port}:{_new_id()}" for broker, port in enumerate(self._controller_ports)
        )
        command = [*self._java, "kafka.tools.StorageTool", "format", "--ignore-formatted"]
        command += ["--cluster-id", _new_id(), "--initial-controllers", quorum]
        if self.sasl:
            user, password = self.sasl
            command += ["--add-scram", f"SCRAM-SHA-256=[name={user},password={password}]"]

        def prepare(broker: int) -> None:
            lines = (f"{name}={_escaped(value)}\n" for name, value in self._broker_settings(broker).items())
            self._properties(broker).write_text("".join(lines))
            if (self._data(broker) / "meta.properties").exists():
                return
            with self.log(broker).open("ab") as log:
                done = subprocess.run(  # noqa: S603
                    [*command, "--config", self._properties(broker)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=PATIENCE_S,
                    check=False,
                )
            if done.returncode:
                raise KafkaFailed(self._processes[broker].failure("could not prepare its storage"))

        with ThreadPoolExecutor(max_workers=self.brokers) as pool:
            list(pool.map(prepare, range(self.brokers)))

    def _data(self, broker: int) -> Path:
        return self.data_folder / f"broker-{broker}"

    def _broker_settings(self, broker: int) -> dict[str, str]:
        client, internal, controller = (
            f"127.0.0.1:{ports[broker]}"
            for ports in (self._client_ports, self._internal_ports, self._controller_ports)
        )
        in_sync = (self.brokers + 1) // 2
        settings = {
            **_SMALL,
            "process.roles": "broker,controller",
            "node.id": str(broker),
            "log.dirs": str(self._data(broker)),
            "controller.quorum.bootstrap.servers": ",".join(
                f"127.0.0.1:{port}" for port in self._controller_ports
            ),
            "listeners": f"CLIENT://{client},INTERNAL://{internal},CONTROLLER://{controller}",
            "advertised.listeners": f"CLIENT://{self._advertised[broker]},INTERNAL://{internal}",
            "listener.security.protocol.map": (
                f"CLIENT:{self._security_protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
            "inter.broker.listener.name": "INTERNAL",
            "controller.listener.names": "CONTROLLER",
        }
        for topics in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
            settings[f"{topics}.replication.factor"] = str(self.brokers)
        for topics in ("transaction.state.log", "share.coordinator.state.topic"):
            settings[f"{topics}.min.isr"] = str(in_sync)
        if self._quick:
            settings |= _QUICK
            # A killed broker may register again once its old session has ended. On a busy machine a live one
            # is silent for longer. A single broker then reports to its clients that none is there.
            settings["broker.session.timeout.ms"] = "3000" if self.brokers == 1 else "2000"
        settings["default.replication.factor"] = str(self.brokers)
        settings["min.insync.replicas"] = str(in_sync)
        return {**settings, **self._security_settings(), **self._settings}

    def _security_settings(self) -> dict[str, str]:
        settings: dict[str, str] = {}
        if self.sasl:
            user, password = map(_quoted, self.sasl)
            modules = "org.apache.kafka.common.security"
            settings |= {
                "listener.name.client.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
                "listener.name.client.plain.sasl.jaas.config": (
                    f"{modules}.plain.PlainLoginModule required user_{self.sasl[0]}={password};"
                ),
                "listener.name.client.scram-sha-256.sasl.jaas.config": (
                    f"{modules}.scram.ScramLoginModule required username={user} password={password};"
                ),
            }
        if files := self.certificates:
            pair = files.ca.with_name("server-pair.pem")
            pair.write_text(files.server_key.read_text() + files.server_cert.read_text())
            settings |= {
                "listener.name.client.ssl.keystore.type": "PEM",
                "listener.name.client.ssl.keystore.location": str(pair),
                "listener.name.client.ssl.truststore.type": "PEM",
                "listener.name.client.ssl.truststore.location": str(files.ca),
                "listener.name.client.ssl.client.auth": "requested",
            }
        return settings


def _new_id() -> str:
    """A random id in Kafka's form, never with a dash first, which would look like an option."""
    return base64.urlsafe_b64encode(b"k" + secrets.token_bytes(15)).decode().rstrip("=")


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\")


def main(
    run: Annotated[
        bool, typer.Option("--run", help="Run a broker until Ctrl-C; its data is deleted then.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of 127.0.0.1 at which the broker serves.")] = 9092,
) -> None:
    """Print the folder with Kafka's jars, which are fetched first if they are missing, or run a broker."""
    try:
        if run:
            _run_broker(port)
        else:
            print(install_kafka())  # noqa: T201
    except (KafkaMissing, KafkaFailed) as error:
        print(error, file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


def _run_broker(port: int) -> None:
    # A second broker would begin, and seem ready while the first one answers.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise KafkaFailed(f"a broker cannot serve at 127.0.0.1:{port}: {error.strerror}") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), KafkaCluster(port=port, quick=False) as cluster:
        print(f"Kafka serves at {cluster.bootstrap}; Ctrl-C stops it", flush=True)  # noqa: T201
        signal.pause()


if __name__ == "__main__":
    typer.run(main)
