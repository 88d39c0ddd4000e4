"""Runs ``queues.drive`` for a queue: in the environment that has its packages, beside its server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from queues import place, servers
from queues.catalogue import Peer
from rebalanser.testing.etcd_server import EtcdCluster

BENCHMARKS = Path(__file__).parents[1]
LONGEST_S = 400.0


def python_of(peer: Peer) -> str:
    """The interpreter that has its packages: ``QUEUES_PYTHON`` for those of others, else this one."""
    other = os.environ.get("QUEUES_PYTHON", sys.executable)
    return sys.executable if peer.module == "on_skuld" else str(Path(other).absolute())


def missing(peer: Peer) -> str | None:
    """What it lacks here, in words; None where it can be started."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.package!r}) is None)"
    if subprocess.run([python_of(peer), "-c", look], check=False).returncode:
        return f"the package {peer.package} is not installed: make queues"
    if peer.server == "redis" and servers.find_redis() is None:
        return "no Redis: set REDIS_SERVER, or install redis-server or valkey-server"
    if peer.server == "postgres" and servers.find_postgres() is None:
        return "no PostgreSQL: set POSTGRES_BIN to the folder of initdb, or install postgresql"
    return None


def run(peer: Peer, action: str, tasks: int = 0, longest_s: float = LONGEST_S) -> dict[str, Any]:
    """Run an action of ``queues.drive`` on a new store, and return its figures."""
    with _server(peer) as url, tempfile.TemporaryDirectory() as folder:
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]),
            **{place.URL: url, place.FOLDER: folder, place.VARIANT: peer.variant},
        )
        command = [python_of(peer), "-m", "queues.drive", peer.name, action, str(tasks)]
        with subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as driver:
            try:
                output, errors = driver.communicate(timeout=longest_s)
            except BaseException:
                driver.terminate()  # it ends its workers, which a kill would leave behind
                raise
        if driver.returncode:
            raise RuntimeError(f"{peer.name}, {action}: {errors[-2000:]}")
        told: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return told


@contextlib.contextmanager
def _server(peer: Peer) -> Iterator[str]:
    """Its server's URL; empty where it needs none."""
    if peer.server == "redis":
        with servers.redis() as url:
            yield url
    elif peer.server == "postgres":
        with servers.postgres() as url:
            yield url
    elif peer.server == "etcd":
        with tempfile.TemporaryDirectory() as data, EtcdCluster(1, data_folder=Path(data)) as cluster:
            yield cluster.url(f"bench/{uuid4().hex}")
    else:
        yield ""
