"""The HTTP application and its connections, in this process: what one client does never harms another."""

from __future__ import annotations

import asyncio
import base64
import json
import resource
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rebalanser.errors import RegistryUnavailable
from rebalanser.tasks import Claim, Queue, Status
from rebalanser.tasks.functions import EnqueueOptions
from rebalanser.testing import FakeClock

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")

import anyio.to_thread
import uvicorn
from fastapi.exceptions import RequestValidationError

from rebalanser.core.tasks import dispensing
from rebalanser.tasks.http import problems, serving
from rebalanser.tasks.http.dispenser import Dispenser, LongPoll
from rebalanser.tasks.http.serving import (
    BODY_S,
    HEAD_S,
    READ_S,
    Connections,
    HttpConnection,
    ServingOptions,
    build_application,
)
from rebalanser.testing.waiting import wait_until

HALF_A_PAIR = '"\\ud800"'
TASKS = "/v1/queues/work/tasks"


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Sends requests to an application as a server does."""

    def __init__(self, app: Any, hang_up: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        self._app = app
        self._hang_up = hang_up or (lambda: asyncio.Event().wait())

    def send(self, method: str, path: str, body: str = "", headers: Sequence[tuple[str, str]] = ()) -> Reply:
        path, _, query = path.partition("?")
        given = {"host": "127.0.0.1:8642", "content-type": "application/json", **dict(headers)}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1234), "server": ("127.0.0.1", 8642),
        }  # fmt: skip
        return asyncio.run(self._asked(scope, body.encode()))

    async def _asked(self, scope: dict[str, Any], body: bytes) -> Reply:
        reply = Reply()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await self._hang_up()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message.get("body", b"")

        await self._app(scope, receive, send)
        return reply


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue("work", f"memory://{uuid.uuid4().hex}", state_folder=tmp_path) as queue:
        yield queue


JSON = "application/json"


def client_of(queue: Queue, **options: Any) -> Client:
    return Client(build_application(queue, Dispenser(queue.context), ServingOptions(**options)))


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (f'{{"value": {"[" * 250}{"]" * 250}}}', "nested too deeply"),
        (f'{{"value": {"[" * 900}{"]" * 900}}}', "nested too deeply"),
        (f'{{"value": [{HALF_A_PAIR}]}}', "surrogate"),
        (f'{{"value": {{{HALF_A_PAIR}: 1}}}}', "surrogate"),
        ('{"value": 1e999}', "a number that JSON can't represent"),
        ('{"base64": "!!!!"}', "not base64"),
        ('{"base64": "abc"}', "not base64"),
        ('{"base64": "\\u00e9aaa"}', "not base64"),
        ('{"base64": 1}', "not base64"),
        ('{"value": 1, "base64": "MQ=="}', "not both"),
    ],
    ids=[
        *("deep", "deeper", "half-a-pair", "half-a-name", "infinite"),
        *("exclamation", "no-padding", "no-ascii", "no-text", "both"),
    ],
)
def test_content_that_is_not_what_it_says_is_refused(queue: Queue, payload: str, reason: str) -> None:
    reply = client_of(queue).send("POST", TASKS, f'{{"name": "send", "payload": {payload}}}')
    assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")
    assert reason in reply.json["detail"]
    assert not any(queue.count().values())


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize("body", ["{", "[" * 100_000, "1" * 5000, "", "null"])
def test_a_body_that_cannot_be_parsed_is_refused(queue: Queue, body: str) -> None:
    reply = client_of(queue).send("POST", TASKS, body)
    assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    "fields",
    [
        {"after": ["x"] * 30_000},
        {"payload": {f"unknown-{number}": 1 for number in range(30_000)}},
        {f"unknown-{number}": 1 for number in range(30_000)},
        {"x" * 100_000: 1},
    ],
    ids=["after", "payload", "task", "long"],
)
def test_a_request_with_many_faults_is_refused_as_soon_as_one_with_few(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    found: list[int] = []
    errors = RequestValidationError.errors

    def counted(self: RequestValidationError) -> Sequence[Any]:
        found.append(len(errors(self)))
        return errors(self)

    monkeypatch.setattr(RequestValidationError, "errors", counted)
    task = {"name": "send", "payload": {"value": 1}, **fields}
    reply = client_of(queue).send("POST", TASKS, json.dumps(task))
    assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")
    assert found == [1]
    assert len(reply.body) < 1000


@pytest.mark.rule("SK-16", "SK-23")
def test_two_limits_are_refused_in_our_words(queue: Queue) -> None:
    limits = {"key": "a", "max_running": 1, "max_running_per_key": 1}
    body = json.dumps({"name": "send", "payload": {"value": 1}, **limits})
    reply = client_of(queue).send("POST", TASKS, body)
    assert reply.status == 422
    assert (
        reply.json["detail"]
        == "give max_running or max_running_per_key, not both: limits count by function or by key"
    )


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("body", "kind", "place", "told"),
    [
        ('{"name": "send"}', "text/plain", "body", "with the header Content-Type: application/json"),
        ("[]", JSON, "body", "send a JSON object"),
        (
            '{"name": "send", "payload": {"to": "a"}}',
            JSON,
            "body.payload.to",
            '"payload" is {"value": JSON} or',
        ),
        ('{"name": "send", "payload": {}, "nmae": 1}', JSON, "body.nmae", "no such field"),
        ('{"name": "send", "payload": {}, "id": "x"}', JSON, "body.id", "a task id is 40 hex"),
    ],
)
def test_a_problem_says_what_to_send_instead(
    queue: Queue, body: str, kind: str, place: str, told: str
) -> None:
    reply = client_of(queue).send("POST", TASKS, body, [("content-type", kind)])
    assert (reply.status, reply.json["title"]) == (422, "The request is invalid.")
    (error,) = reply.json["errors"]
    assert error["place"] == place
    assert told in error["message"]
    assert "Value error" not in error["message"]
    assert reply.json["detail"] == f"{place}: {error['message']}"


@pytest.mark.rule("SK-16")
def test_what_a_path_would_ignore_is_refused(queue: Queue) -> None:
    """`{"count": 2}` got one id, and of two names one was listed."""
    client = client_of(queue)
    reply = client.send("POST", "/v1/queues/work/ids", '{"count": 2}')
    assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")
    assert reply.json["detail"] == "body.count: this path takes no body; its parameters: count"
    for nothing in ("{}", "null", "", "no JSON"):
        assert client.send("POST", "/v1/queues/work/ids", nothing).status == 201
    reply = client.send("GET", f"{TASKS}?name=a&name=b&name=c&status=dead&status=waiting")
    assert (reply.status, reply.json["detail"]) == (422, "query.name: it is given 3 times: give it once")


@pytest.mark.rule("SK-16")
@pytest.mark.rule("SK-19")
def test_a_parameter_that_a_path_does_not_have_is_refused_by_its_name(queue: Queue) -> None:
    """A list of all tasks was the answer to a misspelt choice of some."""
    client = client_of(queue)
    reply = client.send("GET", f"{TASKS}?states=dead&limit=5&colour=red")
    assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")
    assert [each["place"] for each in reply.json["errors"]] == ["query.states", "query.colour"]
    known = "status, after, limit, at_least, name, older_than_s, newest"
    assert f"query.states: there is no such parameter; there are: {known};" in reply.json["detail"]
    reply = client.send("POST", f"{TASKS}?dry_run=1", '{"name": "send", "payload": {}}')
    assert (reply.status, any(queue.count().values())) == (422, False)
    assert reply.json["detail"] == "query.dry_run: there is no such parameter; this path takes none"
    assert client.send("GET", f"{TASKS}?status=dead&status=waiting&limit=5&newest=true").status == 200
    assert client.send("POST", "/v1/queues/work/ids?count=2").status == 201
    assert client.send("GET", "/health?at=12").status == 200, (
        "whoever asks for it may add what keeps caches off"
    )


def test_a_problem_is_told_in_few_words(queue: Queue) -> None:
    tasks = [{"name": "", "payload": {}, f"unknown-{number}": 1} for number in range(1000)]
    reply = client_of(queue).send("POST", "/v1/queues/work/batches", json.dumps({"tasks": tasks}))
    assert reply.status == 422
    assert [each["place"] for each in reply.json["errors"][:2]] == [
        "body.tasks.0.name", "body.tasks.0.unknown-0",
    ]  # fmt: skip
    assert len(reply.json["errors"]) == problems.MAX_PLACES
    assert len(reply.json["detail"]) <= problems.MAX_DETAIL
    long = json.loads(bytes(problems.document(problems.INVALID, "a word " * 10_000).body))
    assert len(long["detail"]) == problems.MAX_DETAIL


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        ({"value": {"a": ["é", None, 1.5]}}, '{"a":["é",null,1.5]}'.encode()),
        ({"base64": base64.encodebytes(b"\xff" * 100).decode()}, b"\xff" * 100),
        ({"base64": ""}, b""),
        ({}, b"null"),
    ],
    ids=["value", "base64-in-lines", "no-bytes", "nothing"],
)
def test_content_is_stored_as_given(queue: Queue, payload: dict[str, Any], stored: bytes) -> None:
    reply = client_of(queue).send("POST", TASKS, json.dumps({"name": "send", "payload": payload}))
    assert reply.status == 201
    assert queue.payload(reply.json["id"]) == stored


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """As much of an event loop as a connection uses; its time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self._timers.append(Timer(self.now + delay, callback))
        return self._timers[-1]

    def create_task(self, coroutine: Coroutine[Any, Any, None], **_: Any) -> Any:
        coroutine.close()  # a test answers by itself
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: Any) -> None:
        raise AssertionError(context)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and carry out what is due."""
        self.now += seconds
        due = [each for each in self._timers if each.at <= self.now and not each.is_cancelled]
        self._timers = [each for each in self._timers if each.at > self.now]
        for each in due:
            each.callback()


class Transport:
    """A client's socket."""

    def __init__(self) -> None:
        self.is_ended = False
        self.unread = 0

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.is_ended

    def abort(self) -> None:
        self.is_ended = True

    close = abort

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Server:
    """Connections of one server, on a loop of the tests' own."""

    def __init__(self, limit: int = 100) -> None:
        self.loop = Loop()
        self.state = Connections(limit)
        self._config = uvicorn.Config(
            self._app,
            http=HttpConnection,
            ws="none",
            log_config=None,
            lifespan="off",
            timeout_keep_alive=1000,
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None: ...

    def connect(self, sent: bytes = b"") -> HttpConnection:
        connection = HttpConnection(self._config, self.state, {}, self.loop)  # type: ignore[arg-type]
        connection.connection_made(Transport())  # type: ignore[arg-type]
        if sent:
            connection.data_received(sent)
        return connection

    def answer(self, connection: HttpConnection) -> None:
        for message in ({"type": "http.response.start", "status": 204}, {"type": "http.response.body"}):
            asyncio.run(connection.cycle.send(message))  # type: ignore[arg-type]

    def ended(self, *connections: HttpConnection) -> list[bool]:
        """Which of them were ended; these are then told that they are lost."""
        ended = [each.transport.is_closing() for each in connections]
        for each, is_ended in zip(connections, ended, strict=True):
            if is_ended:
                each.connection_lost(None)
        return ended


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n"
REQUEST = HEAD + b"0123456789"


@pytest.mark.rule("SK-16")
def test_a_request_must_come_whole_in_time() -> None:
    server = Server()
    silent, started, trickling = server.connect(), server.connect(HEAD[:-1]), server.connect(b"P")
    without_body, whole = server.connect(HEAD), server.connect(REQUEST)
    server.loop.pass_s(HEAD_S - 1)
    trickling.data_received(b"O")
    without_body.data_received(b"0")
    all_of_them = (silent, started, trickling, without_body, whole)
    assert server.ended(*all_of_them) == [False] * 5
    server.loop.pass_s(1)
    assert server.ended(*all_of_them) == [True, True, True, False, False]
    server.loop.pass_s(BODY_S - HEAD_S)
    assert server.ended(without_body, whole) == [True, False]
    server.loop.pass_s(10_000)
    assert server.ended(whole) == [False], "it waits for the server"
    assert server.state.connections == {whole}
    assert server.state.owing == {}


@pytest.mark.rule("SK-16")
def test_time_counts_anew_with_each_request() -> None:
    server = Server()
    connection = server.connect()
    for _ in range(3):
        server.loop.pass_s(HEAD_S - 1)
        connection.data_received(HEAD)
        server.loop.pass_s(BODY_S - 1)
        connection.data_received(b"0123456789")
        server.loop.pass_s(1000)
        server.answer(connection)
    assert server.ended(connection) == [False]
    server.loop.pass_s(HEAD_S)
    assert server.ended(connection) == [True]


@pytest.mark.rule("SK-16")
def test_who_reads_nothing_of_an_answer_is_cut_off() -> None:
    server = Server()
    connection = server.connect(REQUEST)
    transport: Any = connection.transport
    transport.unread = 300
    connection.pause_writing()
    for transport.unread in (200, 100):
        server.loop.pass_s(READ_S)
        assert server.ended(connection) == [False], "it reads, if slowly"
    connection.resume_writing()
    server.loop.pass_s(1000)
    connection.pause_writing()
    server.loop.pass_s(READ_S)
    assert server.ended(connection) == [False]
    server.loop.pass_s(READ_S)
    assert server.ended(connection) == [True]


@pytest.mark.rule("SK-16")
def test_an_answer_that_is_still_read_is_not_cut_off_by_the_next_request_s_time() -> None:
    server = Server()
    connection = server.connect(REQUEST)
    transport: Any = connection.transport
    transport.unread = 300
    server.answer(connection)
    server.loop.pass_s(HEAD_S)
    assert server.ended(connection) == [False]
    transport.unread = 0
    server.loop.pass_s(HEAD_S)
    assert server.ended(connection) == [True]


@pytest.mark.rule("SK-16")
def test_who_hangs_up_is_forgotten() -> None:
    server = Server(limit=1)
    server.connect(HEAD).connection_lost(None)
    assert (server.state.connections, server.state.owing) == (set(), {})
    assert server.ended(server.connect()) == [False]


@pytest.mark.rule("SK-16")
def test_who_sends_half_a_request_gives_way() -> None:
    server = Server(limit=4)
    worked_on = server.connect(REQUEST)
    upload, answered, half = server.connect(HEAD), server.connect(REQUEST), server.connect(HEAD[:9])
    server.answer(answered)
    assert server.ended(worked_on, upload, answered, half) == [False] * 4
    new = [server.connect(REQUEST)]
    assert server.ended(worked_on, upload, answered, half) == [False, False, False, True], "the longest first"
    new.append(server.connect(REQUEST))
    assert server.ended(worked_on, upload, answered) == [False, False, True]
    new.append(server.connect(REQUEST))
    assert server.ended(worked_on, upload) == [False, True], "a body that does not come gives way too"
    last = server.connect()
    assert server.ended(worked_on, *new, last) == [False, False, False, False, True], "all are worked on"
    assert len(server.state.connections) == 4


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (256, 256, None, 128),
        (256, 1024, (1024, 1024), 512),
        (1024, 1 << 20, (8192, 1 << 20), 4096),
        (1024, resource.RLIM_INFINITY, (8192, resource.RLIM_INFINITY), 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 4096),
        (1 << 20, 1 << 20, None, 4096),
        (2, 2, None, 4),
    ],
)
def test_connections_leave_files_to_the_store(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None, connections: int
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _what, limit: limits.append(limit))
    assert serving.max_connections() == connections
    assert limits == ([] if raised is None else [raised])


