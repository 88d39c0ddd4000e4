"""The times that NELI runs on, and their check against the mode (NE-11)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from math import isfinite

from rebalanser.errors import InvalidSettings

MOST_SESSION_S = 3600.0
"""Maximum session timeout that Kafka's client takes."""
MOST_POLL_INTERVAL_S = 86_400.0
"""Maximum interval between two polls that Kafka's client takes."""
LEAST_SESSION_S = 0.3
"""In a shorter one no heartbeat has the time to come back within the deadline."""
LONGEST_ALIVE_S = 1.0
"""Maximum default seconds between heartbeats of a classic group, whose answers tell of a lost member."""
_ROUNDING_S = 1e-9


class Mode(StrEnum):
    """Guarantee to a leader."""

    NON_EXCLUSIVE = "non-exclusive"
    """A role rarely lacks a leader; two may overlap for a stated time (NE-6)."""
    EXCLUSIVE = "exclusive"
    """At most one leader at any time, by the broker's timestamps and a grace (NE-7, NE-8)."""
    FAST = "fast"
    """At most one leader at any time; an orderly hand-over needs no grace (NE-9, NE-10)."""


class GroupProtocol(StrEnum):
    """Protocol of the consumer group; the names are those of Kafka's ``group.protocol``."""

    CLASSIC = "classic"
    CONSUMER = "consumer"
    """KIP-848: session timeout and heartbeat interval are the broker's."""


@dataclass(frozen=True, slots=True)
class NeliSettings:
    """Settings of a member. A value of 0 is derived from the mode and the session timeout.

    Call ``check`` to validate them; the constructor does not.
    """

    mode: Mode = Mode.FAST
    """Guarantee to a leader."""
    session_timeout_s: float = 10.0
    """Seconds that the group's coordinator waits for a silent process before it reassigns its partitions."""
    deadline_s: float = 0.0
    """Maximum age of a leader's evidence (the T of the classic modes). Default: 1.5 session timeouts in
    ``non-exclusive``, half of one in ``exclusive``, a quarter of one in ``fast``."""
    publish_interval_s: float = 0.0
    """Seconds between heartbeats, commits of offsets, and requests for the partition count.
    Default: a fifth of the deadline, a tenth of the session timeout in ``non-exclusive``."""
    groups: int = 1
    """Number of groups that share the topic, each publishing at that many times the interval (NE-12)."""
    heartbeat_interval_s: float = 0.0
    """Seconds between the client's heartbeats to the coordinator, which also report lost members. Default:
    a sixth of the session timeout, and at most 1 s with the classic group protocol."""
    max_poll_interval_s: float = 60.0
    """Maximum seconds between two polls. It is also the rebalance timeout: the time that others wait for a
    revoke callback."""
    lapse_limit_s: float = 0.0
    """Seconds that the revoke callback waits for handlers to end their work. Default: 0.8 of the above."""
    clock_error_s: float = 0.5
    """Maximum difference (e) between this host's wall clock and a broker's (``exclusive``)."""
    clock_drift_ratio: float = 0.01
    """Maximum drift of any host's monotonic clock from true time, as a ratio."""
    protocol: GroupProtocol = GroupProtocol.CLASSIC
    """Protocol of the consumer group."""
    assignor: str = "cooperative-sticky"
    """Assignor of partitions: ``partition.assignment.strategy``, or a KIP-848 remote assignor."""

    @property
    def limit_s(self) -> float:
        """The deadline in force."""
        if self.deadline_s:
            return self.deadline_s
        share = {Mode.NON_EXCLUSIVE: 1.5, Mode.EXCLUSIVE: 0.5, Mode.FAST: 0.25}[self.mode]
        return self.session_timeout_s * share

    @property
    def base_interval_s(self) -> float:
        """Seconds between two heartbeats on a partition if no other group shares the topic."""
        if self.publish_interval_s:
            return self.publish_interval_s
        return self.session_timeout_s / 10 if self.mode is Mode.NON_EXCLUSIVE else self.limit_s / 5

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of this process; in ``fast`` only its own heartbeats count."""
        return self.base_interval_s * (1 if self.mode is Mode.FAST else self.groups)

    @property
    def alive_interval_s(self) -> float:
        """Seconds between the client's heartbeats to the coordinator."""
        if self.heartbeat_interval_s:
            return self.heartbeat_interval_s
        share_s = self.session_timeout_s / 6
        return min(share_s, LONGEST_ALIVE_S) if self.protocol is GroupProtocol.CLASSIC else share_s

    @property
    def lapse_s(self) -> float:
        """Maximum seconds that a revoke callback waits for handlers."""
        return self.lapse_limit_s or self.max_poll_interval_s * 0.8

    @property
    def drift_factor(self) -> float:
        """Seconds of the fastest clock in one second of the slowest."""
        return (1 + self.clock_drift_ratio) / (1 - self.clock_drift_ratio)

    @property
    def wait_s(self) -> float:
        """Maximum seconds, by any clock, for which a predecessor may lead after an assignment."""
        return self.limit_s * self.drift_factor

    @property
    def overlap_s(self) -> float:
        """Maximum seconds that a successor leads beside a leader that lost touch (NE-6); 0 outside of
        ``non-exclusive``.

        An accepted commit renews the session only with the classic group protocol.
        """
        if self.mode is not Mode.NON_EXCLUSIVE:
            return 0.0
        renewed_s = self.session_timeout_s if self.protocol is GroupProtocol.CLASSIC else 0.0
        return self.limit_s - renewed_s


