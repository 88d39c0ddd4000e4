"""Administration of a group: its resources, its drains, its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from pydantic import StrictStr, TypeAdapter
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential, wait_random

from rebalanser.core.group import Member, Mode, Policy, ResourceSpec, SpreadOver, Topic, TopicKind
from rebalanser.core.group.messages import Noticed
from rebalanser.core.group.types import SPEC_FIELDS
from rebalanser.errors import (
    InvalidArgument,
    InvalidName,
    InvalidSettings,
    InvalidState,
    NotSettled,
    RebalanserError,
    RetryLater,
    UnknownGroup,
)
from rebalanser.group import open_coordinator
from rebalanser.redaction import redact
from rebalanser.registry import Coordinator
from rebalanser.registry.coordinator import HoldingsRead
from rebalanser.registry.keys import check_attribute, check_name, check_tags
from rebalanser.registry.urls import url_or_default
from rebalanser.registry.values import MoveCount, NotNegative, Weight
from rebalanser.runtime.clock import SystemClock
from rebalanser.settings import Settings, check_argument, check_timeout

if TYPE_CHECKING:
    from rebalanser.explanation import Explanation
    from rebalanser.plan import GroupPlan
    from rebalanser.state import GroupState, ResourceState

ResultT = TypeVar("ResultT")


class Unchanged(Enum):
    """Stands for an argument that was not given."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED
Progress = Callable[[int, int], None]
"""``progress(done, total)``, called along a long change."""


def _no_progress(done: int, total: int) -> None:
    """No-op progress callback."""


_WEIGHT: Final = TypeAdapter[float](Weight)
_WEIGHTS: Final = TypeAdapter[Mapping[str, float]](Mapping[str, Weight])
_ATTRIBUTES: Final = TypeAdapter[Mapping[str, str]](Mapping[str, StrictStr])
_PINS: Final = TypeAdapter[Mapping[str, str | None]](Mapping[str, StrictStr | None])
_TAGS: Final = TypeAdapter[list[str]](list[StrictStr])
_POLICY: Final[Mapping[str, TypeAdapter[Any]]] = MappingProxyType(
    {
        "spread_over": TypeAdapter(SpreadOver),
        "imbalance_band": TypeAdapter(NotNegative),
        "max_moves": TypeAdapter(MoveCount | None),
        "move_interval_s": TypeAdapter(NotNegative),
        "cooldown_s": TypeAdapter(NotNegative),
    }
)


def _named(resources: Iterable[Any]) -> list[str]:
    """The names in the arguments; what is neither a name nor a list of names is taken for a name.

    Raises:
        InvalidArgument: an argument is a mapping, of which only the names would be taken.
    """
    names: list[str] = []
    for each in resources:
        if isinstance(each, Mapping):
            raise InvalidArgument("a mapping is given as names; pass it to add_each; nothing was changed")
        is_list = isinstance(each, Iterable) and not isinstance(each, (str, bytes))
        names.extend(each if is_list else [each])
    return names


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of a resource, if they can be stored.

    Raises:
        InvalidArgument: a value is of a wrong type or out of range, or there is no such field.
        InvalidName: a pin, a spread, a tag or an attribute can't be stored.
    """
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"give a mapping of its fields, not {type(given).__name__}")
    for name in given.keys() - SPEC_FIELDS:
        near = get_close_matches(str(name), SPEC_FIELDS, 1)
        hint = f"is {near[0]} meant?" if near else f"the fields are {', '.join(sorted(SPEC_FIELDS))}"
        raise InvalidArgument(f"{name}: no resource has such a field; {hint}")
    said = dict(given)
    if "weight" in said:
        check_argument(_WEIGHT, said["weight"], "weight")
    if "needs" in said:
        if isinstance(said["needs"], Mapping):
            raise InvalidArgument("needs: give a list of tags, not a mapping")
        needs = _named([said["needs"]])
        check_argument(_TAGS, needs, "needs")
        said["needs"] = check_tags(needs)
    for name, what in (("spread", "spread"), ("pin", "node")):
        if said.get(name) is not None:
            check_name(said[name], what)
    if "attributes" in said:
        check_argument(_ATTRIBUTES, said["attributes"], "attributes")
        for name, value in said["attributes"].items():
            check_attribute(name, value, "resource")
        said["attributes"] = dict(said["attributes"])
    return said


def _checked_policy(**given: Any) -> dict[str, Any]:
    """The fields of a policy that are given.

    Raises:
        InvalidArgument: a value is out of range.
    """
    changes = {name: value for name, value in given.items() if value is not UNCHANGED}
    for name, value in changes.items():
        check_argument(_POLICY[name], value, name)
    if "spread_over" in changes:
        changes["spread_over"] = SpreadOver(changes["spread_over"])
    return changes


def _checked_each(resources: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the given fields of each resource, if they can be stored.

    Raises:
        InvalidArgument: a value is of a wrong type or out of range, or there is no such field.
        InvalidName: a pin, a spread, a tag or an attribute can't be stored.
    """
    checked: dict[str, dict[str, Any]] = {}
    for name, given in resources.items():
        try:
            checked[name] = _checked(given)
        except RebalanserError as error:
            raise type(error)(f"resource {name!r}: {error}; nothing was changed") from None
    return checked


