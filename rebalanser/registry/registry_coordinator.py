"""Any registry as a coordinator: drives the dialogues of :class:`Translation` and keeps its watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from rebalanser.errors import (
    InternalError,
    InvalidName,
    RebalanserError,
    RegistryUnavailable,
    RequestTooLarge,
)
from rebalanser.protocol.messages import Command, Outcome
from rebalanser.protocol.types import SAID, NodeId, ResourceSpec, Topic
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
from rebalanser.registry.coordinator import Coordinator, GroupView, Listener, Progress
from rebalanser.registry.dialogue import Answer, Reading, all_entries, failure
from rebalanser.registry.keys import GroupKeys
from rebalanser.registry.translation import Translation
from rebalanser.registry.urls import parse_url

ResultT = TypeVar("ResultT")


def groups_in(registry: Registry, root: str, timeout_s: float) -> Iterator[str]:
    """The names of the groups in a registry, in the order of their keys; one small request for each.

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
    """A resource with the token of its owner, as :class:`rebalanser.Owned` is."""

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
    """Write a key of one's own into the registry of a group, if the resource is still owned with this token.

    The barrier guards the write, so that none of an owner before takes effect. ``url`` is what the registry
    was opened with, and ``key`` begins with a name that is not the one below which the groups live.

    Returns:
        True if it was written, False if another owns the resource, or nobody.

    Raises:
        InvalidName: the key lies among those of the groups.
        RetryLater: the registry was away; with :class:`~rebalanser.errors.OutcomeUnknown` it may be written.
    """
    root = parse_url(url).root
    if key == root or key.startswith(f"{root}/"):
        raise InvalidName(f"the key {key!r} lies among those of the groups, below {root!r}: use another name")
    barrier = contract.Created(GroupKeys(root, group).barrier(owned.resource), owned.token)
    reply = registry.execute(Transaction((barrier,), (contract.Put(key, value),)), timeout_s)
    if not isinstance(reply, contract.Outcome):
        raise InternalError(f"a transaction was answered with {reply!r}")
    return reply.succeeded


class RegistryCoordinator(Coordinator):
    """One connection of a node or an operator to a group that lives in a registry.

    ``now`` is the monotonic clock (seconds) that deadlines are counted on; ``timeout_s`` bounds each
    request. The registry is closed with the coordinator.
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
        """What the registry can do."""
        return self._registry.capabilities

    def _drive(self, dialogue: Reading[ResultT]) -> ResultT:
        """Carry out a dialogue, telling it of each error where it waits for the answer."""
        try:
            request = next(dialogue)
            while True:
                sent_at = self._now()
                try:
                    reply = self._registry.execute(request, self._timeout_s)
                except RequestTooLarge as error:
                    request = dialogue.throw(self._too_large(request, error))
                except RebalanserError as error:
                    request = dialogue.throw(error)
                else:
                    request = dialogue.send(Answer(reply, sent_at))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _too_large(self, request: Request, error: RequestTooLarge) -> RebalanserError:
        """Take in a limit that became lower. A request within the former one may be tried again, in parts."""
        capabilities = self._registry.capabilities
        self._translation = Translation(self._translation.keys, capabilities)
        transaction = request.proof if isinstance(request, KeepAlive) else request
        if not isinstance(transaction, Transaction) or transaction.length <= capabilities.max_operations:
            return error
        return RegistryUnavailable(
            f"the registry takes {capabilities.max_operations} operations in a transaction now, fewer than "
            "before; try again"
        )

    def perform(self, command: Command) -> Outcome:
        """Carry out a command, waiting for its answer. Every failure is an outcome, never an exception."""
        try:
            return self._drive(self._translation.dialogue(command))
        except InternalError:
            raise
        except RebalanserError as error:
            return failure(error)

    def watch(self, node: NodeId, topics: Mapping[Topic, int], listener: Listener) -> None:
        """Watch exactly these topics, a new one from its revision on; those watched before go on."""
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
        """All of the group and its barriers, at one revision, for anyone who asks (RB-19)."""
        return self._drive(self._translation.read())

    def exists(self) -> bool:
        """Return True if anything is known of the group, by reading a few keys of it."""
        return self._drive(self._translation.exists())

    def resource(self, name: str) -> ResourceSpec | None:
        """What an operator said of a resource, by reading its key alone."""
        return self._drive(self._translation.resource(name))

    def heartbeats(self, nodes: Sequence[NodeId]) -> Mapping[NodeId, LeaseAge]:
        """The age of the last heartbeat of those nodes that live: that of their leases."""
        leases = self._drive(self._translation.leases(nodes))
        ages = self._registry.lease_ages(list(leases.values()), self._timeout_s)
        return {node: ages[lease] for node, lease in leases.items() if lease in ages}

    def put_resources(
        self, specs: Sequence[ResourceSpec], progress: Progress, said: frozenset[str] = SAID
    ) -> int:
        """Add resources, or change this of them; how many are new (RB-29)."""
        return self._drive(self._translation.put_resources(specs, progress, said))

    def weigh_resources(self, weights: Mapping[str, float], progress: Progress) -> int:
        """Change the weights of those resources that are there, and nothing else of them (AU-7, RB-29)."""
        return self._drive(self._translation.weigh_resources(weights, progress))

    def remove_resources(self, resources: Sequence[str], progress: Progress) -> int:
        """Remove resources; how many there were. Barriers are left alone (RB-16)."""
        return self._drive(self._translation.remove_resources(resources, progress))

    def set_drained(self, label: str, drained: bool) -> None:
        """Mark a node as drained, or not (RB-30)."""
        self._drive(self._translation.set_drained(label, drained))

    def note_trouble(self, label: str, error: str | None, for_s: float) -> None:
        """Keep for ``for_s`` seconds what went wrong on a node, or forget it."""
        self._drive(self._translation.note_trouble(label, error, for_s))

    def close(self) -> None:
        """Close all watches and the registry."""
        with self._lock:
            closing = [watch for watches in self._watches.values() for watch in watches]
            self._watches.clear()
        for watch in closing:
            watch.close()
        self._registry.close()