def check(settings: NeliSettings) -> list[str]:
    """Refuse settings that contradict the mode, with the numbers; return warnings about unwise ones.

    Raises:
        InvalidSettings: the mode's promises could not be kept (NE-11).
    """
    problems = [*_not_numbers(settings)] or [*_out_of_range(settings)] or [*_contradictions(settings)]
    if problems:
        raise InvalidSettings(f"NELI {settings.mode}: {'; '.join(problems)}")
    return [*_warnings(settings)]


def _not_numbers(settings: NeliSettings) -> Iterator[str]:
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(each.default, int | float) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            yield f"{each.name} is {value!r}, it must be a number"


def _out_of_range(settings: NeliSettings) -> Iterator[str]:
    for name in ("session_timeout_s", "max_poll_interval_s"):
        if not _positive(getattr(settings, name)):
            yield f"{name} is {getattr(settings, name):g}, it must be above 0"
    for name, most_s in (
        ("session_timeout_s", MOST_SESSION_S),
        ("max_poll_interval_s", MOST_POLL_INTERVAL_S),
    ):
        if isfinite(getattr(settings, name)) and getattr(settings, name) > most_s:
            yield f"{name} is {getattr(settings, name):g}, Kafka's client takes at most {most_s:g}"
    if 0 < settings.session_timeout_s < LEAST_SESSION_S:
        yield (
            f"session_timeout_s is {settings.session_timeout_s:g}, it must be {LEAST_SESSION_S:g} or above: "
            f"within the deadline of {settings.limit_s:g} s no heartbeat would be published and read back"
        )
    names = ("deadline_s", "publish_interval_s", "heartbeat_interval_s", "lapse_limit_s", "clock_error_s")
    for name in names:
        value = getattr(settings, name)
        if value and not _positive(value):
            yield f"{name} is {value:g}, it must be 0 or above"
    if settings.groups < 1:
        yield f"groups is {settings.groups}: at least this one uses the topic"
    if not 0 <= settings.clock_drift_ratio < 0.5:
        yield f"clock_drift_ratio is {settings.clock_drift_ratio:g}, it must be from 0 to below 0.5"


def _positive(seconds: float) -> bool:
    return isfinite(seconds) and seconds > 0


def _contradictions(settings: NeliSettings) -> Iterator[str]:
    limit_s, session_s = settings.limit_s, settings.session_timeout_s
    match settings.mode:
        case Mode.NON_EXCLUSIVE:
            if limit_s <= session_s:
                yield f"deadline_s {limit_s:g} must be above session_timeout_s {session_s:g} (NE-6)"
        case Mode.EXCLUSIVE:
            if limit_s + settings.clock_error_s >= session_s:
                together_s = limit_s + settings.clock_error_s
                yield (
                    f"deadline_s {limit_s:g} + clock_error_s {settings.clock_error_s:g} = {together_s:g} "
                    f"must be below session_timeout_s {session_s:g} (NE-7)"
                )
        case Mode.FAST:
            if limit_s > session_s / 3 + _ROUNDING_S:
                yield (
                    f"deadline_s {limit_s:g} must be at most a third of session_timeout_s {session_s:g}, "
                    f"which is {session_s / 3:g} (NE-9)"
                )
    if 2 * settings.interval_s > limit_s + _ROUNDING_S:
        shared = f" ({settings.groups} groups share the topic)" if settings.groups > 1 else ""
        yield (
            f"heartbeats come every {settings.interval_s:g} s{shared}, at least two must fit into "
            f"deadline_s {limit_s:g}"
        )
    if settings.alive_interval_s > session_s / 3 + _ROUNDING_S:
        yield (
            f"heartbeat_interval_s {settings.alive_interval_s:g} must be at most a third of "
            f"session_timeout_s {session_s:g}"
        )
    yield from _rebalance_contradictions(settings)


def _rebalance_contradictions(settings: NeliSettings) -> Iterator[str]:
    poll_s = settings.max_poll_interval_s
    if settings.session_timeout_s > poll_s:
        yield f"session_timeout_s {settings.session_timeout_s:g} is above max_poll_interval_s {poll_s:g}"
    if settings.mode is not Mode.NON_EXCLUSIVE and settings.wait_s >= poll_s:
        yield (
            f"deadline_s {settings.limit_s:g} (with clock drift {settings.wait_s:g}) must be below "
            f"max_poll_interval_s {poll_s:g}, which is the rebalance timeout as well (NE-10)"
        )
    if settings.lapse_s >= poll_s:
        yield (
            f"lapse_limit_s {settings.lapse_s:g} must be below max_poll_interval_s {poll_s:g}: others wait "
            "no longer for a revoke callback"
        )


def _warnings(settings: NeliSettings) -> Iterator[str]:
    if 3 * settings.interval_s > settings.limit_s + _ROUNDING_S:
        yield (
            f"heartbeats come every {settings.interval_s:g} s and deadline_s is {settings.limit_s:g}: a "
            "single one that is late or lost ends leadership; let at least three fit in"
        )
    if settings.protocol is GroupProtocol.CLASSIC and "sticky" not in settings.assignor:
        yield (
            f"the {settings.assignor} assignor moves more roles than a change of membership needs; "
            "use cooperative-sticky (NE-14)"
        )
    elif settings.protocol is GroupProtocol.CLASSIC and not settings.assignor.startswith("cooperative"):
        yield (
            f"with the {settings.assignor} assignor every change of membership interrupts every role; "
            "use cooperative-sticky (NE-14)"
        )
    if settings.protocol is GroupProtocol.CONSUMER and settings.assignor == "range":
        yield "the range assignor moves more roles than a change of membership needs; use uniform (NE-14)"
