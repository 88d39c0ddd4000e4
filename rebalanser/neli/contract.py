"""The contract between ``Neli`` and the log that a NELI group lives in.

A backend registers an ``OpenElections`` by URL scheme under the entry-point group ``rebalanser.neli``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from rebalanser.core.neli.messages import CallFenced, CallInduced, CallLapsed, Fact
from rebalanser.core.neli.roles import Role, Roles
from rebalanser.core.neli.settings import NeliSettings
from rebalanser.neli.description import GroupDescription
from rebalanser.registry.urls import RegistryUrl, check_topic_name, load_opener, parse_url

ENTRY_POINT_GROUP = "rebalanser.neli"
PARTITIONS = 12
"""How many partitions a topic is made with where nobody says."""

Call: TypeAlias = CallInduced | CallLapsed | CallFenced
"""What handlers are told."""
OnCall: TypeAlias = Callable[[Call], None]
"""Calls the handlers of one partition's roles and returns when they have; in a thread of its own."""
OnFact: TypeAlias = Callable[[Fact], None]
"""Told what happens, in the thread that polls: must not block."""


@dataclass(frozen=True, slots=True)
class Candidacy:
    """For what one process stands, and how."""

    topic: str
    group: str
    roles: Roles = ()
    settings: NeliSettings = field(default_factory=NeliSettings)
    partitions: int = PARTITIONS
    """With how many partitions the topic is made if it is missing."""
    instance: str | None = None
    """A name that the group's coordinator knows this process by across restarts (``group.instance.id``)."""

    def __post_init__(self) -> None:
        """Check the name of the topic.

        Raises:
            InvalidName: it names none.
        """
        check_topic_name(self.topic)


class Candidate(ABC):
    """One process's part in a group, from its making on. Every method may be called from any thread."""

    @property
    @abstractmethod
    def process(self) -> str:
        """The id of this incarnation, never used again."""

    @abstractmethod
    def leads(self, role: Role) -> bool:
        """Whether this process leads ``role`` now: worked out when asked, without I/O (NE-4)."""

    @abstractmethod
    def token(self, role: Role) -> int | None:
        """The fencing token of a role that is led now; else None (NE-15)."""

    @abstractmethod
    def held(self) -> dict[Role, int]:
        """The roles led now, each with its fencing token."""

    @abstractmethod
    def why_not(self, role: Role) -> str | None:
        """Why this process does not lead ``role`` now, in a sentence; None if it does."""

    @abstractmethod
    def wait_leader(self, role: Role, timeout_s: float) -> bool:
        """Wait until this process leads ``role``, or has ended; whether it leads."""

    @abstractmethod
    def set_roles(self, roles: Roles) -> None:
        """Name other roles; takes effect soon."""

    @abstractmethod
    def stop(self) -> None:
        """Begin to hand over everything and leave; returns at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; whether it has.

        Raises:
            RebalanserError: what ended it, if that was not ``stop``.
        """


class Elections(ABC):
    """One Kafka cluster, or what may stand in its place, as NELI sees it."""

    @abstractmethod
    def stand(self, candidacy: Candidacy, on_call: OnCall, on_fact: OnFact) -> Candidate:
        """Take part in a group from now on.

        Raises:
            FixConfiguration: the topic, the group or the settings have to be changed by a person.
            RegistryUnavailable: no broker answered in time.
        """

    @abstractmethod
    def describe(self, candidacy: Candidacy) -> GroupDescription:
        """Who has which role's partition, as the group's coordinator and the topic say now.

        Raises:
            RegistryUnavailable: no broker answered in time.
            RegistryRefused: there is no such topic or group, or it may not be looked at.
        """


OpenElections: TypeAlias = Callable[[RegistryUrl, float], Elections]
"""``open(url, timeout_s)``: a cluster that has answered once within ``timeout_s`` seconds."""


def open_elections(address: str, timeout_s: float) -> Elections:
    """Connect to ``HOST:PORT,…`` or a ``kafka://`` URL with security settings.

    Raises:
        InvalidUrl: the address is none.
        UnknownScheme: no backend has this scheme.
        MissingExtra: the backend's packages are not installed.
        RegistryUnavailable: no answer within ``timeout_s`` seconds; the message says what was tried.
    """
    parsed = parse_url(address if "://" in address else f"kafka://{address}")
    opener: OpenElections = load_opener(parsed.scheme, ENTRY_POINT_GROUP)
    return opener(parsed, timeout_s)
