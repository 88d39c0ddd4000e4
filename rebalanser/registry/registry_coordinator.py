"""Any registry as a coordinator: drives the scripts of ``Translation`` and keeps its watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from rebalanser.core.group.messages import Command, Outcome
from rebalanser.core.group.types import SPEC_FIELDS, NodeId, Policy, ResourceSpec, Topic
from rebalanser.errors import (
    InternalError,
    InvalidName,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.registry import contract
from rebalanser.registry.contract import (
    Capabilities,
    KeepAlive,
    LeaseAge,
    Range,
    Registry,
    Request,
    Transaction,
    Watch,
    WatchEvent,
)
from rebalanser.registry.coordinator import Coordinator, GroupView, HoldingsRead, Listener, Progress
from rebalanser.registry.keys import GroupKeys
from rebalanser.registry.script import Answer, Script, all_entries, failure
from rebalanser.registry.translation import Translation
from rebalanser.registry.urls import parse_url

ResultT = TypeVar("ResultT")


def groups_in(registry: Registry, root: str, timeout_s: float) -> Iterator[str]:
    """Yield the names of the groups in a registry, in the order of their keys; one small request for each.

    Raises:
        RetryLater: the registry was away.
    """
    after = ""
    while True:
        answer = registry.execute(Transaction(then=(Range(f"{root}/", after, limit=1),)), timeout_s)
        if not isinstance(answer, contract.Outcome):
            raise InternalError(f"a transaction was answered with {answer!r}")
        found = all_entries(answer.results[0])
        if not found:
            return
        name, after = GroupKeys.group_of(found[0].key, root)
        if name is not None:
            yield name


class OwnedResource(Protocol):
    """A resource with the token of its owner, as ``rebalanser.Owned`` is."""

    resource: str
    token: int


def put_if_owned(
    registry: Registry,
    url: str,
    group: str,
    owned: OwnedResource,
    key: str,
    value: bytes,
    timeout_s: float = 5.0,
) -> bool:
    """Write a key of the application into a group's registry, if the resource is still owned with this token.

    The barrier guards the write, so that a late write of a former owner has no effect. ``url`` is the
    registry's URL. ``key`` must not be below the URL's prefix, which has the groups.

    Returns:
        True if the key was written, False if the resource has another owner or none.

    Raises:
        InvalidName: the key is below the groups' prefix.
        RetryLater: the registry was away; after ``OutcomeUnknown`` the key may be
            written.
    """
    root = parse_url(url).root
    if key == root or key.startswith(f"{root}/"):
        raise InvalidName(f"the key {key!r} is among those of the groups, below {root!r}: use another name")
    barrier = contract.Created(GroupKeys(root, group).barrier(owned.resource), owned.token)
    reply = registry.execute(Transaction((barrier,), (contract.Put(key, value),)), timeout_s)
    if not isinstance(reply, contract.Outcome):
        raise InternalError(f"a transaction was answered with {reply!r}")
    return reply.succeeded


class RegistryCoordinator(Coordinator):
    """One connection of a node or an operator to a group that lives in a registry.

    ``now`` is the monotonic clock of deadlines (seconds); ``timeout_s`` bounds each request. Closing the
    coordinator closes the registry.
    """

    def __init__(
        self, registry: Registry, root: str, group: str, now: Callable[[], float], timeout_s: float
    ) -> None:
        self._registry = registry
        self._now = now
        self._timeout_s = timeout_s
        self._translation = Translation(GroupKeys(root, group), registry.capabilities)
        self._lock = threading.Lock()
        self._watches: dict[tuple[NodeId, Topic], list[Watch]] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Abilities and limits of the registry."""
        return self._registry.capabilities

    def _drive(self, script: Script[ResultT]) -> ResultT:
        """Run a script; throw each error into it where it waits for the answer."""
        try:
            request = next(script)
            while True:
                sent_at = self._now()
                try:
                    reply = self._registry.execute(request, self._timeout_s)
                except RequestTooLarge as error:
                    request = script.throw(self._too_large(request, error))
                except RebalanserError as error:
                    request = script.throw(error)
                else:
                    request = script.send(Answer(reply, sent_at))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _too_large(self, request: Request, error: RequestTooLarge) -> RebalanserError:
        """Adopt a lower limit of the registry. A request within the former limit may be tried again."""
        capabilities = self._registry.capabilities
        policy = self._translation.policy
        self._translation = Translation(self._translation.keys, capabilities)
        self._translation.policy = policy
        transaction = request.proof if isinstance(request, KeepAlive) else request
        if not isinstance(transaction, Transaction) or transaction.length <= capabilities.max_operations:
            return error
        return RegistryUnavailable(
            f"the registry takes {capabilities.max_operations} operations in a transaction now, fewer than "
            "before; try again"
        )

    def perform(self, command: Command) -> Outcome:
        """Execute a command and wait for its outcome. Every failure is an outcome, never an exception."""
        try:
            return self._drive(self._translation.script(command))
        except InternalError:
            raise
        except RebalanserError as error:
            return failure(error)

    def watch(self, node: NodeId, topics: Mapping[Topic, int], listener: Listener) -> None:
        """Watch exactly these topics, new ones from their revisions on; known ones continue."""
        wanted = {(node, topic): revision for topic, revision in topics.items()}
        with self._lock:
            outdated = [key for key in self._watches if key not in wanted]
            closing = [watch for key in outdated for watch in self._watches.pop(key)]
            for key, revision in wanted.items():
                if key not in self._watches:
                    self._watches[key] = self._open(key[1], revision, listener)
        for watch in closing:
            watch.close()

    def _open(self, topic: Topic, revision: int, listener: Listener) -> list[Watch]:
        def sink(events: Sequence[WatchEvent]) -> None:
            notices = self._translation.notices(topic, events)
            if notices:
                listener(notices)

        targets = self._translation.targets(topic)
        return [self._registry.watch(target, revision, sink) for target in targets]

    def read(self) -> GroupView:
        """Read all of the group and its barriers, at one revision (RB-19)."""
        return self._drive(self._translation.read())

    def read_holdings(self, keys: Collection[str] | None = None) -> HoldingsRead:
        """Read all barriers with their holders, at one revision, or only those at ``keys`` of notices."""
        if keys is None:
            return self._drive(self._translation.holdings())
        return self._drive(self._translation.holdings_at(keys))

    def exists(self) -> bool:
        """Return True if the registry has anything of the group; reads a few keys only."""
        return self._drive(self._translation.exists())

    def resource(self, name: str) -> ResourceSpec | None:
        """Read one resource, by its key alone; None if there is none."""
        return self._drive(self._translation.resource(name))

    def heartbeats(self, nodes: Sequence[NodeId]) -> Mapping[NodeId, LeaseAge]:
        """Return the ages of live nodes' last heartbeats, which are those of their leases."""
        leases = self._drive(self._translation.leases(nodes))
        ages = self._registry.lease_ages(list(leases.values()), self._timeout_s)
        return {node: ages[lease] for node, lease in leases.items() if lease in ages}

    def put_resources(
        self, specs: Sequence[ResourceSpec], progress: Progress, fields: frozenset[str] = SPEC_FIELDS
    ) -> int:
        """Add resources, or change the ``fields`` of existing ones. Return the number of new ones (RB-29)."""
        return self._drive(self._translation.put_resources(specs, progress, fields))

    def weigh_resources(self, weights: Mapping[str, float], progress: Progress) -> int:
        """Change the weights of existing resources, and no other field (AU-7, RB-29)."""
        return self._drive(self._translation.weigh_resources(weights, progress))

    def remove_resources(self, resources: Sequence[str], progress: Progress) -> int:
        """Remove resources, but not their barriers (RB-16). Return how many existed."""
        return self._drive(self._translation.remove_resources(resources, progress))

    def set_drained(self, label: str, drained: bool) -> None:
        """Drain the nodes with a label, or end that (RB-30)."""
        self._drive(self._translation.set_drained(label, drained))

    def policy(self) -> Policy:
        """Read the policy of the group, by its key alone."""
        return self._drive(self._translation.stored_policy())

    def set_policy(self, policy: Policy, fields: frozenset[str]) -> None:
        """Change these fields of the group's policy (RB-38)."""
        self._drive(self._translation.set_policy(policy, fields))

    def note_trouble(self, label: str, error: str | None, for_s: float) -> None:
        """Keep a node's latest error for ``for_s`` seconds, or forget it."""
        self._drive(self._translation.note_trouble(label, error, for_s))

    def close(self) -> None:
        """Close all watches and the registry."""
        with self._lock:
            closing = [watch for watches in self._watches.values() for watch in watches]
            self._watches.clear()
        for watch in closing:
            watch.close()
        self._registry.close()
