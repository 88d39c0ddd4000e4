"""The contract of a coordinator, the protocol's access to a group in any kind of store.

A coordinator carries out the commands of ``rebalanser.core.group.messages`` and reports changes.
``RegistryCoordinator`` turns any registry into one; a log such
as Kafka can implement it directly.

**Atomicity.** Each command takes effect at one point. One that concerns many resources may take effect in
parts, each at one point; its outcome reports each part. ``Publish`` commits all shares of a version at one
point.

**Guards.** A command that carries a session takes effect only while that session lives; otherwise its outcome
is ``SessionLost``. A command that carries a leadership takes effect only
while its term is the latest; otherwise its outcome is ``Deposed``. A
barrier is added only while nobody holds it and the node's share is the named one, and is removed only by the
session that added it. A share is the named one until the node has read a later one, or until no share names
the resource any more.

**Operator requests.** They take effect in the order in which they were made, or not at all (RB-44). Each
names the revision of the last one that took effect, and is refused if another came first. The client then
retries.

**Order.** Revisions of one group only grow, and so do the tokens of one resource. A command sent after
another was answered takes effect after it.

**Unknown outcomes.** ``Failed`` with ``unknown`` means that the command
may have taken effect, or may take effect later, until something has happened that its guards forbid. Without
``unknown`` it had no effect and will have none. Commands sent again are idempotent: registering the same node
id creates no second member, and adding a barrier that the same session holds returns its token.

**Notices.** A notice is a hint that a watched topic changed at or after a revision. Hints may be doubled, but
are never all lost: after a gap every watched topic gets one. The conformance suite for all of this is
``rebalanser.testing.coordinator_suite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rebalanser.core.group.messages import Command, Noticed, Outcome
from rebalanser.core.group.types import (
    SPEC_FIELDS,
    Group,
    Leadership,
    Member,
    NodeId,
    Policy,
    ResourceSpec,
    Topic,
    record,
)
from rebalanser.registry.contract import Capabilities, LeaseAge

Listener: TypeAlias = Callable[[Sequence[Noticed]], None]
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of items of a long change that are done."""
MAX_OPERATOR_TRIES: Final = 100
"""Maximum tries of an operator request while other requests keep taking effect first."""
OVERTAKEN: Final = (
    f"gave up after {MAX_OPERATOR_TRIES} tries: other operator requests kept coming first; "
    "what was written stays, try again"
)


@record
class Holding:
    """A barrier: the resource, the node that holds it, and the fencing token."""

    resource: str
    node: str
    token: int


@dataclass(frozen=True, slots=True)
class HoldingsRead:
    """Barriers and members that were read, by resource and by node; None stands for one that is not there."""

    revision: int
    """The store's revision before any of it was read, or at it."""
    holdings: Mapping[str, Holding | None]
    members: Mapping[NodeId, Member | None]
    """The holders among them."""
    whole: bool
    """True if these are all barriers and all members."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """All of a group at one revision, with its leader and its barriers."""

    group: Group
    leadership: Leadership | None
    holdings: tuple[Holding, ...]
    troubles: Mapping[str, str] = field(default_factory=dict)
    """Recent errors of the application, by node label."""

    @property
    def exists(self) -> bool:
        """True if the store has anything of the group, such as a trace of former resources."""
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
        """Abilities and limits of the store."""

    @abstractmethod
    def perform(self, command: Command) -> Outcome:
        """Carry out a command and wait for its outcome. Every failure is an outcome, never an exception."""

    @abstractmethod
    def watch(self, node: NodeId, topics: Mapping[Topic, int], listener: Listener) -> None:
        """Watch exactly these topics, new ones from their revisions on; known ones continue.

        ``node`` is the node whose shares are watched. ``listener`` must neither block nor raise.
        """

    @abstractmethod
    def read(self) -> GroupView:
        """Read all of the group and its barriers, at one revision (RB-19).

        Raises:
            RetryLater: the store could not be read now.
            FixConfiguration: a person must change something first.
        """

    def read_holdings(self, keys: Collection[str] | None = None) -> HoldingsRead:  # noqa: ARG002 - optional
        """Read all barriers with their holders, or only those at ``keys`` of notices; or all nevertheless.

        A store that has all of the group in memory has no reason to read less. Raises what ``read`` does.
        """
        view = self.read()
        holdings = {holding.resource: holding for holding in view.holdings}
        return HoldingsRead(view.group.revision, holdings, view.group.members, whole=True)

    def exists(self) -> bool:
        """Return ``GroupView.exists``. Raises what ``read`` does."""
        return self.read().exists

    def resource(self, name: str) -> ResourceSpec | None:
        """Read one resource; None if there is none. Raises what ``read`` does."""
        return self.read().group.resources.get(name)

    @abstractmethod
    def put_resources(
        self, specs: Sequence[ResourceSpec], progress: Progress, fields: frozenset[str] = SPEC_FIELDS
    ) -> int:
        """Add resources, or change existing ones. Return the number of new ones. Idempotent (RB-29).

        Of existing resources only the ``fields`` change.
        """

    @abstractmethod
    def weigh_resources(self, weights: Mapping[str, float], progress: Progress) -> int:
        """Change the weights of existing resources. Return the number of changes. Idempotent (AU-7, RB-29).

        Other fields of a resource stay, even if another client changes them at the same time.

        Raises:
            RetryLater: the store was away, or other requests kept coming first; what was written stays.
        """

    @abstractmethod
    def remove_resources(self, resources: Sequence[str], progress: Progress) -> int:
        """Remove resources, but not their barriers (RB-16). Return how many existed. Idempotent."""

    @abstractmethod
    def set_drained(self, label: str, drained: bool) -> None:
        """Drain the nodes with a label, or end that (RB-30). Idempotent."""

    @abstractmethod
    def policy(self) -> Policy:
        """Read the policy of the group; the default one if none was set.

        Raises:
            UnusableStore: a newer version wrote it, or no Rebalanser did.
            RetryLater: the store could not be read now.
        """

    @abstractmethod
    def set_policy(self, policy: Policy, fields: frozenset[str]) -> None:
        """Change these ``fields`` of the group's policy; the others stay. Idempotent (RB-38).

        Raises:
            UnusableStore: the stored policy is one that ``policy()`` can't read; nothing was changed.
        """

    def note_trouble(self, label: str, error: str | None, for_s: float) -> None:  # noqa: B027 - optional
        """Keep a node's latest error for ``for_s`` seconds, or forget it; see ``GroupView``.

        It is for display only; a store without room for it may ignore it.
        """

    def heartbeats(self, nodes: Sequence[NodeId]) -> Mapping[NodeId, LeaseAge]:  # noqa: ARG002 - optional
        """Return the ages of live nodes' last heartbeats, for display, without writing.

        Empty if the store can't know them. Raises what ``read`` does.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the connection and all watches. Closing twice does nothing."""