COUNTS = "/v1/queues/work/counts"
CHEAP_WORD = "0123456789abcdef"


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("host", "127.0.0.1:8642", 200),
        ("host", "localhost", 200),
        ("host", "LOCALHOST:80", 200),
        ("host", "[::1]:8642", 200),
        ("host", "127.9.9.9", 200),
        ("host", "evil.example:8642", 403),
        ("host", "127.0.0.1.evil.example", 403),
        ("host", "localhost@evil.example", 403),
        ("host", "[::1", 403),
        ("host", "", 403),
        ("origin", "http://localhost:3000", 200),
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403),
    ],
)
def test_pages_of_other_hosts_reach_no_server_without_a_token(
    queue: Queue, name: str, value: str, status: int
) -> None:
    client = client_of(queue)
    reply = client.send("GET", COUNTS, headers=[(name, value)])
    assert reply.status == status
    if status == 403:
        assert reply.json["type"] == "/problems/foreign-host"
        assert value in reply.json["detail"]
    assert client.send("GET", "/health", headers=[(name, value)]).status == 200
    guarded = client_of(queue, token=CHEAP_WORD)
    assert (
        guarded.send("GET", COUNTS, headers=[(name, value), ("authorization", f"Bearer {CHEAP_WORD}")]).status
        == 200
    ), "a page does not know the token"


