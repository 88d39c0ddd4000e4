"""The manifest of an application: what to run and how, in ``shiva.json`` at the root of its archive (SH-4).

A small one::

    {"command": ["python3", "server.py"], "environment": {"PORT": "8080"}}

The command runs in the folder that the archive was unpacked to. It gets PATH, HOME, USER, LANG, LC_ALL, TZ
and TMPDIR of its worker and nothing else of the worker's environment, then ``environment``, then these:

=====================  ===============================================================================
``SHIVA_TENANT``       the three parts of the application's name
``SHIVA_CHANNEL``
``SHIVA_APPLICATION``
``SHIVA_REPLICA``      the number of this replica, from 0, and the number of replicas when it was started
``SHIVA_REPLICAS``
``SHIVA_WORKER``       the worker that it runs on
``SHIVA_TOKEN``        a fencing token: grows from worker to worker (SH-13)
``SHIVA_DATA``         a folder on this worker for files of its own, kept until the application is stopped
=====================  ===============================================================================

Manifest, command and environment are together bounded by the size of the file, 64 KiB: a bigger one is
refused when the archive is packed, so that no worker ever meets one that it cannot start.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from rebalanser.core.allocation import MAX_AMOUNT, Requests, thousandths
from rebalanser.core.fields import fields_for
from rebalanser.core.shiva.archives import DEFAULT_LIMITS, MANIFEST_NAME
from rebalanser.core.shiva.types import MAX_REPLICAS, HealthPolicy, RestartPolicy, check_part
from rebalanser.errors import InvalidManifest, InvalidName

RESERVED_PREFIX: Final = "SHIVA_"
_MIB: Final = 1024 * 1024

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=255)]


class StrictModel(BaseModel):
    """Part of a file that a person writes: no other fields, and no value of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RestartWhen(StrEnum):
    """When a process that has exited by itself is started again."""

    ALWAYS = "always"
    ON_FAILURE = "on_failure"
    NEVER = "never"


class Restart(StrictModel):
    """When and how often a process that has exited by itself is started again (SH-17)."""

    policy: RestartWhen = Field(
        default=RestartWhen.ALWAYS,
        description="`always`, `on_failure` (an exit code other than 0, or a signal) or `never`",
    )
    max_restarts: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=5, description="maximum restarts within the window; with one more the application has failed"
    )
    restart_window_s: Seconds = 300.0
    backoff_initial_s: Seconds = Field(
        default=0.5, description="delay before a restart; it doubles each time"
    )
    backoff_max_s: Seconds = 30.0

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.backoff_initial_s > self.backoff_max_s:
            raise ValueError(
                f"backoff_initial_s {self.backoff_initial_s:g} is over backoff_max_s {self.backoff_max_s:g}"
            )
        return self


