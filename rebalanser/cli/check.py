"""``rebalanser check``: checks that a node can work here, with these settings and this registry."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from enum import StrEnum
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import typer
from pydantic import BaseModel, ConfigDict, Field

from rebalanser.cli.lines import headline
from rebalanser.cli.options import RegistryOptions
from rebalanser.cli.output import Face, counted
from rebalanser.core.group import OnOverrun
from rebalanser.errors import InternalError, InvalidSettings, RebalanserError, UnknownGroup
from rebalanser.redaction import redact
from rebalanser.registry import (
    Capabilities,
    GroupStore,
    Registry,
    RegistryCoordinator,
    open_backend,
    parse_url,
)
from rebalanser.registry.contract import Get, Grant, Granted, Revoke, Transaction
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.dead_man import DeadMansSwitch
from rebalanser.settings import PREFIX, Settings
from rebalanser.state import describe

READS: Final = 9
"""Number of reads for the median latency."""
LATE: Final = 0.5
"""Share of ``registry_timeout_s`` from which on a read counts as slow."""


OTHER_VARIABLES: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *(
            "REGISTRY",
            "KAFKA",
            "KAFKA_USER",
            "KAFKA_PASSWORD",
            "CLUSTER",
            "TOPICS",
            "ETCD_USER",
            "ETCD_PASSWORD",
        ),
        *("GROUP", "NODE", "RESOURCE", "TOKEN", "JOB", "CACHE", "SPARK_KAFKA_PACKAGE", "TEST_PATIENCE"),
    )
)
"""Variables beside the settings that are read, or set for processes that are started."""


class CheckStatus(StrEnum):
    """Result of one check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class CheckResult(BaseModel):
    """One check."""

    model_config = ConfigDict(frozen=True)

    check: str
    verdict: CheckStatus
    detail: str


class CheckReport(BaseModel):
    """All checks; ``ok`` if none failed."""

    model_config = ConfigDict(frozen=True)

    ok: bool = Field(description="no check failed")
    registry: str
    findings: tuple[CheckResult, ...]


def check(
    on: RegistryOptions,
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="A group to check too.", show_default=False)
    ] = None,
) -> None:
    """Check that the registry answers, that it grants the lease, and that the settings keep their promises.

    The exit code is 1 if a check failed. The command leaves nothing in the registry, except that it creates
    the topic of a GROUP in Kafka. If a SQLite file does not exist yet, another one is created beside it and
    removed. Weaknesses of a group's topic in Kafka are found only if GROUP is given.
    """
    face = on.face()
    if group is not None:
        face.refuse_missing_file(group)
    with _existing(face) as there:
        findings = tuple(_findings(there, group))
    ok = all(finding.verdict is not CheckStatus.FAILED for finding in findings)
    report = CheckReport(ok=ok, registry=redact(str(parse_url(face.url))), findings=findings)
    face.answer(report, *(f"{each.verdict.value:7} {each.check}: {each.detail}" for each in findings))
    if not ok:
        raise typer.Exit(1)


@contextmanager
def _existing(face: Face) -> Iterator[Face]:
    """Return the face itself, or one for a temporary file."""
    missing = face.missing_file
    if missing is None or not os.access(missing.parent, os.W_OK):
        yield face
        return
    with TemporaryDirectory(dir=missing.parent.absolute(), prefix=".rebalanser-check-") as folder:
        yield replace(face, url=f"sqlite:///{folder}/{missing.name}")


def _findings(face: Face, group: str | None) -> Iterator[CheckResult]:
    settings = Settings.model_construct()
    yield from _unknown_variables()
    try:
        settings = Settings()
    except InvalidSettings as error:
        yield _failed("settings", error)
        yield from _findings_there(face, settings, group, lease=False)
    else:
        yield _timings(settings)
        yield _switch(settings)
        yield from _findings_there(face, settings, group, lease=True)


def _findings_there(
    face: Face, settings: Settings, group: str | None, *, lease: bool
) -> Iterator[CheckResult]:
    """Yield the checks of the registry; without ``lease`` the settings name no valid one."""
    looking_at = "registry"
    try:
        with face.patience(settings):
            opened = open_backend(face.url, settings.connect_timeout_s)
        with closing(opened) as backend:
            root = parse_url(face.url).root
            yield _latency(backend, f"{root}/check", settings)
            yield from _abilities(backend.capabilities)
            if lease:
                looking_at = "lease"
                yield _lease(backend, settings)
            if group is not None:
                looking_at = "group"
                yield from _group(backend, root, group, settings)
    except RebalanserError as error:
        yield _failed(looking_at, error)


def _failed(name: str, error: RebalanserError) -> CheckResult:
    return CheckResult(check=name, verdict=CheckStatus.FAILED, detail=redact(str(error)))


def _unknown_variables() -> Iterator[CheckResult]:
    """Yield environment variables with our prefix that nothing reads, such as mistyped ones."""
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} | OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = "".join(f"; is {each} meant?" for each in get_close_matches(name.upper(), known, 1, 0.9))
            detail = f"{name} is set, but there is no such setting{near}"
            yield CheckResult(check="environment", verdict=CheckStatus.WARNING, detail=detail)