@pytest.mark.rule("SK-16")
def test_who_has_the_wrong_token_is_told_how_to_send_it(queue: Queue) -> None:
    reply = client_of(queue, token=CHEAP_WORD).send("GET", COUNTS)
    assert reply.status == 401
    assert reply.json["detail"] == "send the header Authorization with the word Bearer, a space and the token"


@pytest.mark.rule("SK-16")
def test_a_rate_is_not_got_round_by_a_header(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "max_connections", lambda: 100)
    config = serving.QueueServer(queue, ServingOptions(rate="3/hour"), lambda _url: None)._config
    config.load()
    client = Client(config.loaded_app)
    forwarded = [[("x-forwarded-for", f"10.0.0.{number}")] for number in range(5)]
    replies = [client.send("GET", COUNTS, headers=each) for each in forwarded]
    assert [each.status for each in replies] == [200, 200, 200, 429, 429]
    assert "127.0.0.1" in replies[-1].json["detail"]
    assert client.send("GET", "/health").status == 200, "who watches the server is no load"


def ids_of(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    return [json.loads(line)["id"] for line in reply.body.splitlines()]


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[tuple[Queue, FakeClock]]:
    clock = FakeClock()
    with Queue("work", "memory://", clock=clock, state_folder=tmp_path) as queue:
        yield queue, clock


@pytest.mark.rule("SK-12", "SK-16")
def test_tasks_are_listed_by_name_and_age_and_the_newest_first(clocked: tuple[Queue, FakeClock]) -> None:
    queue, clock = clocked
    made: list[str] = []
    for number in range(7):
        name = "send" if number % 2 else "count"
        made += queue.commit([queue.build_raw_enqueue(name, b"{}", EnqueueOptions())])
        clock.advance(100.0)
    client = client_of(queue)
    assert ids_of(client.send("GET", f"{TASKS}?name=send")) == made[1::2]
    assert ids_of(client.send("GET", f"{TASKS}?name=send&limit=2")) == made[1:5:2]
    assert ids_of(client.send("GET", f"{TASKS}?older_than_s=450")) == made[:3]
    assert ids_of(client.send("GET", f"{TASKS}?name=count&older_than_s=450&after={made[0]}")) == made[2:3]
    assert ids_of(client.send("GET", f"{TASKS}?newest=true&limit=3")) == made[:3:-1]
    assert ids_of(client.send("GET", f"{TASKS}?newest=true&name=count&older_than_s=250")) == made[4::-2]
    assert ids_of(client.send("GET", f"{TASKS}?newest=true&status=dead")) == []
    for wrong in (f"newest=true&after={made[0]}", "newest=true&limit=1001", "older_than_s=-1", "name="):
        reply = client.send("GET", f"{TASKS}?{wrong}")
        assert (reply.status, reply.json["type"]) == (422, "/problems/invalid"), wrong


@pytest.mark.rule("SK-14", "SK-15", "SK-16")
def test_many_are_cancelled_requeued_and_deleted_after_they_were_counted(
    clocked: tuple[Queue, FakeClock],
) -> None:
    queue, clock = clocked
    client = client_of(queue)

    def ask(verb: str, **selected: Any) -> tuple[int, int]:
        reply = client.send("POST", f"/v1/queues/work/{verb}", json.dumps(selected))
        assert reply.status == 200, reply.body
        assert reply.json["queue"] == "work"
        return reply.json["matched"], reply.json["changed"]

    def counted(status: Status) -> int:
        return queue.count().get(status, 0)

    queue.commit([queue.build_raw_enqueue("send", b"{}", EnqueueOptions()) for _ in range(1200)])
    clock.advance(100.0)
    (other,) = queue.commit([queue.build_raw_enqueue("count", b"{}", EnqueueOptions())])
    (after,) = queue.commit([queue.build_raw_enqueue("count", b"{}", EnqueueOptions(after=(other,)))])
    assert ask("cancel", name="send", dry_run=True) == (1200, 0)
    assert counted(Status.WAITING) == 1202
    assert ask("cancel", name="send", older_than_s=101) == (0, 0)
    assert ask("cancel", name="send", older_than_s=99) == (1200, 1200)
    assert ask("cancel", name="send") == (0, 0)
    assert (counted(Status.WAITING), counted(Status.CANCELLED)) == (2, 1200)
    assert ask("requeue", older_than_s=0) == (0, 0)
    assert ask("requeue", status=["cancelled"], dry_run=True) == (1200, 0)
    assert ask("requeue", status=["cancelled"]) == (1200, 1200)
    assert ask("cancel", older_than_s=50) == (1200, 1200)
    queue.cancel(other)
    assert ask("delete", name="count", dry_run=True) == (1, 0)
    assert ask("delete", older_than_s=0) == (1201, 1200)  # `after` is open and waits for `other`
    assert sorted(each.head.id for each in queue.tasks()) == [other, after]
    queue.cancel(after)
    assert ask("delete", status=["cancelled"]) == (2, 2)
    for verb, wrong in (
        ("cancel", {}),
        ("cancel", {"dry_run": True}),
        ("requeue", {"status": []}),
        ("delete", {"status": ["cancelled", "waiting"]}),
        ("delete", {"older_than": 5}),
    ):
        reply = client.send("POST", f"/v1/queues/work/{verb}", json.dumps(wrong))
        assert (reply.status, reply.json["type"]) == (422, "/problems/invalid"), wrong


@pytest.mark.rule("SK-15", "SK-16")
def test_health_tells_what_fails_until_it_works_again(queue: Queue) -> None:
    client = client_of(queue)
    queue.errors.failed("outbox", RegistryUnavailable("away"))
    queue.errors.failed("claims", KeyError("a bug"))
    assert client.send("GET", "/health").json["troubles"] == ["claims: bug", "outbox: outage"]
    queue.errors.worked("claims")
    queue.errors.worked("outbox")
    assert client.send("GET", "/health").json["troubles"] == []


@pytest.mark.rule("SK-16")
def test_a_queue_and_its_schedules_are_paused_and_resumed(queue: Queue) -> None:
    dispenser = Dispenser(queue.context)
    client = Client(build_application(queue, dispenser, ServingOptions()))
    dispenser.start(queue.start_claim_source(dispenser.wake))
    base = "/v1/queues/work"
    try:
        assert client.send("GET", f"{base}/pauses").json == {"queue": None, "schedules": {}}
        paused = client.send("POST", f"{base}/pause", '{"reason": "no mail", "by": "ann"}').json
        assert (paused["by"], paused["reason"], paused["ended"]) == ("ann", "no mail", None)
        nightly = client.send("POST", f"{base}/schedules/nightly/pause", "{}").json
        assert (nightly["by"], nightly["reason"]) == (queue._label, "")
        present = {"queue": paused, "schedules": {"nightly": nightly}}
        assert client.send("GET", f"{base}/pauses").json == present
        wait_until(lambda: client.send("GET", "/health").json["paused_since"] == paused["since"])
        assert client.send("POST", f"{base}/claims", '{"worker": "w"}').json == {"claims": []}
        assert client.send("POST", f"{base}/resume").json["pause"]["since"] == paused["since"]
        assert client.send("POST", f"{base}/resume").json == {"pause": None}
        assert client.send("POST", f"{base}/schedules/nightly/resume").json["pause"]["ended"] is not None
        wait_until(lambda: client.send("GET", "/health").json["paused_since"] is None)
        assert client.send("GET", f"{base}/pauses").json == {"queue": None, "schedules": {}}
        misspelt = client.send("POST", f"{base}/schedules/nigthly/resume")
        assert (misspelt.status, "did you mean nightly?" in misspelt.json["detail"]) == (422, True)
        too_long = json.dumps({"reason": "x" * 1001})
        assert client.send("POST", f"{base}/pause", too_long).status == 422
        assert client.send("POST", f"{base}/pause", '{"why": "x"}').status == 422
    finally:
        dispenser.stop()


@pytest.mark.rule("SK-16")
def test_metrics_tell_what_clients_enqueue_claim_and_end(queue: Queue) -> None:
    """Each once, also where a client sends a completion again."""
    dispenser = Dispenser(queue.context)
    dispenser.start(queue.start_claim_source(dispenser.wake))
    try:
        client = Client(build_application(queue, dispenser, ServingOptions()))
        for _ in range(2):
            assert client.send("POST", TASKS, '{"name": "send", "payload": {}}').status == 201
        ends = (("complete", {}), ("complete", {}), ("fail", {"error": "no", "give_up": True}))
        ask = '{"worker": "me", "limit": 1, "wait_s": 60}'
        for ending, (end, more) in enumerate(ends):
            if ending != 1:
                (claim,) = client.send("POST", "/v1/queues/work/claims", ask).json["claims"]
            path = f"{TASKS}/{claim['task']}/claims/{claim['number']}/{end}"
            assert client.send("POST", path, json.dumps({"holder": claim["holder"], **more})).status == 200
        reply = client.send("GET", "/metrics")
    finally:
        dispenser.stop()
        queue.stop()
    assert reply.headers["content-type"].startswith("text/plain")
    lines = reply.body.decode().splitlines()
    assert 'rebalanser_tasks_enqueued_total{name="send",queue="work"} 2.0' in lines
    assert 'rebalanser_tasks_started_total{name="send",queue="work"} 2.0' in lines
    ended = 'rebalanser_tasks_ended_total{name="send",outcome="%s",queue="work"} 1.0'
    assert {ended % "completed", ended % "dead"} <= set(lines)
    assert 'rebalanser_tasks_oldest_ready_seconds{queue="work"} 0.0' in lines


@pytest.mark.rule("SK-16", "SK-20")
def test_a_claim_for_a_client_that_hangs_up_as_it_is_made_is_given_back(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the claim a little sooner than it notices that the connection has ended."""
    monkeypatch.setattr("rebalanser.tasks.http.routes.TURNS", 1000)
    asked: list[LongPoll] = []

    class Noting(Dispenser):
        def request(self, *arguments: Any) -> LongPoll:
            asked.append(super().request(*arguments))
            return asked[-1]

    async def hang_up() -> None:
        await asyncio.wrap_future(asked[0].future)
        await asyncio.sleep(0)

    dispenser = Noting(queue.context)
    dispenser.start(queue.start_claim_source(dispenser.wake))
    try:
        client = Client(build_application(queue, dispenser, ServingOptions()), hang_up)
        task = client.send("POST", TASKS, '{"name": "send", "payload": {}}').json["id"]
        assert claims_of(client) == []
        assert len(asked[0].future.result()) == 1
        wait_until(lambda: queue.get(task).state.status is Status.WAITING)
    finally:
        dispenser.stop()
        queue.stop()


@pytest.fixture
def lent(queue: Queue) -> Iterator[Client]:
    """A client of a server that hands out claims."""
    dispenser = Dispenser(queue.context)
    dispenser.start(queue.start_claim_source(dispenser.wake))
    yield Client(build_application(queue, dispenser, ServingOptions()))
    dispenser.stop()
    queue.stop()


CLAIMS = "/v1/queues/work/claims"
BATCHES = "/v1/queues/work/batches"


def claims_of(client: Client, limit: int = 1) -> list[dict[str, Any]]:
    ask = json.dumps({"worker": "me", "limit": limit, "wait_s": 60})
    claims: list[dict[str, Any]] = client.send("POST", CLAIMS, ask).json["claims"]
    return claims


def complete(client: Client, claim: dict[str, Any], result: dict[str, Any] | None) -> None:
    path = f"{TASKS}/{claim['task']}/claims/{claim['number']}/complete"
    body = json.dumps({"holder": claim["holder"], "result": result})
    assert client.send("POST", path, body).status == 200


@pytest.mark.rule("SK-10", "SK-19")
def test_a_result_of_a_wrong_type_is_refused_by_a_server_that_has_the_function(
    queue: Queue, lent: Client
) -> None:
    @queue.task
    def count(claim: Claim) -> int: ...

    lent.send("POST", TASKS, '{"name": "count", "payload": {}}')
    lent.send("POST", TASKS, '{"name": "elsewhere", "payload": {}}')
    claims = {queue.get(each["task"]).head.name: each for each in claims_of(lent, 2)}
    claim = claims["count"]
    path = f"{TASKS}/{claim['task']}/claims/{claim['number']}/complete"
    reply = lent.send("POST", path, json.dumps({"holder": claim["holder"], "result": {"value": "x"}}))
    assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")
    assert reply.json["detail"].startswith("count: the result does not fit its type: ")
    complete(lent, claim, {"value": 5})
    complete(lent, claims["elsewhere"], {"value": "x"})
    assert queue.wait(claim["task"]) == 5


@pytest.mark.rule("SK-16", "SK-19")
def test_what_is_too_large_is_written_with_nothing_of_others(
    queue: Queue, lent: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the store would refuse all that is written together, again and again as the client wishes."""
    lent.send("POST", TASKS, '{"name": "count", "payload": {}}')
    (claim,) = claims_of(lent)
    engine, written = queue.context.engine, list[object]()
    apply = engine.apply

    def noted(writes: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        written.extend(writes)
        return apply(writes, timeout_s)

    monkeypatch.setattr(engine, "apply", noted)
    large = {"value": "x" * queue.context.max_bytes}
    for verb, content in (("complete", {"result": large}), ("update", {"sequence": 0, "content": large})):
        path = f"{TASKS}/{claim['task']}/claims/{claim['number']}/{verb}"
        reply = lent.send("POST", path, json.dumps({"holder": claim["holder"], **content}))
        assert (reply.status, reply.json["type"]) == (413, "/problems/too-large")
    assert written == []
    complete(lent, claim, {"value": 1})
    assert len(written) == 1


@pytest.mark.rule("SK-5", "SK-16")
def test_a_claim_has_the_results_that_its_task_gets(queue: Queue, lent: Client) -> None:
    ids = [lent.send("POST", "/v1/queues/work/ids").json["ids"][0] for _ in range(3)]
    tasks = [
        *({"id": task, "name": "count", "payload": {"value": {}}} for task in ids[:2]),
        {
            "id": ids[2], "name": "total", "payload": {"value": {"unit": "kg"}},
            "results": {"parts": ids[:2], "first": ids[0]},
        },
    ]  # fmt: skip
    body = json.dumps({"together": True, "tasks": tasks})
    assert [lent.send("POST", BATCHES, body).status for _ in range(2)] == [201, 201]
    assert sum(queue.count().values()) == 3
    shown = lent.send("GET", f"{TASKS}/{ids[2]}").json
    assert shown["after"] == ids[:2]
    assert shown["payload"]["value"] == {"unit": "kg"}
    assert shown["results"] == {"parts": ids[:2], "first": ids[0]}
    first, second = claims_of(lent), claims_of(lent)
    for number, (claim,) in enumerate((first, second)):
        complete(lent, claim, {"value": [number]})
    (claim,) = claims_of(lent)
    results = {first[0]["task"]: [0], second[0]["task"]: [1]}
    assert claim["payload"]["value"] == {
        "unit": "kg", "parts": [results[task] for task in ids[:2]], "first": results[ids[0]],
    }  # fmt: skip


@pytest.mark.rule("SK-5", "SK-16")
def test_tasks_over_http_are_enqueued_all_or_none(queue: Queue) -> None:
    client, unknown = client_of(queue), queue.new_id()
    task = {"name": "count", "payload": {"value": {}}}
    last = {**task, "results": {"parts": [unknown]}}
    reply = client.send("POST", BATCHES, json.dumps({"together": True, "tasks": [task, last]}))
    assert (reply.status, reply.json["type"]) == (404, "/problems/unknown")
    assert reply.json["detail"].startswith("body.tasks.1: task ")
    for wrong, reason in (
        ({**last, "payload": {"value": [1]}}, "must be a JSON object"),
        ({**last, "payload": {"value": {"parts": 1}}}, "is to get a result: parts"),
        ({**task, "results": {"parts": "x"}}, "40 hexadecimal digits"),
        ({**task, "results": {"parts": ["x"] * 30_000}}, "the maximum is 1000"),
    ):
        reply = client.send("POST", BATCHES, json.dumps({"together": True, "tasks": [task, wrong]}))
        assert (reply.status, reply.json["type"]) == (422, "/problems/invalid")
        assert reason in reply.json["detail"]
        assert reply.json["detail"].startswith("body.tasks.1")
    reply = client.send("POST", BATCHES, json.dumps({"together": True, "tasks": [task] * 101}))
    assert (reply.status, reply.json["detail"][:18]) == (422, "more than 100 task")
    assert not any(queue.count().values())


@pytest.mark.rule("SK-5", "SK-16")
def test_a_task_whose_result_is_no_json_is_dead_and_others_are_handed_out(queue: Queue, lent: Client) -> None:
    first = lent.send("POST", TASKS, '{"name": "count", "payload": {}}').json["id"]
    task = {"name": "total", "payload": {"value": {}}, "results": {"part": first}}
    last = lent.send("POST", TASKS, json.dumps(task)).json["id"]
    (claim,) = claims_of(lent)
    complete(lent, claim, {"base64": "/w=="})
    other = lent.send("POST", TASKS, '{"name": "count", "payload": {}}').json["id"]
    assert [each["task"] for each in claims_of(lent)] == [other]
    wait_until(lambda: queue.get(last).state.status is Status.DEAD)
    state = queue.get(last).state
    assert (state.status, state.failures) == (Status.DEAD, 1)
    assert f"the result of task {first} (count) is not JSON" in state.error


@pytest.mark.rule("SK-5", "SK-16")
def test_claims_whose_results_are_too_much_for_one_answer_come_in_another(
    queue: Queue, lent: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispensing, "MAX_RESULTS_BYTES", 50)
    first = lent.send("POST", TASKS, '{"name": "count", "payload": {}}').json["id"]
    (claim,) = claims_of(lent)
    complete(lent, claim, {"value": "x" * 1000})
    task = {"name": "total", "payload": {"value": {}}, "results": {"part": first}}
    body = json.dumps({"together": True, "tasks": [task, task]})
    ids = lent.send("POST", BATCHES, body).json["ids"]
    found = [claims_of(lent, limit=2), claims_of(lent, limit=2)]
    assert [len(each) for each in found] == [1, 1]
    assert {each["task"] for (each,) in found} == set(ids)
    assert [each["failures"] for (each,) in found] == [0, 0]


@pytest.mark.rule("SK-16")
def test_health_and_claims_need_no_thread(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads may wait for the store at the same time."""
    monkeypatch.setattr(anyio.to_thread, "run_sync", None)
    client = client_of(queue)
    assert client.send("GET", "/health").json["queue"] == "work"
    assert client.send("GET", "/problems/full").json["status"] == 507
    assert client.send("GET", "/openapi.json").status == 200
    assert client.send("POST", "/v1/queues/wrok/claims", '{"worker": "a"}').status == 404


@pytest.mark.rule("SK-16")
def test_an_answer_is_sent_at_once() -> None:
    config = uvicorn.Config(lambda: None, host="127.0.0.1", port=0, log_config=None)
    with closing(serving._bound(config)) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), closing(bound.accept()[0]) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