def _labels(given: Iterable[str]) -> list[str]:
    """The labels of nodes in an argument.

    Raises:
        InvalidName: a label can't be stored, or is given twice.
    """
    labels = _named([given])
    seen: set[str] = set()
    for label in labels:
        check_name(label, "node")
        if label in seen:
            raise InvalidName(f"node {label!r} is given twice")
        seen.add(label)
    return labels


def _nodes_to_come(given: Iterable[str] | Mapping[str, Mapping[str, Any]]) -> tuple[Member, ...]:
    """Members for a plan, by their labels and what their ``Settings`` would say of them.

    Raises:
        InvalidArgument: something is said of a node that is not among ``_NODE_FIELDS``, or is out of range.
        InvalidName: a label can't be stored.
    """
    offered: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    described = given if isinstance(given, Mapping) else dict.fromkeys(_labels(given), offered)
    _labels(list(described))
    members = []
    for label, offers in described.items():
        if not isinstance(offers, Mapping) or (unknown := sorted(offers.keys() - _NODE_FIELDS.keys())):
            what = unknown[0] if isinstance(offers, Mapping) else type(offers).__name__
            raise InvalidArgument(f"node {label!r}: {what}: give any of {', '.join(_NODE_FIELDS)}")
        try:
            settings = Settings(**{**_NODE_FIELDS, **offers})
        except InvalidSettings as error:
            raise InvalidArgument(f"node {label!r}: {error}") from None
        members.append(
            Member(
                "",
                label,
                mode=settings.mode,
                capacity=settings.capacity,
                tags=settings.tags,
                zone=settings.zone,
            )
        )
    return tuple(members)


_NODE_FIELDS: Final[Mapping[str, Any]] = MappingProxyType(
    {"capacity": None, "tags": (), "zone": "", "mode": Mode.COOPERATIVE}
)
"""The settings that matter to a plan of a node, with their defaults, whatever the environment says."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The node that owns a resource, and with which fencing token."""

    node: str
    """The node's id, which no other incarnation ever has."""
    label: str
    """The node's name for people, ``Group(…, node=…)``."""
    token: int
    """The fencing token: it grows from owner to owner."""
    host: str
    """The name of the node's host."""
    attributes: Mapping[str, str] = field(hash=False)
    """Attributes from the ``Settings`` of the node, such as an address."""


_BALANCE: Final = frozenset(map(Topic, (TopicKind.GROUP, TopicKind.ALLOCATION, TopicKind.ACKNOWLEDGEMENTS)))
"""Topics of what may make a group balanced."""
_OWNERS: Final = frozenset(map(Topic, (TopicKind.GROUP, TopicKind.BARRIERS)))
"""Topics of what may change owners."""
MAX_CHANGED_KEYS: Final = 1_000
"""Maximum number of changed keys that are read one by one; of more, all owners are read."""


