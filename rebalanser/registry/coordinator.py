"""The contract of a coordinator: what the protocol needs of a group, whatever it is kept in.

A coordinator carries out the commands of :mod:`rebalanser.protocol.messages` and tells what changed.
:class:`~rebalanser.registry.translation.RegistryCoordinator` makes one of any registry; a log such as Kafka
can implement it directly.

**What is atomic.** Each command takes effect at one point, or, where it concerns many resources, in parts
that each do; its outcome says what happened to each part. ``Publish`` commits all shares of a version at
one point.

**What is guarded.** A command that carries a session takes effect only while that session lives, else it is
answered with :class:`~rebalanser.protocol.messages.SessionLost`. One that carries a leadership takes effect
only while the term is the latest, else :class:`~rebalanser.protocol.messages.Deposed`. A barrier is added
only while nobody holds it and the node's share is the one named, and removed only by the session that
added it. A share is the one named until the node has read a later one, or none names it any more.

**Operator requests.** They take effect in the order in which they were made, or not at all (RB-44). Each
names the revision of the last one that took effect, and is refused if another came first. The client then
retries.

**What is ordered.** Revisions of one group only grow, and so do the tokens of one resource. A command sent
after another was answered takes effect after it.

**What an unknown outcome is.** :class:`~rebalanser.protocol.messages.Failed` with ``unknown`` means that the
command may have taken effect or may yet, until something that its guards forbid has happened. Without
``unknown`` it had and will have none. Commands sent again are idempotent: registering the same node id makes
no second member, adding a barrier that is held by the same session answers with its token.

**What a notice is.** A hint that a watched topic changed at or after a revision. Hints may be doubled, never
all lost: after a gap every watched topic is noticed once. The conformance suite for all of this is
:mod:`rebalanser.testing.coordinator_suite`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rebalanser.protocol.messages import Command, Noticed, Outcome
from rebalanser.protocol.types import SAID, Group, Leadership, NodeId, ResourceSpec, Topic
from rebalanser.registry.contract import Capabilities, LeaseAge

Listener: TypeAlias = Callable[[Sequence[Noticed]], None]
Progress: TypeAlias = Callable[[int], None]
"""Called with how many of the items of a long change are done so far."""
MAX_OPERATOR_TRIES: Final = 100
"""Maximum tries of an operator request before which others take effect."""
OVERTAKEN: Final = (
    f"gave up after {MAX_OPERATOR_TRIES} tries: other operator requests kept coming first; "
    "what was written stays, try again"
)


@dataclass(frozen=True, slots=True)
class Holding:
    """A barrier as it stands: which node holds the resource, with which token."""

    resource: str
    node: str
    token: int


@dataclass(frozen=True, slots=True)
class GroupView:
    """All of a group at one revision: also who leads, and who holds which barrier."""

    group: Group
    leadership: Leadership | None
    holdings: tuple[Holding, ...]
    troubles: Mapping[str, str] = field(default_factory=dict)
    """What went wrong lately in the application, by node label."""

    @property
    def exists(self) -> bool:
        """True if anything is known of the group, such as that it had resources once."""
        group = self.group
        known = (
            group.members,
            group.resources,
            group.drained,
            group.header,
            self.leadership,
            self.holdings,
            group.unreadable,
        )
        return any(known) or group.fingerprint.changes > 0


class Coordinator(ABC):
    """One node's or one operator's connection to a group. Every method may be called from any thread."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the store behind it can do."""

    @abstractmethod
    def perform(self, command: Command) -> Outcome:
        """Carry out a command, waiting for its answer. Every failure is an outcome, never an exception."""

    @abstractmethod
    def watch(self, node: NodeId, topics: Mapping[Topic, int], listener: Listener) -> None:
        """Watch exactly these topics, a new one from its revision on; those watched before go on.

        ``node`` is whose shares are meant. ``listener`` must not block and must not raise.
        """

    @abstractmethod
    def read(self) -> GroupView:
        """All of the group and its barriers, at one revision, for anyone who asks (RB-19).

        Raises:
            RetryLater: the store could not be read now.
            FixConfiguration: a person must change something first.
        """

    def exists(self) -> bool:
        """Return what :attr:`GroupView.exists` is. Raises what :meth:`read` does."""
        return self.read().exists

    def resource(self, name: str) -> ResourceSpec | None:
        """What an operator said of a resource; None if there is none. Raises what :meth:`read` does."""
        return self.read().group.resources.get(name)

    @abstractmethod
    def put_resources(
        self, specs: Sequence[ResourceSpec], progress: Progress, said: frozenset[str] = SAID
    ) -> int:
        """Add resources, or change what is said of them; how many are new. Idempotent (RB-29).

        Of those that are there only the fields in ``said`` change.
        """

    @abstractmethod
    def weigh_resources(self, weights: Mapping[str, float], progress: Progress) -> int:
        """Change the weights of those resources that are there; how many changed. Idempotent (AU-7, RB-29).

        Whatever else is said of a resource stays, also where somebody else changes it at the same time.

        Raises:
            RetryLater: the store was away, or others kept coming first; what was written stays.
        """

    @abstractmethod
    def remove_resources(self, resources: Sequence[str], progress: Progress) -> int:
        """Remove resources; how many there were. Barriers are left alone (RB-16). Idempotent."""

    @abstractmethod
    def set_drained(self, label: str, drained: bool) -> None:
        """Mark a node as drained, or not (RB-30). Idempotent."""

    def note_trouble(self, label: str, error: str | None, for_s: float) -> None:  # noqa: B027 - optional
        """Keep for ``for_s`` seconds what went wrong on a node, or forget it; see :class:`GroupView`.

        A store that has no room for it keeps nothing: it is for people only.
        """

    def heartbeats(self, nodes: Sequence[NodeId]) -> Mapping[NodeId, LeaseAge]:  # noqa: ARG002 - optional
        """The age of the last heartbeat of those nodes that live, for people; nothing is written.

        A store that can't tell has none. Raises what :meth:`read` does.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the connection and all watches. Closing twice does nothing."""
