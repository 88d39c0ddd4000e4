"""A server of tasks over HTTP whose engine is killed and comes back, while workers and a producer ask it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rebalanser.tasks import Queue, Status
from rebalanser.testing.etcd_server import EtcdCluster
from rebalanser.testing.waiting import PATIENCE_S, wait_until

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")

AWAY = {503, 504}
CLAIM_TTL_S = 3.0
WORKERS = 3


class Stage:
    """The server, and what it answered to whom."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "served"),
            "REBALANSER_LEASE_TTL_S": "3",
            "REBALANSER_CONNECT_TIMEOUT_S": "2",
        }
        command = [sys.executable, "-m", "rebalanser", "tasks", "serve", "work", "--port", "0", "--json"]
        given = ["--claim-ttl", str(CLAIM_TTL_S), "--registry", url]
        self.queue = stack.enter_context(Queue("work", url, partitions=4, state_folder=folder / "state"))
        process = subprocess.Popen([*command, *given], stdout=subprocess.PIPE, env=environment, text=True)
        assert process.stdout is not None
        stack.callback(process.stdout.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        self._url = json.loads(process.stdout.readline())["url"]
        self.ending = threading.Event()
        self.refused: Counter[str] = Counter()
        """How often each path was answered that the engine is away, or that nobody knows."""
        self.claims: list[tuple[str, int]] = []
        self.enqueued: list[str] = []

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Ask; the status and the document. An answer that takes for ever is a failure."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._url}/v1/queues/work{path}", data, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def until_answered(self, path: str, body: Any) -> tuple[int, Any]:
        """Ask the same again as long as the engine is away."""
        while True:
            status, document = self.post(path, body)
            if status not in AWAY:
                return status, document
            self.refused[path.rpartition("/")[2]] += 1
            time.sleep(0.1)

    def produce(self) -> None:
        """Enqueue, each with an id that was got before, until the test ends."""
        while not self.ending.is_set():
            (task,) = self.post("/ids")[1]["ids"]
            body = {"name": "send", "payload": {"value": 1}, "id": task, "retries": 100}
            status, document = self.until_answered("/tasks", body)
            assert status == 201, document
            self.enqueued.append(task)
            time.sleep(0.05)

    def work(self) -> None:
        """Claim and complete until all that was enqueued is complete."""
        while not self.ending.is_set() or self.queue.count().get(Status.COMPLETED) != len(self.enqueued):
            status, document = self.until_answered("/claims", {"worker": "w", "wait_s": 1.0, "limit": 2})
            assert status == 200, document
            for claim in document["claims"]:
                self.claims.append((claim["task"], claim["number"]))
                path = f"/tasks/{claim['task']}/claims/{claim['number']}/complete"
                status, answer = self.until_answered(path, {"holder": claim["holder"]})
                assert status == 200 or answer["type"] == "/problems/fenced", answer


@pytest.fixture
def own_etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdCluster]:
    """One member that only this test kills."""
    with EtcdCluster(1, data_folder=tmp_path / "etcd") as cluster:
        yield cluster


@pytest.mark.rule("SK-6", "SK-10", "SK-16", "SK-17")
def test_while_the_engine_is_away_it_is_said_and_afterwards_nothing_is_lost(
    own_etcd: EtcdCluster, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stage = Stage(own_etcd.url(), tmp_path, stack)
        failures: list[BaseException] = []

        def carefully(work: Any) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=carefully, args=(work,))
            for work in (stage.produce, *[stage.work] * WORKERS)
        ]
        for thread in threads:
            thread.start()
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(stage.ending.set)
        wait_until(lambda: bool(failures) or len(stage.claims) >= 20)
        for _ in range(2):
            before = Counter(stage.refused)
            own_etcd.kill(0)
            wait_until(lambda before=before: bool(failures) or stage.refused["tasks"] > before["tasks"])
            own_etcd.restart(0)
            so_far = len(stage.enqueued), len(stage.claims)
            wait_until(
                lambda so_far=so_far: (
                    bool(failures)
                    or (len(stage.enqueued) >= so_far[0] + 20 and len(stage.claims) >= so_far[1] + 20)
                )
            )
        stage.ending.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)
        assert {status: count for status, count in stage.queue.count().items() if count} == {
            Status.COMPLETED: len(stage.enqueued)
        }
        assert {each.head.id for each in stage.queue.tasks()} == set(stage.enqueued)
        assert len(set(stage.claims)) == len(stage.claims), "no claim was handed out twice"
        assert {task for task, _ in stage.claims} == set(stage.enqueued)