class Changes(threading.Event):
    """Is set whenever owners may have changed, and knows which; made by ``Admin.changes``."""

    def __init__(self, topics: frozenset[Topic], read: Callable[[frozenset[str]], HoldingsRead]) -> None:
        super().__init__()
        self.topics = topics
        self._read = read
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._lost = False

    def note(self, notices: Iterable[Noticed]) -> None:
        """Take notices of the watch."""
        with self._lock:
            for noticed in notices:
                self._lost = self._lost or noticed.lost
                self._keys |= noticed.keys
            if len(self._keys) > MAX_CHANGED_KEYS:
                self._keys.clear()
                self._lost = True
        self.set()

    def clear(self) -> None:
        """Forget what has changed, before all of it is read."""
        self._take()

    def _take(self) -> frozenset[str] | None:
        """Return the keys that changed since the last call; None if some may be missing."""
        with self._lock:
            super().clear()
            keys = None if self._lost else frozenset(self._keys)
            self._keys.clear()
            self._lost = False
        return keys

    def owners(self, known: Mapping[str, Owner]) -> dict[str, Owner | None] | None:
        """Clear the event, and read the owners that have changed since it was cleared last.

        Returns:
            The present owners, by resource, of all resources of which the owner may be another than the
            ``known`` one; None if only reading all of them (``Admin.owners``) tells.

        Raises:
            RetryLater: the registry was away; all owners have to be read next.
        """
        keys = self._take()
        if not keys:
            return None if keys is None else {}
        read = self._read(keys)
        if read.whole:
            return {**dict.fromkeys(known), **_owners_in(read)}
        gone = {node for node, member in read.members.items() if member is None}
        orphaned = [resource for resource, owner in known.items() if owner.node in gone] if gone else []
        return {**dict.fromkeys((*orphaned, *read.holdings)), **_owners_in(read)}


def _owners_in(read: HoldingsRead) -> dict[str, Owner]:
    members = read.members
    return {
        resource: Owner(holding.node, member.label, holding.token, member.host, dict(member.attributes))
        for resource, holding in read.holdings.items()
        if holding is not None and (member := members.get(holding.node)) is not None
    }


