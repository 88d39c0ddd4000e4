"""The HTTP application asked in this process, without a socket: what one client sends never harms another."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rebalanser.tasks import Queue

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")

from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.tasks.http.serving import ServingOptions, built

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

    def __init__(self, app: Any) -> None:
        self._app = app

    def send(self, method: str, path: str, body: str = "", headers: Sequence[tuple[str, str]] = ()) -> Reply:
        given = {"host": "127.0.0.1:8642", "content-type": "application/json", **dict(headers)}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
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
                await asyncio.Event().wait()
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
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    with Queue("work", f"memory://{request.node.name}", state_folder=tmp_path) as queue:
        yield queue


def client_of(queue: Queue, **options: Any) -> Client:
    return Client(built(queue, Dispenser(queue.context), ServingOptions(**options)))


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (f'{{"value": {"[" * 250}{"]" * 250}}}', "nested too deeply"),
        (f'{{"value": {"[" * 900}{"]" * 900}}}', "nested too deeply"),
        (f'{{"value": [{HALF_A_PAIR}]}}', "surrogate"),
        (f'{{"value": {{{HALF_A_PAIR}: 1}}}}', "surrogate"),
        ('{"value": 1e999}', "a number that JSON has no word for"),
        ('{"base64": "!!!!"}', "no base64"),
        ('{"base64": "abc"}', "no base64"),
        ('{"base64": "\\u00e9aaa"}', "no base64"),
        ('{"base64": 1}', "no base64"),
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
    assert queue.count() == {}


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
