"""Fixtures that several folders of tests share: real etcd servers, and logging as it was."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from rebalanser.testing.etcd_server import HINT, EtcdCluster, EtcdMissing, endpoints_from_environment

if TYPE_CHECKING:
    from collections.abc import Iterator


pytest.register_assert_rewrite("rebalanser.testing.registry_suite", "rebalanser.testing.coordinator_suite")


def missing(service: str, hint: str) -> NoReturn:
    """Skip on a laptop, fail in CI: there a missing service would hide what the tests hold."""
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"{service} is required in CI: {hint}")
    pytest.skip(f"{service} is missing: {hint}")


def _started(cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    try:
        cluster.start()
    except EtcdMissing:
        missing("etcd", HINT)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd server of this worker, shared by its tests: each uses keys of its own."""
    yield from _started(EtcdCluster(1, data_folder=tmp_path_factory.mktemp("etcd")))


@pytest.fixture(scope="session")
def etcd_url(request: pytest.FixtureRequest) -> str:
    """The URL of the etcd named by the environment variable ``ETCD``, else of this worker's own server."""
    if endpoints := endpoints_from_environment():
        return f"etcd://{','.join(endpoints)}"
    own: EtcdCluster = request.getfixturevalue("etcd")
    return own.url()


@pytest.fixture(scope="session")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three etcd members of this worker; a test that breaks one restarts it before it ends."""
    yield from _started(EtcdCluster(3, data_folder=tmp_path_factory.mktemp("etcd-cluster")))


@pytest.fixture(autouse=True)
def _library_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger("rebalanser")
    handlers, level, propagate = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)
