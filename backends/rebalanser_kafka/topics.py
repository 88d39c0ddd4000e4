"""Topics as the protocols require them: created if they are missing, compared if they exist."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeVar

import tenacity
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType  # type: ignore[attr-defined]

from rebalanser.errors import AccessDenied, InvalidSettings, RegistryUnavailable
from rebalanser_kafka.connection import Connection, client_config
from rebalanser_kafka.failures import Act, error_of, is_denied, judge

PARTITIONS: Final = "partitions"
"""Name of the partition count in ``TopicSpec.must_match`` and in a ``Difference``."""
FIRST_ATTEMPT_S: Final = 2.0
"""Seconds for the first client's answers; each later client has twice the time."""
PAUSE_S: Final = 0.05
"""Seconds between two attempts."""
_LEAST_S: Final = 0.001
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """Required settings of a topic. A difference in ``must_match`` is an error, any other a warning."""

    name: str
    partitions: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    must_match: frozenset[str] = frozenset({PARTITIONS})


@dataclass(frozen=True, slots=True)
class TopicState:
    """Settings of an existing topic; ``settings`` has all of them, the broker's defaults included."""

    name: str
    partitions: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between an existing topic and its specification."""

    topic: str
    setting: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} is {self.found}, wanted {self.wanted}"


def remedy(found: Sequence[Difference], servers: str) -> str:
    """Return a shell command that removes the differences of one topic."""
    topic = found[0].topic
    steps = []
    if any(each.setting == PARTITIONS for each in found):
        steps.append(f"delete {topic} or choose another name: the number of partitions cannot be lowered")
    settings = [f"{each.setting}={_listed(each.wanted)}" for each in found if each.setting != PARTITIONS]
    if settings:
        steps.append(
            f"kafka-configs.sh --bootstrap-server {shlex.quote(servers)} --alter --topic {topic} "
            f"--add-config {shlex.quote(','.join(settings))}"
        )
    return "; ".join(steps)


def _listed(value: str) -> str:
    """Quote a value for ``kafka-configs.sh``, which reads a comma as the start of the next setting."""
    return f"[{value}]" if "," in value else value


def by_topic(found: Iterable[Difference]) -> list[list[Difference]]:
    """Group differences by topic."""
    return [list(each) for _, each in groupby(found, lambda difference: difference.topic)]


def differences(spec: TopicSpec, state: TopicState) -> list[Difference]:
    """Return the differences between a topic and its specification; lists such as ``compact,delete`` are
    compared without order."""
    found = {PARTITIONS: str(state.partitions), **state.settings}
    wanted = {PARTITIONS: str(spec.partitions), **spec.settings}
    return [
        Difference(spec.name, name, value, found.get(name, "unknown to the broker"))
        for name, value in wanted.items()
        if _normal(found.get(name)) != _normal(value)
    ]


def _normal(value: str | None) -> frozenset[str] | None:
    return None if value is None else frozenset(part.strip() for part in value.split(","))


class _Deadline:
    """One deadline for several requests, and a shorter one for each attempt at all of them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._attempt_s = FIRST_ATTEMPT_S
        self._deadline = self._attempt_ends = time.monotonic() + timeout_s

    def begin_attempt(self) -> None:
        self._attempt_ends = min(self._deadline, time.monotonic() + self._attempt_s)
        self._attempt_s *= 2

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def left_s(self) -> float:
        return max(_LEAST_S, self._attempt_ends - time.monotonic())

    def result(self, future: Future[Any], what: str) -> Any:
        try:
            return future.result(self.left_s())
        except FutureTimeout:
            raise RegistryUnavailable(f"{what} was not answered within {self._timeout_s:g} s") from None


def _with_retries(
    connection: Connection, timeout_s: float, ask: Callable[[AdminClient, _Deadline], ResultT]
) -> ResultT:
    """Send requests with a new client, and with another one if that got no answer within its time.

    A broker that missed its own heartbeats, as after a pause, is fenced for a moment and reports to clients
    that there is no broker. Such a client retries only after its metadata's refresh interval, although the
    broker has recovered by then.
    """
    deadline = _Deadline(timeout_s)

    def attempt() -> ResultT:
        deadline.begin_attempt()
        return ask(AdminClient(client_config(connection, {})), deadline)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RegistryUnavailable),
        wait=tenacity.wait_fixed(PAUSE_S),
        stop=lambda _state: deadline.is_over(),
        reraise=True,
    )(attempt)


def describe(connection: Connection, names: Iterable[str], timeout_s: float) -> dict[str, TopicState]:
    """Return the topics of these names that exist.

    Raises:
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
        AccessDenied: this user may not read a topic's settings.
    """
    wanted = list(names)
    return _with_retries(connection, timeout_s, lambda admin, deadline: _describe(admin, wanted, deadline))


