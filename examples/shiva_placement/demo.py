"""A web server is placed on one of three workers; that worker is killed, and another one serves on.

    python examples/shiva_placement/demo.py

It starts a Kafka of its own; ``--kafka HOST:PORT`` takes one that runs already. The leader and the workers
are started by the command line, as they would be on hosts of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self
from uuid import uuid4

from rebalanser.errors import RebalanserError
from rebalanser.settings import Settings
from rebalanser.shiva import open_cluster
from rebalanser.testing.kafka_server import (
    KafkaCluster,
    KafkaFailed,
    KafkaMissing,
    addresses_from_environment,
)
from rebalanser.testing.waiting import PATIENCE_S

APP = Path(__file__).resolve().with_name("app")
APPLICATION = "examples/web/whereabouts"
SHIVA = (sys.executable, "-m", "rebalanser", "shiva")
WORKERS = ("worker-1", "worker-2", "worker-3")
ROUND_S = 0.5
"""Thirty seconds by default, which is kinder to Kafka than to people who watch a demo."""
LOOK_EVERY_S = 0.05


class DemoFailed(Exception):
    """Something did not happen that had to."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the web server said."""

    worker: str
    token: int
    asked: int


class Site:
    """The leader and the workers, each a process of its own, and a client's view of them."""

    def __init__(self, kafka: str, folder: Path) -> None:
        """Ask Kafka for an answer, before anything is started.

        Raises:
            RegistryUnavailable: there is none in time.
        """
        cluster = f"placement-{uuid4().hex[:8]}"
        open_cluster(f"kafka://{kafka}/{cluster}", Settings().connect_timeout_s).close()
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, "REBALANSER_KAFKA": kafka, "REBALANSER_CLUSTER": cluster}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()
            process.wait()

    def tell(self, what: str) -> None:
        """Print what happened, and when."""
        print(f"{time.monotonic() - self._began:6.1f} s  {what}", flush=True)

    def begin_leader(self) -> None:
        """Start a leader."""
        self._begin("leader-1", "leader", "--round", f"{ROUND_S:g}")

    def begin_worker(self, worker: str) -> None:
        """Start a worker with a folder of its own, as on a host of its own."""
        self._begin(worker, "worker", "--data", str(self._folder / worker))

    def _begin(self, name: str, *words: str) -> None:
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*SHIVA, *words, "--id", name], env=self._environment, stdout=log, stderr=log
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def kill(self, name: str) -> None:
        """``kill -9`` a process."""
        self._processes[name].kill()
        self._processes[name].wait()

    def run(self, *words: str) -> Any:
        """Run a command as a client, and what it answered.

        Raises:
            DemoFailed: it failed; with what it and the processes of the site said.
        """
        done = self._client(*words)
        if done.returncode:
            self.fail(f"shiva {words[0]}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def _client(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*SHIVA, *words, "--json"]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)

    def known_workers(self) -> set[str]:
        """The workers that the leader knows; none before the first of these processes has made the topics."""
        done = self._client("status")
        return set() if done.returncode else {each["worker"] for each in json.loads(done.stdout)["workers"]}

    def check(self) -> None:
        """See that none of the processes has ended by itself.

        Raises:
            DemoFailed: one has; with what each said.
        """
        for name, process in self._processes.items():
            if process.poll() is not None:
                self.fail(f"{name} ended with {process.returncode}")

    def fail(self, why: str) -> NoReturn:
        """Raise, with the end of what each process said."""
        words = [why]
        for name in self._processes:
            last = self._log(name).read_text(errors="replace").splitlines()[-8:]
            words += [f"--- {name}", *last]
        raise DemoFailed("\n".join(words))


def ask(port: int) -> Answer | None:
    """What the web server says; None where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1) as response:
            said = json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
    return Answer(said["worker"], said["token"], said["asked"])


def answer_from(site: Site, port: int, workers: set[str]) -> Answer:
    """The first answer that comes from one of these workers.

    Raises:
        DemoFailed: none within the time.
    """
    deadline = time.monotonic() + PATIENCE_S
    answer = ask(port)
    while answer is None or answer.worker not in workers:
        if time.monotonic() > deadline:
            site.fail(f"no answer from {', '.join(sorted(workers))} within {PATIENCE_S:g} s, but {answer}")
        time.sleep(LOOK_EVERY_S)
        answer = ask(port)
    return answer


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def application(folder: Path, port: int) -> Path:
    """A copy of the application that listens on ``port``."""
    copy = folder / "whereabouts"
    shutil.copytree(APP, copy)
    manifest = json.loads((copy / "shiva.json").read_text())
    manifest["environment"]["PORT"] = str(port)
    (copy / "shiva.json").write_text(json.dumps(manifest, indent=2))
    return copy


def place_and_kill(site: Site, folder: Path) -> None:
    """The whole story.

    Raises:
        DemoFailed: something did not happen that had to, or not within the time.
    """
    port = free_port()
    site.begin_leader()
    for worker in WORKERS:
        site.begin_worker(worker)
    deadline = time.monotonic() + PATIENCE_S
    while site.known_workers() != set(WORKERS):
        site.check()
        if time.monotonic() > deadline:
            site.fail(f"not all of {', '.join(WORKERS)} are known after {PATIENCE_S:g} s")
    site.tell(f"the leader knows {', '.join(WORKERS)}")

    started = site.run("start", APPLICATION, str(application(folder, port)), "--wait")
    site.tell(f"{APPLICATION} is {started['state']} on {started['worker']}")
    before = answer_from(site, port, {started["worker"]})
    site.tell(f"the web server answers: {before}")

    site.kill(before.worker)
    killed_at = time.monotonic()
    site.tell(f"{before.worker} is killed with kill -9")
    after = answer_from(site, port, {*WORKERS} - {before.worker})
    site.tell(f"the web server answers: {after}")
    site.tell(f"{time.monotonic() - killed_at:.1f} s after the kill; rounds take {ROUND_S:g} s")
    if after.token <= before.token:
        site.fail(f"the token went from {before.token} to {after.token}, and has to grow")

    site.run("stop", APPLICATION, "--wait")
    if (left := ask(port)) is not None:
        site.fail(f"{APPLICATION} is stopped and still answers: {left}")
    site.tell(f"{APPLICATION} is stopped, and nobody answers")


@contextlib.contextmanager
def broker(given: str | None) -> Iterator[str]:
    """Where Kafka is: as given, as the environment variable KAFKA says, or one that is started here."""
    if given or (given := ",".join(addresses_from_environment())):
        yield given
        return
    with KafkaCluster() as cluster:
        yield cluster.bootstrap


def main() -> int:
    """Run it; 1 where something did not happen that had to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a Kafka that runs already")
    given = parser.parse_args().kafka
    try:
        with (
            broker(given) as kafka,
            tempfile.TemporaryDirectory(prefix="shiva-") as folder,
            Site(kafka, Path(folder)) as site,
        ):
            place_and_kill(site, Path(folder))
    except (DemoFailed, RebalanserError, KafkaMissing, KafkaFailed) as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