class Admin:
    """An operator's connection to the group ``name`` in the registry at ``url``; it joins nothing.

    The registry is by default that of ``REBALANSER_REGISTRY``.

    Every change is idempotent and is tried again for ``timeout_s`` seconds while the registry is away. Only
    ``add`` makes a group; the other changes refuse one that is not there. Use it as a context manager, or
    ``close`` it. On ``kafka://`` a group has a topic, which is made if it is missing; with
    ``create=False`` nothing is made.

    Raises:
        UnknownGroup: with ``create=False`` only: the group has no topic.
        FixConfiguration: the name, the URL or the registry has to be changed by a person.
        RegistryUnavailable: the registry did not answer in time.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        timeout_s: float = 30.0,
        create: bool = True,
    ) -> None:
        self.name = name
        self._settings = Settings.of(settings)
        check_timeout(timeout_s)
        self._timeout_s = timeout_s
        self._closed = False
        self._watching = threading.Lock()
        self._listeners: list[Changes] = []
        self._url = url_or_default(url)
        self._coordinator: Coordinator = open_coordinator(
            name, self._url, self._settings, SystemClock(), create=create
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        self._closed = True
        self._coordinator.close()

    def _insist(self, operation: Callable[[], ResultT]) -> ResultT:
        """Try an idempotent operation again while the registry is away, for ``timeout_s`` at most."""
        if self._closed:
            raise InvalidState(f"the connection to group {self.name!r} is closed")
        attempts = Retrying(
            retry=retry_if_exception_type(RetryLater),
            stop=stop_after_delay(self._timeout_s),
            wait=wait_exponential(multiplier=0.05, max=2.0) + wait_random(0, 0.05),
            reraise=True,
        )
        return attempts(operation)

    def exists(self) -> bool:
        """Return True if anything is known of the group: it has, or had, nodes or resources."""
        return self._insist(self._coordinator.exists)

    def _refuse_unknown(self) -> None:
        if not self.exists():
            raise UnknownGroup(f"no such group: {self.name!r} in {redact(self._url)}")

    def add(
        self,
        *resources: str | Iterable[str],
        weight: float | Unchanged = UNCHANGED,
        needs: Iterable[str] | Unchanged = UNCHANGED,
        spread: str | Unchanged | None = UNCHANGED,
        pin: str | Unchanged | None = UNCHANGED,
        attributes: Mapping[str, str] | Unchanged = UNCHANGED,
        progress: Progress = _no_progress,
    ) -> int:
        """Add resources, or change existing ones; return the number of new ones (RB-29).

        What is not given stays as it is. All names are checked before anything is written.

        - ``weight``: its part of a node's load, 1 unless given, in any unit that the whole group shares.
        - ``needs``: the tags that its node must have (``Settings(tags=…)``); a text is one tag. They are
          replaced as a whole.
        - ``spread``: resources with the same word are on distinct nodes, or in distinct zones
          (``configure(spread_over=…)``); None for none.
        - ``pin``: the label of the only node that may own it; None lets every node own it again.
        - ``attributes``: what its owner reads of it. They are replaced as a whole.

        Raises:
            InvalidName: a name can't be stored, or is given twice; nothing was changed.
            InvalidArgument: the weight is not a positive number, or an attribute no text; nothing changed.
            RetryLater: the registry was away; what was written stays, and adding again completes it.
        """
        names = _named(resources)
        self._check(names)
        given = {"weight": weight, "needs": needs, "spread": spread, "pin": pin, "attributes": attributes}
        said = _checked({name: value for name, value in given.items() if value is not UNCHANGED})
        return self._put([ResourceSpec(name, **said) for name in names], frozenset(said), progress)

    def add_each(
        self, resources: Mapping[str, Mapping[str, Any]], *, progress: Progress = _no_progress
    ) -> int:
        """Add resources, each with its own weight, needs and so on; return the number of new ones (RB-29).

        ``resources`` has for each name what ``add`` takes: ``{"db-1": {"weight": 2, "needs": ["ssd"]}}``.
        Everything is checked before anything is written.

        Raises:
            InvalidName: a name can't be stored; nothing was changed.
            InvalidArgument: a field is not one that ``add`` takes, or is invalid; nothing was changed.
            RetryLater: the registry was away; what was written stays, and adding again completes it.
        """
        if not isinstance(resources, Mapping):
            raise InvalidArgument(f"resources must be a mapping from names, not {type(resources).__name__}")
        self._check(list(resources))
        by_fields: dict[frozenset[str], list[ResourceSpec]] = {}
        for name, said in _checked_each(resources).items():
            by_fields.setdefault(frozenset(said), []).append(ResourceSpec(name, **said))
        added = done = 0
        for fields, specs in by_fields.items():
            before = done

            def shown(done: int, _of: int, before: int = before) -> None:
                progress(before + done, len(resources))

            added += self._put(specs, fields, shown)
            done += len(specs)
        return added

    def _put(self, specs: list[ResourceSpec], fields: frozenset[str], progress: Progress) -> int:
        if not specs:
            return 0
        return self._insist(
            lambda: self._coordinator.put_resources(specs, lambda n: progress(n, len(specs)), fields)
        )

    def weigh(self, weights: Mapping[str, float], *, progress: Progress = _no_progress) -> int:
        """Change the weights of resources, and nothing else that is said of them; how many changed (AU-7).

        Resources that are not there stay away. All weights are checked before anything is written.

        Raises:
            InvalidName: a name can't be stored; nothing was changed.
            InvalidArgument: a weight is not a positive number; nothing was changed.
            UnknownGroup: there is no such group.
            RetryLater: the registry was away, or others changed the same resources all the time; what was
                written stays, and weighing again completes it.
        """
        check_argument(_WEIGHTS, weights, "weights")
        self._check(list(weights))
        self._refuse_unknown()
        return self._insist(
            lambda: self._coordinator.weigh_resources(weights, lambda n: progress(n, len(weights)))
        )

    def remove(self, *resources: str | Iterable[str], progress: Progress = _no_progress) -> int:
        """Remove resources; how many there were. Their owners stop; barriers are left alone (RB-16).

        Raises:
            InvalidName: a name can't be stored, or is given twice; nothing was changed.
            UnknownGroup: there is no such group.
            RetryLater: the registry was away; removing again completes it.
        """
        names = _named(resources)
        self._check(names)
        self._refuse_unknown()
        return self._insist(
            lambda: self._coordinator.remove_resources(names, lambda n: progress(n, len(names)))
        )

    def _check(self, names: list[str]) -> None:
        seen: set[str] = set()
        for number, name in enumerate(names, start=1):
            try:
                check_name(name, "resource")
            except InvalidName as error:
                raise InvalidName(f"{error} (number {number} of {len(names)}); nothing was changed") from None
            if name in seen:
                raise InvalidName(f"resource {name!r} is given twice; nothing was changed")
            seen.add(name)

    def resources(self) -> list[ResourceState]:
        """All resources with their owners, by name."""
        return [resource for resource in self.state().resources if not resource.removed]

    def drain(self, node: str) -> None:
        """Move all resources away from the nodes with this label, and give them none (RB-30).

        The mark stays until ``undrain``, also while no such node is there; ``state().drained`` has all.

        Raises:
            UnknownGroup: there is no such group.
        """
        self._set_drained(node, drained=True)

    def undrain(self, node: str) -> None:
        """Let the nodes with this label own resources again.

        Raises:
            UnknownGroup: there is no such group.
        """
        self._set_drained(node, drained=False)

    def _set_drained(self, node: str, *, drained: bool) -> None:
        check_name(node, "node")
        self._refuse_unknown()
        self._insist(lambda: self._coordinator.set_drained(node, drained=drained))

    def policy(self) -> Policy:
        """The group's policy; the default one if ``configure`` was never called (RB-38).

        Raises:
            UnusableStore: a newer version of Rebalanser wrote it.
        """
        return self._insist(self._coordinator.policy)

    def configure(
        self,
        *,
        spread_over: SpreadOver | Literal["node", "zone"] | Unchanged = UNCHANGED,
        imbalance_band: float | Unchanged = UNCHANGED,
        max_moves: int | Unchanged | None = UNCHANGED,
        move_interval_s: float | Unchanged = UNCHANGED,
        cooldown_s: float | Unchanged = UNCHANGED,
    ) -> None:
        """Change the group's policy, by which every leader allocates (RB-38).

        What is not given stays as it is.

        - ``spread_over``: what resources with the same ``spread`` are kept apart by, ``node`` or ``zone``.
        - ``imbalance_band``: the part by which the largest load may exceed the lower bound before anything
          moves to lower it; 0.1 is a tenth.
        - ``max_moves``: the most resources that one rebalance moves for a better balance; None for no limit.
        - ``move_interval_s``: minimum seconds between two rebalances that only improve the balance.
        - ``cooldown_s``: seconds after a move in which a resource does not move again for a better balance.

        Raises:
            InvalidArgument: a value is out of range; nothing was changed.
            UnknownGroup: there is no such group.
            UnusableStore: a newer version of Rebalanser wrote the policy; nothing was changed.
        """
        changes = _checked_policy(
            spread_over=spread_over,
            imbalance_band=imbalance_band,
            max_moves=max_moves,
            move_interval_s=move_interval_s,
            cooldown_s=cooldown_s,
        )
        self._refuse_unknown()
        self._insist(lambda: self._coordinator.set_policy(Policy(**changes), frozenset(changes)))

    def state(self) -> GroupState:
        """The group at one revision: nodes, resources, owners, and whether it is balanced (RB-19)."""
        from rebalanser.state import describe  # noqa: PLC0415 - its models are slow to import

        return describe(self.name, self._insist(self._coordinator.read))

    def plan(
        self,
        *,
        add_nodes: Iterable[str] | Mapping[str, Mapping[str, Any]] = (),
        remove_nodes: Iterable[str] = (),
        drain: Iterable[str] = (),
        undrain: Iterable[str] = (),
        add: Iterable[str] | Mapping[str, Mapping[str, Any]] = (),
        remove: Iterable[str] = (),
        weights: Mapping[str, float] = MappingProxyType({}),
        pins: Mapping[str, str | None] = MappingProxyType({}),
        spread_over: SpreadOver | Literal["node", "zone"] | Unchanged = UNCHANGED,
        imbalance_band: float | Unchanged = UNCHANGED,
        max_moves: int | Unchanged | None = UNCHANGED,
        move_interval_s: float | Unchanged = UNCHANGED,
        cooldown_s: float | Unchanged = UNCHANGED,
    ) -> GroupPlan:
        """Return what the next allocation would do about a change; nothing is written (RB-35).

        All is one change of the group as it is now, allocated by the leader's own code. Without a change it
        is what the leader is about to do anyway. A text is one name.

        - ``add_nodes``: labels of nodes to come, or for each label what it offers:
          ``{"w9": {"capacity": 8, "tags": ["gpu"], "zone": "eu-1", "mode": "eager"}}``.
        - ``remove_nodes``, ``drain``, ``undrain``: labels of live nodes; also drained ones for ``undrain``.
        - ``add``: resources as ``add`` takes them, or as ``add_each`` does; ``remove``: resources that are
          there.
        - ``weights``, ``pins``: the weight or pin of resources that are there, or are added; a pin of None
          lets every node own the resource.
        - The others are the group's policy, as ``configure`` takes it.

        Raises:
            InvalidArgument: a node or resource is not there, a value is out of range, or parts of the change
                contradict each other.
            InvalidName: a name can't be stored, or is given twice.
            UnknownGroup: there is no such group.
        """
        from rebalanser.plan import GroupChange, plan_change  # noqa: PLC0415 - its models are slow to import

        said: Mapping[str, Any] = MappingProxyType({})
        put = add if isinstance(add, Mapping) else dict.fromkeys(self._checked_names(add), said)
        check_argument(_WEIGHTS, weights, "weights")
        check_argument(_PINS, pins, "pins")
        self._check(list(put))
        _labels({label for label in pins.values() if label is not None})
        change = GroupChange(
            nodes_added=_nodes_to_come(add_nodes),
            nodes_removed=frozenset(_labels(remove_nodes)),
            drained=frozenset(_labels(drain)),
            undrained=frozenset(_labels(undrain)),
            put=_checked_each(put),
            removed=frozenset(self._checked_names(remove)),
            weights=weights,
            pins=pins,
            policy=_checked_policy(
                spread_over=spread_over,
                imbalance_band=imbalance_band,
                max_moves=max_moves,
                move_interval_s=move_interval_s,
                cooldown_s=cooldown_s,
            ),
        )
        change.check()
        self._refuse_unknown()
        view = self._insist(self._coordinator.read)
        return plan_change(self.name, view, change, self._settings.timings)

    def _checked_names(self, given: Iterable[str]) -> list[str]:
        names = _named([given])
        self._check(names)
        return names

    def explain(self, resource: str) -> Explanation:
        """Return why a resource is where it is, why it is on no other node, and what it waits for (RB-35).

        Raises:
            InvalidArgument: there is no such resource.
            UnknownGroup: there is no such group.
        """
        from rebalanser.explanation import explain  # noqa: PLC0415 - its models are slow to import

        check_name(resource, "resource")
        self._refuse_unknown()
        return explain(self.name, self._insist(self._coordinator.read), resource)

    def wait_balanced(self, timeout_s: float = 30.0) -> GroupState:
        """Wait until every resource that can be placed has its owner, and all nodes have completed.

        Raises:
            NotSettled: it is not so within ``timeout_s`` seconds; the message says what is missing, and what
                handlers and workers raised lately.
        """
        check_timeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        with self._watched(_BALANCE) as changed:
            while not (state := self.state()).balanced:
                if not changed.wait(max(0.0, deadline - time.monotonic())):
                    raise NotSettled(_unbalanced(state, timeout_s))
                changed.clear()
        return state

    def owners(self) -> dict[str, Owner]:
        """The present owners, by resource; resources without an owner are left out."""
        return _owners_in(self._insist(self._coordinator.read_holdings))

    def changes(self) -> AbstractContextManager[Changes]:
        """Have an event set whenever owners may have changed; all that listen share one watch."""
        return self._watched(_OWNERS)

    @contextmanager
    def _watched(self, topics: frozenset[Topic]) -> Iterator[Changes]:
        changed = Changes(topics, self._read_holdings)
        with self._watching:
            revision = self._read_holdings(frozenset()).revision
            self._listeners.append(changed)
            try:
                self._watch_from(revision + 1)
            except BaseException:
                self._listeners.remove(changed)
                raise
        try:
            yield changed
        finally:
            with self._watching:
                self._listeners.remove(changed)
                self._watch_from(0)

    def _read_holdings(self, keys: frozenset[str]) -> HoldingsRead:
        return self._insist(lambda: self._coordinator.read_holdings(keys))

    def _watch_from(self, revision: int) -> None:
        """Watch the topics of all that listen; those that are not watched yet from this revision on."""
        listeners = [] if self._closed else self._listeners
        topics = {topic for changed in listeners for topic in changed.topics}
        self._coordinator.watch("", dict.fromkeys(topics, revision), self._notify)

    def _notify(self, notices: Sequence[Noticed]) -> None:
        kinds = {noticed.topic.kind for noticed in notices}
        for changed in tuple(self._listeners):
            if any(topic.kind in kinds for topic in changed.topics):
                changed.note(notices)


def _unbalanced(state: GroupState, timeout_s: float) -> str:
    waiting = [node.label for node in state.nodes if not node.completed]
    reason = f"waiting for {', '.join(waiting[:5])}" if waiting else "waiting for a new allocation"
    if state.leader is None:
        reason = "it has no leader" if state.nodes else "it has no nodes"
    if state.trouble is not None:
        reason += f"; {state.trouble}"
    reason += "".join(f"; lately on {label}: {text}" for label, text in islice(state.troubles.items(), 5))
    return f"group {state.group!r} is not balanced after {timeout_s:g} s: {reason} (version {state.version})"
