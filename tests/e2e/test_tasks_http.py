"""Tasks over HTTP: real servers on loopback and SQLite, and a worker that knows nothing but HTTP and JSON."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from rebalanser.tasks import Queue, Status
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")

pytestmark = pytest.mark.slow

CLAIM_TTL_S = 1.0
TOKEN = "a token of the tests' own: 0123456789".replace(" ", "-")
UNKNOWN = "0" * 40
MAX_BODY_BYTES = 10_000


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


class Client:
    """A producer and worker, written with the standard library."""

    def __init__(self, url: str, token: str | None = TOKEN) -> None:
        self.url = url
        self._token = token

    def send(self, method: str, path: str, body: Any = None) -> Reply:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return Reply(reply.status, reply.headers, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers, error.read())

    def get(self, path: str) -> Reply:
        return self.send("GET", f"/v1/queues/work{path}")

    def post(self, path: str, body: Any = None) -> Reply:
        return self.send("POST", f"/v1/queues/work{path}", body)

    def enqueue(self, value: Any = None, **more: Any) -> str:
        reply = self.post("/tasks", {"name": "send", "payload": {"value": value}, **more})
        assert reply.status == 201, reply
        task: str = reply.json["id"]
        return task

    def claim(self, wait_s: float = 20.0, limit: int = 1, **more: Any) -> list[dict[str, Any]]:
        reply = self.post("/claims", {"worker": "a worker in C", "wait_s": wait_s, "limit": limit, **more})
        assert reply.status == 200, reply
        claims: list[dict[str, Any]] = reply.json["claims"]
        return claims

    def ask(self, claim: dict[str, Any], what: str, **more: Any) -> Reply:
        path = f"/tasks/{claim['task']}/claims/{claim['number']}/{what}"
        return self.post(path, {"holder": claim["holder"], **more})


class Served:
    """``rebalanser tasks serve`` in a process of its own."""

    def __init__(self, stage: Stage, *arguments: str, files: int | None = None) -> None:
        command = [
            *(() if files is None else ("sh", "-c", f'ulimit -n {files} && exec "$@"', "sh")),
            *(sys.executable, "-m", "rebalanser", "tasks", "serve", "work", "--port", "0", "--json"),
            *("--claim-ttl", str(CLAIM_TTL_S), "--registry", stage.url, *arguments),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=stage.environment, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Stage:
    """A queue on SQLite, and servers of it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.url = f"sqlite:///{folder / 'tasks.db'}"
        self.environment = {
            **os.environ, "XDG_STATE_HOME": str(folder / "state"), "REBALANSER_LEASE_TTL_S": "2",
        }  # fmt: skip
        self._token = folder / "token"
        self._token.write_text(f"{TOKEN}\n")
        self._stack = stack
        self.queue = stack.enter_context(Queue("work", self.url, partitions=4, state_folder=folder / "state"))

    def serve(self, *arguments: str, files: int | None = None) -> Served:
        given = ("--token-file", str(self._token), "--max-body", str(MAX_BODY_BYTES), *arguments)
        return self._stack.enter_context(Served(self, *given, files=files))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(tmp_path, stack)


def is_problem(reply: Reply, status: int, name: str) -> dict[str, Any]:
    assert reply.status == status, reply
    assert reply.headers["Content-Type"] == "application/problem+json"
    document: dict[str, Any] = reply.json
    assert (document["type"], document["status"]) == (f"/problems/{name}", status)
    assert document["title"]
    return document