def ensure_topics(
    connection: Connection, specs: Sequence[TopicSpec], timeout_s: float, *, replication_factor: int = -1
) -> list[Difference]:
    """Create missing topics; return the differences of the others, without acting on them.

    Several processes may do this at once. ``replication_factor`` -1 is the broker's default.

    Raises:
        InvalidSettings: an existing topic differs in something that must match; names every difference and
            its remedy.
        AccessDenied: a topic is missing and this user may not create it, or may not describe one.
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
        RegistryRefused: the broker refuses the topic's settings, such as more replicas than brokers.
    """

    def ensure(admin: AdminClient, deadline: _Deadline) -> dict[str, TopicState]:
        states = _describe(admin, [spec.name for spec in specs], deadline)
        missing = [spec for spec in specs if spec.name not in states]
        if missing:
            _create(admin, missing, replication_factor, deadline)
            states |= _described_once_known(admin, [spec.name for spec in missing], deadline)
        return states

    states = _with_retries(connection, timeout_s, ensure)
    found = [
        (difference, difference.setting in spec.must_match)
        for spec in specs
        for difference in differences(spec, states[spec.name])
    ]
    fatal = [difference for difference, must in found if must]
    refuse(connection, fatal)
    return [difference for difference, _ in found]


def refuse(connection: Connection, found: Sequence[Difference]) -> None:
    """Refuse topics that differ in a setting that must match.

    Raises:
        InvalidSettings: names every difference, and a remedy for each topic.
    """
    if found:
        raise InvalidSettings(
            "topics exist with other settings: "
            + "; ".join(
                f"{', '.join(map(str, each))} (do: {remedy(each, connection.servers)})"
                for each in by_topic(found)
            )
        )


def partitions_of(connection: Connection, names: Iterable[str], timeout_s: float) -> dict[str, int]:
    """Return the partition counts of the topics of these names that exist. The permission to describe
    suffices.

    Raises:
        RegistryUnavailable: no answer within ``timeout_s`` seconds.
        AccessDenied: this user may not describe a topic.
    """
    wanted = list(names)
    return _with_retries(connection, timeout_s, lambda admin, deadline: _partitions(admin, wanted, deadline))


def _describe(admin: AdminClient, names: list[str], deadline: _Deadline) -> dict[str, TopicState]:
    partitions = _partitions(admin, names, deadline)
    settings = _settings(admin, list(partitions), deadline)
    return {
        name: TopicState(name, count, settings[name])
        for name, count in partitions.items()
        if name in settings
    }


def _partitions(admin: AdminClient, names: list[str], deadline: _Deadline) -> dict[str, int]:
    partitions: dict[str, int] = {}
    for name, future in admin.describe_topics(
        TopicCollection(names), request_timeout=deadline.left_s()
    ).items():
        what = f"looking at topic {name}"
        try:
            partitions[name] = len(deadline.result(future, what).partitions)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise judge(error, Act.READ, what) from None
    return partitions


def _settings(admin: AdminClient, names: list[str], deadline: _Deadline) -> dict[str, dict[str, str]]:
    if not names:
        return {}
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
    settings: dict[str, dict[str, str]] = {}
    for resource, future in admin.describe_configs(resources, request_timeout=deadline.left_s()).items():
        what = f"looking at the settings of topic {resource.name}"
        try:
            entries = deadline.result(future, what)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise judge(error, Act.READ, what) from None
        else:
            settings[resource.name] = {name: entry.value for name, entry in entries.items() if entry.value}
    return settings


def _create(admin: AdminClient, specs: list[TopicSpec], replication_factor: int, deadline: _Deadline) -> None:
    wanted = [
        NewTopic(spec.name, spec.partitions, replication_factor, config=dict(spec.settings)) for spec in specs
    ]
    for name, future in admin.create_topics(wanted, request_timeout=deadline.left_s()).items():
        what = f"making topic {name}"
        try:
            deadline.result(future, what)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if is_denied(error):
                raise AccessDenied(
                    f"topic {name} is missing and this user may not make it ({error.str()}): let somebody "
                    f"make it who may, or grant CREATE on it"
                ) from None
            raise judge(error, Act.READ, what) from None


class _TopicUnknownYet(Exception):
    """The broker does not know yet a topic that the controller has created."""


def _described_once_known(admin: AdminClient, names: list[str], deadline: _Deadline) -> dict[str, TopicState]:
    def ask() -> dict[str, TopicState]:
        states = _describe(admin, names, deadline)
        if len(states) < len(names):
            raise _TopicUnknownYet
        return states

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_TopicUnknownYet),
        wait=tenacity.wait_fixed(PAUSE_S),
        stop=lambda _state: deadline.left_s() <= _LEAST_S,
        reraise=True,
    )
    try:
        return retrying(ask)
    except _TopicUnknownYet:
        raise RegistryUnavailable(
            f"the brokers do not know of the new topics {', '.join(names)} yet"
        ) from None