class HealthCheck(StrictModel):
    """A check that decides if a process runs, and when it is stopped and started again (SH-23)."""

    http: Annotated[str, StringConstraints(pattern=r"^http://[!-~]+$")] | None = Field(
        default=None,
        description="a URL such as `http://127.0.0.1:8080/health`; passes if the status is 200 to 399",
    )
    tcp: Annotated[str, StringConstraints(pattern=r"^[!-~]+$")] | None = Field(
        default=None, description="`HOST:PORT`; passes if a connection is accepted"
    )
    exec: Annotated[tuple[Text, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="a program and its arguments, run as the application is; passes if it exits with 0",
    )
    interval_s: Seconds = Field(default=10.0, description="time from the end of a check to the next one")
    timeout_s: Seconds = Field(default=5.0, description="maximum time of a check")
    grace_period_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = Field(
        default=30.0,
        description="failures within this time after the start do not count until a check has passed",
    )
    failure_threshold: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3,
        description="failures in a row after which the process is stopped, and restarted according to "
        "`restart`",
    )

    @model_validator(mode="after")
    def _is_one_check(self) -> Self:
        given = [name for name in ("http", "tcp", "exec") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of http, tcp and exec, not {' and '.join(given) or 'none'}")
        if self.tcp is not None and None in address_of(f"//{self.tcp}"):
            raise ValueError(f"tcp {self.tcp!r} is not HOST:PORT")
        if self.http is not None and address_of(self.http)[0] is None:
            raise ValueError(f"http {self.http!r} names no host")
        host = address_of(self.http or f"//{self.tcp}")[0] or ""
        try:
            host.encode("idna")
        except UnicodeError:
            raise ValueError(f"{host!r} cannot be a host: a part of it is empty or too long") from None
        return self

    def as_policy(self) -> HealthPolicy:
        """Return what the worker's state machine needs of it."""
        return HealthPolicy(self.grace_period_s, self.failure_threshold)


def address_of(url: str) -> tuple[str | None, int | None]:
    """Return host and port of a URL, None for each that it lacks.

    Raises:
        ValueError: the port is invalid.
    """
    parts = urlsplit(url)
    return parts.hostname, parts.port


class Limits(StrictModel):
    """Limits of a process. Memory and files are limited for each process, not for all together."""

    memory_bytes: Annotated[int, Field(ge=64 * _MIB)] | None = Field(
        default=None, description="private memory of each process (RLIMIT_DATA); unlimited if unset"
    )
    open_files: Annotated[int, Field(ge=16, le=1_048_576)] | None = Field(
        default=None,
        description="open files of each process (RLIMIT_NOFILE); the worker's own limit if unset",
    )
    log_bytes: Annotated[int, Field(ge=65_536, le=1024 * _MIB)] = Field(
        default=10 * _MIB, description="maximum size of an output file"
    )
    log_files: Annotated[int, Field(ge=2, le=100)] = Field(
        default=5, description="maximum number of output files"
    )


class RequestedAmounts(StrictModel):
    """Amounts that the application requests of its worker, to place it; its use is not limited (SH-27)."""

    cpu: Annotated[float, Field(ge=0, le=MAX_AMOUNT / 1000, allow_inf_nan=False)] = Field(
        default=0.0, description="processors, to the thousandth; 0.5 is half of one"
    )
    memory_mb: Annotated[int, Field(ge=0, le=MAX_AMOUNT)] = Field(
        default=0, description="megabytes of memory, of all its processes"
    )

    @model_validator(mode="after")
    def _is_a_number_of_thousandths(self) -> Self:
        thousandths(self.cpu)
        return self

    def as_requests(self) -> Requests | None:
        """Return what the leader needs of it; None if it requests nothing."""
        return Requests(thousandths(self.cpu), self.memory_mb) or None


class Manifest(StrictModel):
    """Manifest of an application: the content of ``shiva.json`` (SH-4)."""

    command: Annotated[tuple[Text, ...], Field(min_length=1)] = Field(
        description="the program and its arguments; no shell is involved"
    )
    environment: dict[EnvironmentName, Text] = Field(default_factory=dict)
    restart: Restart = Field(default_factory=Restart)
    stop_timeout_s: Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)] = Field(
        default=10.0, description="time from SIGTERM to SIGKILL for its whole process group"
    )
    limits: Limits = Field(default_factory=Limits)
    requests: RequestedAmounts = Field(
        default_factory=RequestedAmounts, description="it is placed only on a worker with these amounts free"
    )
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = Field(
        default=1, description="number of copies, each on a different worker (SH-28)"
    )
    health_check: HealthCheck | None = Field(
        default=None, description="without one it counts as running as soon as its process does"
    )
    tags: tuple[str, ...] = Field(default=(), description="a worker must have all of these tags (SH-12)")
    version: Annotated[str, StringConstraints(max_length=128)] = Field(
        default="", description="free text, only shown"
    )

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        problems = []
        if not self.command[0].strip():
            problems.append("command[0] is empty")
        reserved = sorted(name for name in self.environment if name.startswith(RESERVED_PREFIX))
        problems += [f"environment.{name} is reserved: the worker sets it" for name in reserved]
        for number, tag in enumerate(self.tags):
            try:
                check_part(tag, "tag")
            except InvalidName as error:
                problems.append(f"tags[{number}]: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def as_policy(self) -> RestartPolicy:
        """Return the part that the worker's state machine needs."""
        return RestartPolicy(
            restart=self.restart.policy.value,
            **fields_for(RestartPolicy, self.restart),
            stop_timeout_s=self.stop_timeout_s,
            health=self.health_check.as_policy() if self.health_check is not None else None,
        )


def parse_manifest(text: bytes, file: str = MANIFEST_NAME) -> Manifest:
    """Parse a manifest; messages call it ``file``.

    Raises:
        InvalidManifest: with every error, each with its place in the file.
    """
    if len(text) > DEFAULT_LIMITS.manifest_bytes:
        raise InvalidManifest(
            f"{file} has {len(text):,} bytes and at most {DEFAULT_LIMITS.manifest_bytes:,} are allowed"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise InvalidManifest(f"{file}: {problems_in(error)}") from error


def problems_in(error: ValidationError) -> str:
    """Return every problem of a JSON file with its place, for people."""
    return "; ".join(
        f"{_place(problem['loc'])}{problem['msg'].removeprefix('Value error, ')}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _place(location: tuple[int | str, ...]) -> str:
    """``restart.backoff_max_s: `` or ``command[0]: ``; nothing for the file as a whole."""
    path = ""
    for step in location:
        if step == "[key]":
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return f"{path}: " if path else ""


def manifest_schema() -> dict[str, Any]:
    """Return the JSON schema of ``shiva.json``, for editors and for the documentation."""
    return Manifest.model_json_schema()