@pytest.mark.rule("SK-16", "SK-23")
def test_one_task_of_a_key_is_handed_out_at_a_time(stage: Stage) -> None:
    client = Client(stage.serve().url)
    limit = {"key": "customer-7", "max_running_per_key": 1}
    first, second = client.enqueue(**limit), client.enqueue(**limit)
    other = client.enqueue(**{**limit, "key": "customer-8"})
    claims = client.claim(limit=3)
    claims += client.claim() if len(claims) == 1 else []
    assert {claim["task"] for claim in claims} == {first, other}
    assert client.claim(wait_s=0, limit=3) == []
    (mine,) = (claim for claim in claims if claim["task"] == first)
    assert client.ask(mine, "complete").status == 200
    (claim,) = client.claim()
    assert claim["task"] == second
    told = client.get(f"/tasks/{second}").json
    assert (told["limit_key"], told["max_running"]) == ("customer-7", 1)
    task = {"name": "send", "payload": {}, **limit, "max_running": 1}
    assert client.post("/tasks", task).status == 422


@pytest.mark.rule("SK-16", "SK-23")
def test_a_unique_task_is_enqueued_once(stage: Stage) -> None:
    client = Client(stage.serve().url)
    first = client.enqueue(unique_key="customer-7", unique_for_s=3600)
    task = {"name": "send", "payload": {"value": None}, "unique_key": "customer-7"}
    reply = client.post("/tasks", task)
    assert (reply.status, reply.json) == (201, {"id": first, "answer": "duplicate"})
    batch = client.post("/batches", {"tasks": [task, {**task, "unique_key": "customer-8"}, task]}).json
    assert batch["answers"] == ["duplicate", "committed", "duplicate"]
    assert batch["ids"][0] == batch["ids"][2] == first
    told = client.get(f"/tasks/{first}").json
    assert (told["unique_key"], told["unique_for_s"]) == ("customer-7", 3600.0)
    assert client.post("/tasks", {**task, "unique_key": ""}).status == 422


@pytest.mark.rule("SK-4", "SK-5", "SK-6", "SK-7", "SK-9", "SK-10", "SK-12", "SK-16")
def test_a_worker_in_another_language_does_its_work(stage: Stage) -> None:
    client = Client(stage.serve().url)
    first = client.enqueue({"to": "a"}, retries=2)
    second = client.enqueue(after=[first], priority=5)
    (claim,) = client.claim()
    assert (claim["task"], claim["name"], claim["number"]) == (first, "send", 0)
    assert claim["payload"] == {"value": {"to": "a"}, "base64": None}
    assert (claim["ttl_s"], claim["retries"]) == (CLAIM_TTL_S, 2)
    renewed = client.ask(claim, "renew").json
    assert (renewed["status"], renewed["ttl_s"]) == ("claimed", CLAIM_TTL_S)
    assert renewed["revision"] > claim["token"]
    for _ in range(2):  # sending it again is harmless
        assert client.ask(claim, "update", sequence=0, content={"value": "half"}).status == 200
    raw = base64.b64encode(b"\xff").decode()
    assert client.ask(claim, "update", sequence=1, content={"base64": raw}).status == 200
    assert client.claim(wait_s=0) == [], "what depends on it waits"
    for _ in range(2):
        completed = client.ask(claim, "complete", result={"value": [1, None]}).json
        assert completed["status"] == "completed"
    told = client.get(f"/tasks/{first}?at_least={completed['revision']}").json
    assert (told["status"], told["result"]["value"]) == ("completed", [1, None])
    assert "holder" not in json.dumps(told)
    log = client.get(f"/tasks/{first}/log").lines
    assert [(each["claim"], each["sequence"], each["content"]) for each in log] == [
        (0, 0, {"value": "half", "base64": None}),
        (0, 1, {"value": None, "base64": raw}),
    ]  # fmt: skip
    (other,) = client.claim()
    assert other["task"] == second
    assert client.ask(other, "release").json["status"] == "waiting"
    (again,) = client.claim()
    assert (again["number"], again["failures"]) == (1, 0)
    assert again["token"] > other["token"]
    assert client.ask(again, "fail", error="broken", give_up=True).json["status"] == "dead"
    assert client.get("/counts").json["counts"] == {
        "waiting": 0, "claimed": 0, "completed": 1, "dead": 1, "cancelled": 0,
    }  # fmt: skip
    assert client.post(f"/tasks/{second}/requeue").json["status"] == "waiting"
    assert client.post(f"/tasks/{second}/cancel").json["status"] == "cancelled"
    assert [each["id"] for each in client.get("/tasks?status=cancelled&status=dead").lines] == [second]
    assert [each["id"] for each in client.get(f"/tasks?after={first}&limit=10").lines] == [second]


