"""Fixtures that several folders of tests share: real etcd and Kafka servers, and logging as it was."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from rebalanser.testing import etcd_server, kafka_server
from rebalanser.testing.etcd_server import EtcdCluster, EtcdMissing
from rebalanser.testing.kafka_server import KafkaCluster, KafkaMissing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytest.register_assert_rewrite("rebalanser.testing.registry_suite", "rebalanser.testing.coordinator_suite")


def missing(service: str, hint: str) -> NoReturn:
    """Skip on a laptop, fail in CI: there a missing service would hide what the tests hold."""
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"{service} is required in CI: {hint}")
    pytest.skip(f"{service} is missing: {hint}")


@pytest.fixture(scope="session")
def etcd_binary() -> Path:
    """An etcd binary, got if there is none yet, for tests whose subject starts servers by itself."""
    try:
        return etcd_server.install_etcd()
    except EtcdMissing:
        missing("etcd", etcd_server.HINT)


@pytest.fixture(scope="session")
def kafka_libraries() -> Path:
    """The folder of Kafka's jars, got if there is none yet, for tests whose subject starts brokers."""
    try:
        return kafka_server.install_kafka()
    except KafkaMissing:
        missing("Kafka", kafka_server.HINT)


def _started_etcd(cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    try:
        cluster.start()
    except EtcdMissing:
        missing("etcd", etcd_server.HINT)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd server of this worker, shared by its tests: each uses keys of its own."""
    yield from _started_etcd(EtcdCluster(1, data_folder=tmp_path_factory.mktemp("etcd")))


@pytest.fixture(scope="session")
def etcd_url(request: pytest.FixtureRequest) -> str:
    """The URL of the etcd named by the environment variable ``ETCD``, else of this worker's own server."""
    if endpoints := etcd_server.endpoints_from_environment():
        return f"etcd://{','.join(endpoints)}"
    own: EtcdCluster = request.getfixturevalue("etcd")
    return own.url()


@pytest.fixture(scope="session")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three etcd members of this worker; a test that breaks one restarts it before it ends."""
    yield from _started_etcd(EtcdCluster(3, data_folder=tmp_path_factory.mktemp("etcd-cluster")))


def _started_kafka(cluster: KafkaCluster) -> Iterator[KafkaCluster]:
    try:
        cluster.start()
    except KafkaMissing:
        missing("Kafka", kafka_server.HINT)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """One Kafka broker of this worker, shared by its tests: each uses topics of its own."""
    yield from _started_kafka(KafkaCluster(1, data_folder=tmp_path_factory.mktemp("kafka")))


@pytest.fixture(scope="session")
def kafka_address(request: pytest.FixtureRequest) -> str:
    """``HOST:PORT,…`` of the Kafka named by the environment variable ``KAFKA``, else of this worker's own."""
    if addresses := kafka_server.addresses_from_environment():
        return ",".join(addresses)
    own: KafkaCluster = request.getfixturevalue("kafka")
    return own.bootstrap


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three Kafka brokers of this worker; a test that breaks one restarts it before it ends."""
    yield from _started_kafka(KafkaCluster(3, data_folder=tmp_path_factory.mktemp("kafka-cluster")))


@pytest.fixture(autouse=True)
def _library_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger("rebalanser")
    handlers, level, propagate = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)
