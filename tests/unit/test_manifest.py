"""The manifest of an application: what it may say, and that each error is told with its place (SH-4)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from rebalanser.core.allocation import Requests
from rebalanser.core.shiva.types import HealthPolicy, RestartPolicy
from rebalanser.errors import InvalidManifest
from rebalanser.shiva.manifest import Manifest, manifest_schema, parse_manifest

pytestmark = pytest.mark.rule("SH-4")

FULL: dict[str, Any] = {
    "command": ["./serve", "--port", "80"],
    "environment": {"GREETING": "hello", "_x1": ""},
    "restart": {
        "policy": "on_failure",
        "max_restarts": 3,
        "restart_window_s": 60,
        "backoff_initial_s": 0.1,
        "backoff_max_s": 5,
    },
    "stop_timeout_s": 2.5,
    "limits": {"memory_bytes": 268435456, "open_files": 64, "log_bytes": 65536, "log_files": 2},
    "requests": {"cpu": 0.5, "memory_mb": 256},
    "replicas": 3,
    "tags": ["gpu", "zone-a"],
    "version": "1.2",
    "health_check": {
        "http": "http://127.0.0.1:80/health",
        "tcp": None,
        "exec": None,
        "interval_s": 2,
        "timeout_s": 1,
        "grace_period_s": 0,
        "failure_threshold": 4,
    },
}


def written(**changes: object) -> bytes:
    return json.dumps({**FULL, **changes}).encode()


def test_a_command_is_enough() -> None:
    manifest = parse_manifest(b'{"command": ["true"]}')
    assert manifest == Manifest(command=("true",))
    assert manifest.as_policy() == RestartPolicy()
    assert manifest.health_check is None


def test_everything_that_can_be_said_is_read() -> None:
    manifest = parse_manifest(written())
    assert json.loads(manifest.model_dump_json()) == FULL
    assert manifest.as_policy() == RestartPolicy("on_failure", 3, 60.0, 0.1, 5.0, 2.5, HealthPolicy(0.0, 4))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"command": []}, "command: "),
        ({"command": "true"}, "command: "),
        ({"command": [" "]}, "command[0] is empty"),
        ({"command": ["true", 1]}, "command[1]: "),
        ({"command": ["a\x00b"]}, "command[0]: "),
        ({"environment": {"A=B": "x"}}, "environment.A=B: "),
        ({"environment": {"A": "\x00"}}, "environment.A: "),
        ({"environment": {"A": 1}}, "environment.A: "),
        ({"environment": {"SHIVA_TOKEN": "9"}}, "environment.SHIVA_TOKEN is reserved"),
        ({"restart": {"policy": "sometimes"}}, "restart.policy: "),
        ({"restart": {"max_restarts": -1}}, "restart.max_restarts: "),
        ({"restart": {"restart_window_s": 0}}, "restart.restart_window_s: "),
        ({"restart": {"backoff_initial_s": 31}}, "restart: backoff_initial_s 31 is over backoff_max_s 30"),
        ({"stop_timeout_s": 0}, "stop_timeout_s: "),
        ({"stop_timeout_s": "5"}, "stop_timeout_s: "),
        ({"limits": {"memory_bytes": 1000}}, "limits.memory_bytes: "),
        ({"limits": {"log_files": 1}}, "limits.log_files: "),
        ({"limits": {"log_bytes": 100}}, "limits.log_bytes: "),
        ({"limits": {"cpus": 4}}, "limits.cpus: "),
        ({"requests": {"cpu": -1}}, "requests.cpu: "),
        ({"requests": {"cpu": 0.0001}}, "requests: cpu 0.0001 has more than three decimal places"),
        ({"requests": {"memory_mb": 0.5}}, "requests.memory_mb: "),
        ({"requests": {"disk": 1}}, "requests.disk: "),
        ({"tags": ["a b"]}, "tags[0]: 'a b' cannot be a tag"),
        ({"commnad": []}, "commnad: "),
        ({"health_check": {}}, "health_check: give one of http, tcp and exec, not none"),
        (
            {"health_check": {"tcp": "h:1", "exec": ["true"]}},
            "health_check: give one of http, tcp and exec, not tcp and exec",
        ),
        ({"health_check": {"tcp": "localhost"}}, "health_check: tcp 'localhost' is not HOST:PORT"),
        ({"health_check": {"tcp": ":80"}}, "health_check: tcp ':80' is not HOST:PORT"),
        ({"health_check": {"tcp": "h:x"}}, "health_check: "),
        ({"health_check": {"http": "https://h/"}}, "health_check.http: "),
        ({"health_check": {"http": "http://h/a b\r\nX: y"}}, "health_check.http: "),
        ({"health_check": {"http": "http:///a"}}, "health_check: http 'http:///a' names no host"),
        (
            {"health_check": {"tcp": "a..b:80"}},
            "health_check: 'a..b' cannot be a host: a part of it is empty",
        ),
        ({"health_check": {"http": f"http://{'x' * 64}/"}}, f"health_check: '{'x' * 64}' cannot be a host"),
        ({"health_check": {"exec": []}}, "health_check.exec: "),
        ({"health_check": {"tcp": "h:1", "failure_threshold": 0}}, "health_check.failure_threshold: "),
    ],
)
def test_an_error_is_told_with_its_place(changes: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        parse_manifest(written(**changes), "app/shiva.json")
    assert str(refused.value).startswith("app/shiva.json: ")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.rule("SH-27")
def test_requests_are_counted_in_thousandths() -> None:
    manifest = parse_manifest(written(requests={"cpu": 0.29, "memory_mb": 256}))
    assert manifest.requests.as_requests() == Requests(290, 256)
    assert parse_manifest(written(requests={"cpu": 2})).requests.as_requests() == Requests(2000)
    assert parse_manifest(written(requests={"cpu": 0})).requests.as_requests() is None
    assert parse_manifest(b'{"command": ["true"]}').requests.as_requests() is None


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(InvalidManifest) as refused:
        parse_manifest(written(command=[], restart={"policy": "x"}, more=1))
    for place in ("command: ", "restart.policy: ", "more: "):
        assert place in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"command": ["a"]} x'])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidManifest, match=r"^shiva\.json: "):
        parse_manifest(text)


@pytest.mark.rule("SH-16")
def test_a_manifest_that_no_worker_could_start_is_refused_by_its_size() -> None:
    environment = {f"VARIABLE_{number}": "x" * 1000 for number in range(66)}
    with pytest.raises(InvalidManifest, match="at most 65,536 are allowed"):
        parse_manifest(written(environment=environment))


def test_the_schema_takes_what_the_manifest_takes() -> None:
    validator = jsonschema.Draft202012Validator(manifest_schema())
    validator.check_schema(manifest_schema())
    validator.validate(FULL)
    validator.validate({"command": ["true"]})
    wrong: list[dict[str, Any]] = [
        {"command": []},
        {"restart": {"policy": "x"}},
        {"more": 1},
        {"limits": {"log_files": 1}},
    ]
    for changes in wrong:
        assert not validator.is_valid({**FULL, **changes})