@pytest.mark.rule("SK-3", "SK-12")
def test_a_batch_with_ids_got_before_is_stored_once(stage: Stage) -> None:
    client = Client(stage.serve().url)
    ids = client.post("/ids?count=40").json["ids"]
    assert ids == sorted(set(ids))
    batch = {"tasks": [{"name": "send", "payload": {"value": n}, "id": task} for n, task in enumerate(ids)]}
    for _ in range(2):
        assert client.post("/batches", batch).json["ids"] == ids
    reply = client.get("/tasks")
    assert reply.headers["Content-Type"].startswith("application/x-ndjson")
    assert [each["id"] for each in reply.lines] == ids
    is_problem(client.post("/tasks", {"name": "x", "payload": {}, "id": ids[0]}), 409, "exists")


@pytest.mark.rule("SK-6", "SK-10", "SK-16")
def test_a_stale_claim_can_write_nothing(stage: Stage) -> None:
    client = Client(stage.serve().url)
    client.enqueue(retries=5)
    (stale,) = client.claim()
    (current,) = client.claim(wait_s=30)
    assert (current["task"], current["number"]) == (stale["task"], 1)
    for what, more in (
        ("renew", {}),
        ("update", {"sequence": 0, "content": {}}),
        ("complete", {}),
        ("fail", {"error": ""}),
        ("release", {}),
    ):
        assert "superseded" in is_problem(client.ask(stale, what, **more), 409, "fenced")["detail"]
    guessed = {**current, "holder": stale["holder"]}
    is_problem(client.ask(guessed, "complete"), 409, "fenced")
    assert client.ask(current, "complete").json["status"] == "completed"
    is_problem(client.ask(current, "renew"), 409, "fenced")
    is_problem(client.ask(stale, "complete"), 409, "fenced")


@pytest.mark.rule("SK-9", "SK-16")
def test_an_update_out_of_turn_is_refused(stage: Stage) -> None:
    client = Client(stage.serve().url)
    client.enqueue()
    (claim,) = client.claim()
    is_problem(client.ask(claim, "update", sequence=1, content={}), 409, "update-conflict")
    assert client.ask(claim, "update", sequence=0, content={"value": 1}).status == 200
    is_problem(client.ask(claim, "update", sequence=0, content={"value": 2}), 409, "update-conflict")


@pytest.mark.rule("SK-13", "SK-16", "SK-17")
def test_another_server_takes_over_from_one_that_is_killed(stage: Stage) -> None:
    first = stage.serve()
    client = Client(first.url)
    ids = [client.enqueue(number, retries=3) for number in range(12)]
    held = client.claim(limit=2)
    assert len(held) == 2
    second = stage.serve()
    first.process.kill()
    first.process.wait()
    client = Client(second.url)
    if client.ask(held[0], "complete").status == 409:  # any server will do, while no other claim exists
        pytest.fail("the claim was still current")
    done = {held[0]["task"]}
    while len(done) < len(ids):
        for claim in client.claim(wait_s=30, limit=4):
            assert client.ask(claim, "complete").status == 200
            done.add(claim["task"])
    assert done == set(ids)
    is_problem(client.ask(held[1], "complete"), 409, "fenced")
    assert stage.queue.get(held[1]["task"]).state.claim.number == 1  # type: ignore[union-attr]


@pytest.mark.rule("SK-16")
def test_a_server_that_is_asked_to_stop_answers_who_waits_and_leaves(stage: Stage) -> None:
    served = stage.serve()
    client = Client(served.url)
    wait_until(lambda: client.send("GET", "/health").json["partitions"] == 4)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.claim(wait_s=50)))
    waiting.start()
    time.sleep(patience_ratio())  # nothing shows that the server waits for a task
    served.process.send_signal(signal.SIGTERM)
    waiting.join(PATIENCE_S)
    assert answers == [[]]
    assert served.process.wait(PATIENCE_S) == 0


