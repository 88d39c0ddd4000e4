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
from rebalanser.registry.urls import RegistryUrl, check_topic_name, load_opener, parse_url, with_scheme

ENTRY_POINT_GROUP = "rebalanser.neli"
PARTITIONS = 12
"""Default number of partitions of a topic that is created."""

Call: TypeAlias = CallInduced | CallLapsed | CallFenced
"""Reason of a call of the handlers."""
OnCall: TypeAlias = Callable[[Call], None]
"""Calls the handlers of one partition's roles, in a thread of its own; returns after they have."""
OnFact: TypeAlias = Callable[[Fact], None]
"""Called with each fact in the polling thread: must not block."""


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Topic, group, roles and settings of one process's candidacy."""

    topic: str
    group: str
    roles: Roles = ()
    settings: NeliSettings = field(default_factory=NeliSettings)
    partitions: int = PARTITIONS
    """Number of partitions of the topic, if it is created."""
    instance: str | None = None
    """Name that identifies this process to the group's coordinator across restarts
    (``group.instance.id``)."""

    def __post_init__(self) -> None:
        """Check the topic's name.

        Raises:
            InvalidName: it is invalid.
        """
        check_topic_name(self.topic)


class Candidate(ABC):
    """One process's part in a group, from its creation on. Every method may be called from any thread."""

    @property
    @abstractmethod
    def process(self) -> str:
        """Id of this incarnation, which is never used again."""

    @abstractmethod
    def leads(self, role: Role) -> bool:
        """True if this process leads ``role`` now: computed at the call, without I/O (NE-4)."""

    @abstractmethod
    def token(self, role: Role) -> int | None:
        """Return the fencing token of a role that is led now; else None (NE-15)."""

    @abstractmethod
    def held(self) -> dict[Role, int]:
        """Return the roles led now, each with its fencing token."""

    @abstractmethod
    def why_not(self, role: Role) -> str | None:
        """Return the reason why this process does not lead ``role`` now, as a sentence; None if it does."""

    @abstractmethod
    def wait_leader(self, role: Role, timeout_s: float) -> bool:
        """Wait until this process leads ``role`` or has ended; True if it leads."""

    @abstractmethod
    def set_roles(self, roles: Roles) -> None:
        """Replace the roles; takes effect soon."""

    @abstractmethod
    def stop(self) -> None:
        """Begin to hand over everything and leave; returns at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; True if it has.

        Raises:
            RebalanserError: the error that ended it, unless ``stop`` did.
        """


class Elections(ABC):
    """NELI groups of one Kafka cluster, or of a substitute for it."""

    @abstractmethod
    def stand(self, candidacy: Candidacy, on_call: OnCall, on_fact: OnFact) -> Candidate:
        """Take part in a group from now on.

        Raises:
            FixConfiguration: a person has to change the topic, the group or the settings.
            RegistryUnavailable: no broker answered in time.
        """

    @abstractmethod
    def describe(self, candidacy: Candidacy) -> GroupDescription:
        """Return the assignment of the roles' partitions, from the group's coordinator and the topic.

        Raises:
            RegistryUnavailable: no broker answered in time.
            RegistryRefused: there is no such topic or group, or this user may not describe it.
        """


OpenElections: TypeAlias = Callable[[RegistryUrl, float], Elections]
"""``open(url, timeout_s)``: connects to a cluster, which must answer once within ``timeout_s`` seconds."""


def open_elections(address: str, timeout_s: float) -> Elections:
    """Connect to ``HOST:PORT,…`` or a ``kafka://`` URL with security settings.

    Raises:
        InvalidUrl: the address is invalid.
        UnknownScheme: no backend has this scheme.
        MissingExtra: the backend's packages are not installed.
        RegistryUnavailable: no answer within ``timeout_s`` seconds; the message says what was tried.
    """
    parsed = parse_url(with_scheme(address, "kafka"))
    opener: OpenElections = load_opener(parsed.scheme, ENTRY_POINT_GROUP)
    return opener(parsed, timeout_s)
