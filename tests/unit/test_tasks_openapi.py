"""The OpenAPI document of the HTTP interface: what a client in another language is generated from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from rebalanser.errors import QuotaExceeded
from rebalanser.tasks import Queue

pytest.importorskip("fastapi", reason="the HTTP interface needs the extra web")

CLAIM = "/v1/queues/{queue}/tasks/{task}/claims/{number}"
OPERATIONS = {
    ("post", "/v1/queues/{queue}/ids"),
    ("post", "/v1/queues/{queue}/tasks"),
    ("get", "/v1/queues/{queue}/tasks"),
    ("post", "/v1/queues/{queue}/batches"),
    ("get", "/v1/queues/{queue}/tasks/{task}"),
    ("get", "/v1/queues/{queue}/tasks/{task}/log"),
    ("get", "/v1/queues/{queue}/counts"),
    ("post", "/v1/queues/{queue}/tasks/{task}/cancel"),
    ("post", "/v1/queues/{queue}/tasks/{task}/requeue"),
    ("post", "/v1/queues/{queue}/cancel"),
    ("post", "/v1/queues/{queue}/requeue"),
    ("post", "/v1/queues/{queue}/delete"),
    ("get", "/v1/queues/{queue}/pauses"),
    ("post", "/v1/queues/{queue}/pause"),
    ("post", "/v1/queues/{queue}/resume"),
    ("post", "/v1/queues/{queue}/schedules/{name}/pause"),
    ("post", "/v1/queues/{queue}/schedules/{name}/resume"),
    ("post", "/v1/queues/{queue}/claims"),
    ("post", f"{CLAIM}/renew"),
    ("post", f"{CLAIM}/update"),
    ("post", f"{CLAIM}/complete"),
    ("post", f"{CLAIM}/fail"),
    ("post", f"{CLAIM}/release"),
    ("get", "/health"),
    ("get", "/problems/{name}"),
}


@pytest.fixture
def document(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    from rebalanser.tasks.http.dispenser import Dispenser
    from rebalanser.tasks.http.serving import ServingOptions, build_application

    with Queue("work", f"memory://{request.node.nodeid}", state_folder=tmp_path) as queue:
        yield build_application(
            queue, Dispenser(queue.context), ServingOptions(token="0123456789abcdef")
        ).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


@pytest.mark.rule("SK-16")
def test_every_route_is_described(document: dict[str, Any]) -> None:
    found = {(method, path): operation for method, path, operation in operations(document)}
    assert set(found) == OPERATIONS
    assert [where for where, operation in found.items() if not operation.get("description")] == []
    names = [operation["operationId"] for operation in found.values()]
    assert len(set(names)) == len(names)


@pytest.mark.rule("SK-16")
def test_every_body_and_answer_is_a_model_with_a_name(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for _, path, operation in operations(document):
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for each in [*bodies, *operation["responses"].values()]:
            for media, content in each["content"].items():
                assert content["schema"]["$ref"].rpartition("/")[2] in schemas, (path, media)
    assert [name for name, schema in schemas.items() if not schema.get("description")] == []


@pytest.mark.rule("SK-16")
def test_every_refusal_is_a_problem_document(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        refusals = {
            int(status): answer
            for status, answer in operation["responses"].items()
            if int(status) >= HTTPStatus.BAD_REQUEST
        }
        for answer in refusals.values():
            assert set(answer["content"]) == {"application/problem+json"}, (method, path)
            assert answer["content"]["application/problem+json"]["schema"]["$ref"].endswith("/Problem")
        if path.startswith("/v1/"):
            assert {401, 404, 413, 422, 429, 503, 504} <= set(refusals), (method, path)
            assert operation["security"] == [{"token": []}]
        if path.startswith(CLAIM):
            assert 409 in refusals


@pytest.mark.rule("SK-16")
def test_lists_are_streams_of_lines(document: dict[str, Any]) -> None:
    for path in ("/v1/queues/{queue}/tasks", "/v1/queues/{queue}/tasks/{task}/log"):
        answer = document["paths"][path]["get"]["responses"]["200"]
        assert set(answer["content"]) == {"application/x-ndjson"}


@pytest.mark.rule("SK-16")
def test_the_health_of_a_server_says_what_fails_and_not_why(tmp_path: Path) -> None:
    """Anybody may ask for it, and the text of an error may name hosts and files."""
    from rebalanser.tasks.http.dispenser import Dispenser
    from rebalanser.tasks.http.serving import ServingOptions, build_application

    with Queue("work", f"memory://{tmp_path}", state_folder=tmp_path) as queue:
        app = build_application(queue, Dispenser(queue.context), ServingOptions())
        (health,) = [route.endpoint for route in app.routes if getattr(route, "path", "") == "/health"]
        assert asyncio.run(health()).troubles == ()
        queue.context.errors.failed("claims", QuotaExceeded("no space to write /secret"))
        assert asyncio.run(health()).troubles == ("claims: outage",)
        queue.context.errors.worked("claims")
        assert asyncio.run(health()).troubles == ()