@pytest.mark.rule("SK-16")
def test_a_claim_for_somebody_who_hung_up_is_not_made(stage: Stage) -> None:
    served = stage.serve()
    client = Client(served.url)
    host = served.url.removeprefix("http://")
    gone = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    body = json.dumps({"worker": "gone", "wait_s": 50})
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    gone.request("POST", "/v1/queues/work/claims", body, headers)
    time.sleep(0.5 * patience_ratio())  # nothing shows that the server waits, nor that it heard the end
    gone.close()
    time.sleep(0.5 * patience_ratio())
    task = client.enqueue()
    (claim,) = client.claim()
    assert (claim["task"], claim["failures"]) == (task, 0)
    stored = stage.queue.get(task)
    assert stored.state.claim is not None
    assert stored.state.claim.worker == "a worker in C"


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    "sent", [b"GET /health HTTP/1.1\r\nX: ", b"POST /v1 HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_clients_that_send_half_a_request_keep_no_other_away(stage: Stage, sent: bytes) -> None:
    served = stage.serve(files=128)
    client = Client(served.url)
    host, port = served.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(200):
            half = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            half.sendall(sent)
        assert client.send("GET", "/health").status == 200
        task = client.enqueue()
        (claim,) = client.claim()
        assert claim["task"] == task
        assert client.ask(claim, "complete").status == 200


@pytest.mark.rule("SK-5", "SK-16")
def test_who_knows_some_functions_only_is_given_only_their_tasks(stage: Stage) -> None:
    client = Client(stage.serve().url)
    strange = [client.enqueue(name="strange", priority=9) for _ in range(5)]
    mine = client.enqueue(name="mine")
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.claim(wait_s=50, names=["nobody's"])))
    waiting.start()
    (claim,) = client.claim(limit=3, names=["mine", "other"])
    assert claim["task"] == mine, "who waits for what there is not holds up nobody"
    assert client.claim(wait_s=0, names=["mine"]) == []
    assert [each["task"] for each in client.claim(limit=9)] == strange, "they were put aside for nobody"
    late = client.enqueue(name="nobody's")
    waiting.join(PATIENCE_S)
    assert [each["task"] for each in answers[0]] == [late]
    is_problem(client.post("/claims", {"worker": "x", "names": []}), 422, "invalid")