def _timings(settings: Settings) -> CheckResult:
    timings = settings.timings
    detail = (
        f"a node that loses the registry calls OnStop {timings.detect_s:g} s after its last proof of "
        f"life, access has ended after {timings.access_s:g} s, the lease of {timings.lease_ttl_s:g} s ends "
        f"later; heartbeats every {timings.heartbeat_interval_s:.3g} s, "
        f"OnStop has {timings.stop_timeout_s:g} s"
    )
    return CheckResult(check="settings", verdict=CheckStatus.OK, detail=detail)


def _switch(settings: Settings) -> CheckResult:
    reason = DeadMansSwitch.available()
    if reason is None:
        detail = "kernel timers and a clock that counts suspends are available"
        return CheckResult(check="dead man's switch", verdict=CheckStatus.OK, detail=detail)
    needed = settings.on_overrun is OnOverrun.KILL
    return CheckResult(
        check="dead man's switch",
        verdict=CheckStatus.FAILED if needed else CheckStatus.WARNING,
        detail=reason,
    )


def _latency(backend: Registry | GroupStore, key: str, settings: Settings) -> CheckResult:
    times = []
    for _ in range(READS):
        began = time.monotonic()
        if isinstance(backend, GroupStore):
            backend.look(settings.registry_timeout_s)
        else:
            backend.execute(Transaction(then=(Get(key),)), settings.registry_timeout_s)
        times.append(time.monotonic() - began)
    late = max(times) > LATE * settings.registry_timeout_s
    detail = (
        f"answers in {1000 * statistics.median(times):.1f} ms, {1000 * max(times):.1f} ms at most of "
        f"{READS} reads; registry_timeout_s is {settings.registry_timeout_s:g}"
    )
    return CheckResult(
        check="registry", verdict=CheckStatus.WARNING if late else CheckStatus.OK, detail=detail
    )


def _abilities(can: Capabilities) -> Iterator[CheckResult]:
    detail = (
        f"{can.max_operations} operations and {can.max_request_bytes:,} bytes a transaction; "
        f"{'shared between hosts' if can.shared_between_hosts else 'for the processes of one host'}; "
        f"{'kept after its processes end' if can.survives_process else 'lost when this process ends'}"
    )
    yield CheckResult(check="abilities", verdict=CheckStatus.OK, detail=detail)
    yield from map(_weakness, can.unsafe_reasons)


def _weakness(reason: str) -> CheckResult:
    return CheckResult(check="server", verdict=CheckStatus.WARNING, detail=reason)


def _shortest_lease_s(backend: Registry | GroupStore, settings: Settings) -> float:
    """Check the lease that the backend grants, by requesting one if that leaves nothing behind."""
    shortest_s = backend.capabilities.min_lease_ttl_s
    if isinstance(backend, GroupStore):
        return max(shortest_s, settings.lease_ttl_s)
    granted = backend.execute(Grant(settings.lease_ttl_s), settings.registry_timeout_s)
    if not isinstance(granted, Granted):
        raise InternalError(f"the registry answered a grant with {granted}")
    backend.execute(Revoke(granted.lease), settings.registry_timeout_s)
    return max(granted.ttl_s, shortest_s)


def _lease(backend: Registry | GroupStore, settings: Settings) -> CheckResult:
    asked_s = settings.lease_ttl_s
    shortest_s = _shortest_lease_s(backend, settings)
    if shortest_s <= asked_s:
        detail = f"granted for {shortest_s:g} s, as requested"
        return CheckResult(check="lease", verdict=CheckStatus.OK, detail=detail)
    detail = (
        f"lease_ttl_s {asked_s:g} is below what the registry allows, {shortest_s:g} s; "
        f"set REBALANSER_LEASE_TTL_S to {shortest_s:g} or more"
    )
    return CheckResult(check="lease", verdict=CheckStatus.FAILED, detail=detail)


def _group(
    backend: Registry | GroupStore, root: str, group: str, settings: Settings
) -> Iterator[CheckResult]:
    """Yield the checks of the group, first the weaknesses of this group alone."""
    now, timeout_s = SystemClock().now, settings.registry_timeout_s
    if isinstance(backend, GroupStore):
        try:
            opening = backend.open_group(group, now, timeout_s, settings.connect_timeout_s, create=False)
        except UnknownGroup:
            yield _no_group(group)
            return
        with closing(opening) as opened:
            known = backend.capabilities.unsafe_reasons
            yield from (_weakness(each) for each in opened.capabilities.unsafe_reasons if each not in known)
            view = opened.read()
    else:
        view = RegistryCoordinator(backend, root, group, now, timeout_s).read()
    if unreadable := view.group.unreadable:
        detail = (
            f"left alone: {counted(len(unreadable), 'key')} that can't be read, the first: "
            f"{redact(unreadable[min(unreadable)])}; rebalanser status --json lists all"
        )
        yield CheckResult(check="keys", verdict=CheckStatus.WARNING, detail=detail)
    if view.exists:
        yield CheckResult(check="group", verdict=CheckStatus.OK, detail=headline(describe(group, view)))
    else:
        yield _no_group(group)


def _no_group(group: str) -> CheckResult:
    return CheckResult(check="group", verdict=CheckStatus.WARNING, detail=f"there is no group {group!r} yet")