@pytest.mark.rule("AU-4", "SK-16")
def test_claims_over_http_stand_in_the_history(stage: Stage, tmp_path: Path) -> None:
    stage.environment["REBALANSER_HISTORY_DIR"] = str(tmp_path / "history")
    served = stage.serve()
    client = Client(served.url)
    task = client.enqueue(retries=5)
    (lost,) = client.claim()
    (claim,) = client.claim(wait_s=30)
    is_problem(client.ask(lost, "renew"), 409, "fenced")
    assert client.ask(claim, "update", sequence=0, content={"value": 1}).status == 200
    assert client.ask(claim, "complete").status == 200
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    files = sorted((tmp_path / "history").glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    told = [
        (each["kind"], each["token"], each.get("value")) for each in records if each.get("resource") == task
    ]
    assert told == [
        ("claimed", lost["token"], 0),
        ("claim_ended", lost["token"], None),
        ("claimed", claim["token"], 1),
        ("fenced", lost["token"], None),
        ("updated", claim["token"], 0),
        ("completed", claim["token"], None),
        ("claim_ended", claim["token"], None),
    ]


@pytest.mark.rule("AU-4", "SK-6", "SK-13", "SK-16")
def test_claims_that_end_at_another_server_do_not_overlap_in_the_history(
    stage: Stage, tmp_path: Path
) -> None:
    """No claim is over by its time here: whoever made it has heard of its end from the engine."""
    stage.environment["REBALANSER_HISTORY_DIR"] = str(tmp_path / "history")
    first = stage.serve("--claim-ttl", "600")
    maker = Client(first.url)
    ids = {maker.enqueue(number, retries=5) for number in range(12)}
    held: list[dict[str, Any]] = []
    while len(held) < len(ids):
        held += maker.claim(limit=12)
    second = stage.serve("--claim-ttl", "600")
    other = Client(second.url)
    for number, claim in enumerate(held):
        ended = other.ask(claim, "release") if number % 2 else other.ask(claim, "fail", error="no", delay_s=0)
        assert ended.status == 200, ended
        assert stage.queue.get(claim["task"]).state.due > 0, "it waits until the news must have come"
    again: dict[str, tuple[dict[str, Any], Client]] = {}
    while len(again) < len(ids):
        for client in (maker, other):
            again |= {claim["task"]: (claim, client) for claim in client.claim(wait_s=1, limit=1)}
    for claim, client in again.values():
        assert (maker if client is other else other).ask(claim, "complete").status == 200
    wait_until(lambda: len(_accesses(tmp_path / "history", "claim_ended")) == 2 * len(ids))
    begun = _accesses(tmp_path / "history", "claimed")
    ends = _accesses(tmp_path / "history", "claim_ended")
    assert begun.keys() == ends.keys()
    for claim in held:
        task, following = claim["task"], again[claim["task"]][0]
        assert ends[task, claim["token"]] <= begun[task, following["token"]], "they would overlap"
    assert {client.url for _, client in again.values()} == {first.url, second.url}


def _accesses(folder: Path, kind: str) -> dict[tuple[str, int], float]:
    """When the records of a kind were written, by task and token, in seconds of the host's clock."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_bytes().splitlines(True)]
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {
        (each["resource"], each["token"]): each["monotonic_time"]
        for each in records
        if each["kind"] == kind and "resource" in each
    }


@pytest.mark.rule("SK-16")
def test_what_is_refused_is_a_problem_document(stage: Stage) -> None:
    served = stage.serve()
    client = Client(served.url)
    for token in (None, "wrong", TOKEN + "x"):
        stranger = Client(served.url, token)
        assert is_problem(stranger.get("/counts"), 401, "unauthorized")["detail"]
        assert stranger.get("/counts").headers["WWW-Authenticate"] == "Bearer"
        assert stranger.send("GET", "/health").status == 200
    is_problem(client.get(f"/tasks/{UNKNOWN}"), 404, "unknown")
    is_problem(client.get(f"/tasks/{UNKNOWN}/log"), 404, "unknown")
    is_problem(client.send("GET", "/v1/queues/wrok/counts"), 404, "unknown")
    is_problem(client.send("GET", "/nothing"), 404, "unknown")
    is_problem(client.send("PUT", "/v1/queues/work/tasks"), 405, "other")
    (place,) = is_problem(client.post("/tasks", {"name": "x", "payload": {}, "prority": 1}), 422, "invalid")[
        "errors"
    ]
    assert place["place"] == "body.prority"
    is_problem(client.post("/tasks", b"{"), 422, "invalid")
    is_problem(client.post("/tasks", b'{"name": "x", "payload": {"value": NaN}}'), 422, "invalid")
    is_problem(client.get("/tasks/xyz"), 422, "invalid")
    large = {"name": "x", "payload": {"value": "x" * MAX_BODY_BYTES}}
    is_problem(client.post("/tasks", large), 413, "too-large")
    missing = {"name": "x", "payload": {}, "after": [UNKNOWN]}
    assert UNKNOWN in is_problem(client.post("/tasks", missing), 404, "unknown")["detail"]
    ahead = is_problem(client.get(f"/tasks/{client.enqueue()}?at_least=1000000000000"), 503, "unusable-store")
    assert "Retry-After" not in ahead
    assert client.send("GET", "/problems/fenced").json["status"] == 409
    is_problem(client.send("GET", "/problems/nothing"), 404, "unknown")


@pytest.mark.rule("SK-16")
def test_a_body_without_a_length_is_stopped_at_the_limit(stage: Stage) -> None:
    host = stage.serve().url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    parts = iter([b'{"name": "'] + [b"x" * 1000] * 20)
    connection.request("POST", "/v1/queues/work/tasks", parts, headers, encode_chunked=True)
    reply = connection.getresponse()
    assert reply.status == 413
    assert json.loads(reply.read())["type"] == "/problems/too-large"
    connection.close()


@pytest.mark.rule("SK-16")
def test_who_asks_too_often_has_to_wait(stage: Stage) -> None:
    client = Client(stage.serve("--rate", "5/minute").url)
    replies = [client.get("/counts") for _ in range(6)]
    assert [each.status for each in replies[:5]] == [200] * 5
    is_problem(replies[5], 429, "too-many")
    assert 0 < int(replies[5].headers["Retry-After"]) <= 60


@pytest.mark.rule("SK-4", "SK-16")
def test_a_server_with_an_outbox_takes_tasks_while_the_store_is_away(stage: Stage, tmp_path: Path) -> None:
    stage.environment["REBALANSER_CONNECT_TIMEOUT_S"] = "1"
    outbox = tmp_path / "outbox"
    client = Client(stage.serve("--outbox", str(outbox)).url)
    task = {"name": "send", "payload": {"value": 1}}
    reply = client.post("/tasks", task)
    assert (reply.status, reply.json["answer"]) == (201, "committed")
    with closing(sqlite3.connect(tmp_path / "tasks.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        spooled = client.post("/tasks", task)
        batch = client.post("/batches", {"tasks": [task, task]})
        other.execute("ROLLBACK")
    assert (spooled.status, spooled.json["answer"]) == (202, "spooled")
    assert (batch.status, batch.json["answers"]) == (202, ["spooled", "spooled"])
    wait_until(lambda: stage.queue.count().get(Status.WAITING) == 4)
    ids = [each.head.id for each in stage.queue.tasks()]
    assert ids == [reply.json["id"], spooled.json["id"], *batch.json["ids"]]
    refused = client.post("/tasks", {**task, "id": ids[0], "priority": 7})
    is_problem(refused, 409, "exists")


@pytest.mark.rule("SK-16")
def test_a_port_in_use_is_said_in_one_line(stage: Stage) -> None:
    port = stage.serve().url.rpartition(":")[2]
    command = [
        sys.executable,
        "-m",
        "rebalanser",
        "tasks",
        "serve",
        "work",
        "--port",
        port,
        "--registry",
        stage.url,
    ]
    ended = subprocess.run(
        command, env=stage.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 3, ended
    assert re.fullmatch(rf"(.*\n)?error: 127.0.0.1:{port} can't be bound: is it in use\?\n", ended.stderr), (
        ended
    )


@pytest.mark.rule("SK-15")
def test_the_worker_command_works_on_a_module_s_queue(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "mail.py").write_text(
        "from rebalanser.tasks import Claim, Queue\n"
        f"tasks = Queue('work', {stage.url!r})\n"
        "@tasks.task()\n"
        "def send(claim: Claim, to: str) -> str:\n"
        "    claim.update(b'1')\n"
        "    return to.upper()\n"
    )
    command = [sys.executable, "-m", "rebalanser", "tasks", "worker", "mail:tasks", "--concurrency", "2"]
    worker = subprocess.Popen(command, cwd=tmp_path, env=stage.environment)
    try:
        enqueue = [sys.executable, "-m", "rebalanser", "tasks", "enqueue", "work", "send", '{"to": "a"}']
        ended = subprocess.run(
            [*enqueue, "--registry", stage.url],
            env=stage.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert stage.queue.wait(ended.stdout.strip(), PATIENCE_S) == "A"
        assert stage.queue.count()[Status.COMPLETED] == 1
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_S) == 0
    finally:
        worker.kill()
        worker.wait()
