"""Operators that send requests over a faulty network, and checks of what comes of them.

The judgement knows nothing of epochs. A request whose end was reported to its operator must not take effect
once a request that was made after that has (RB-44). It changes only what it says, and what it is said to
have done is so unless another request changed it meanwhile (RB-29, RB-30).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from rebalanser.core.group.types import SPEC_FIELDS, Policy, Resource, ResourceSpec
from rebalanser.errors import RebalanserError
from rebalanser.registry import values
from rebalanser.registry.contract import Changed, KeyValue, WatchEvent
from rebalanser.registry.keys import GroupKeys
from rebalanser.registry.script import Script
from rebalanser.registry.translation import Translation
from simulation.group.network import Link
from simulation.group.oracle import OPERATOR
from simulation.group.process import CallerWorld, ScriptRunner
from simulation.kernel.clock import LocalClock
from simulation.kernel.reports import Violation

if TYPE_CHECKING:
    from simulation.kernel.scheduler import Scheduler
    from simulation.kernel.trace import Trace

COMMAND = "Operate"
"""The name of every request of an operator on the network."""


@dataclass(frozen=True)
class Change:
    """A change that an operator asks for: one of five kinds."""

    sentence: str
    put: tuple[ResourceSpec, ...] = ()
    fields: frozenset[str] = SPEC_FIELDS
    removed: tuple[Resource, ...] = ()
    weights: Mapping[Resource, float] = field(default_factory=lambda: MappingProxyType({}))
    drain: tuple[str, bool] | None = None
    policy: Policy | None = None

    def script(self, translation: Translation) -> Script[Any]:
        """Carry it out as ``Admin`` does."""

        def progress(_: int) -> None: ...

        if self.drain is not None:
            return translation.set_drained(*self.drain)
        if self.policy is not None:
            return translation.set_policy(self.policy, self.fields)
        if self.weights:
            return translation.weigh_resources(self.weights, progress)
        if self.removed:
            return translation.remove_resources(self.removed, progress)
        return translation.put_resources(self.put, progress, self.fields)

    def result(self, resource: Resource, before: ResourceSpec | None) -> ResourceSpec | None:
        """Return the resource after the change; ``before`` if the change does not affect it."""
        if resource in self.removed:
            return None
        if before is not None and resource in self.weights:
            return replace(before, weight=self.weights[resource])
        for spec in self.put:
            if spec.resource == resource:
                changed = {name: getattr(spec, name) for name in self.fields}
                return spec if before is None else replace(before, **changed)
        return before

    def policy_after(self, before: Policy) -> Policy:
        """Return the policy after the change."""
        if self.policy is None:
            return before
        return replace(before, **{name: getattr(self.policy, name) for name in self.fields})

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources that it is about."""
        return (*(spec.resource for spec in self.put), *self.removed, *self.weights)


@dataclass(eq=False)
class Request:
    """One request of an operator; ``ended_at`` is when the operator learned of its end, if at all."""

    origin: str
    change: Change
    made_at: float
    ended_at: float | None = None


class OperationsWorld(Protocol):
    """The world of the requests of operators."""

    keys: GroupKeys

    @property
    def now(self) -> float:
        """True time in seconds."""
        ...


class OperatorWorld(OperationsWorld, CallerWorld, Protocol):
    """The world of an operator."""

    scheduler: Scheduler
    trace: Trace
    translation: Translation
    operations: Operations

    def say(self, where: str, sentence: str) -> None:
        """Write a line to the trace."""


class Operations:
    """All requests of a group's operators, and what really came of them."""

    def __init__(self, world: OperationsWorld) -> None:
        self._world = world
        self.specs: dict[Resource, ResourceSpec] = {}
        """The resources, as the registry has them."""
        self.drained: set[str] = set()
        """The drained labels, as the registry has them."""
        self._specs: dict[Resource, list[tuple[int, ResourceSpec | None]]] = defaultdict(list)
        """Each resource since each revision that changed it; None where it was removed."""
        self._policies: list[tuple[int, Policy]] = [(0, Policy())]
        """The policy since each revision that changed it."""
        self._requests: dict[str, Request] = {}
        self._last: dict[str, tuple[Request, float]] = {}
        """Last request that changed each key, and its true time."""
        self._latest_made_at = float("-inf")
        """True time of the latest request among those that took effect."""

    @property
    def under_way(self) -> bool:
        """True if an operator waits for an answer."""
        return any(request.ended_at is None for request in self._requests.values())

    @property
    def policy(self) -> Policy:
        """The policy, as the registry has it."""
        return self._policies[-1][1]

    def policy_at(self, revision: int) -> Policy:
        """Return the policy as it was at a revision."""
        return next(policy for since, policy in reversed(self._policies) if since <= revision)

    def specs_at(self, revision: int) -> dict[Resource, ResourceSpec]:
        """Return the resources as they were at a revision."""
        found = {
            resource: next((spec for since, spec in reversed(known) if since <= revision), None)
            for resource, known in self._specs.items()
        }
        return {resource: spec for resource, spec in found.items() if spec is not None}

    def begin(self, change: Change) -> Request:
        """An operator makes a request."""
        request = Request(f"{OPERATOR} {len(self._requests)}", change, self._world.now)
        self._requests[request.origin] = request
        return request

    def changed(self, events: Sequence[WatchEvent], actor: str | None) -> None:
        """Keys of the group changed: judge what is for operators, and their own key."""
        keys = self._world.keys
        for event in events:
            if isinstance(event, Changed) and event.key.startswith(
                (keys.resources, keys.drains, keys.operator, keys.policy)
            ):
                self._changed(event, actor)

    def _changed(self, event: Changed, actor: str | None) -> None:
        keys, now = self._world.keys, self._world.now
        request = self._requests.get(actor or "")
        if request is None:
            raise Violation("RB-29", f"{actor} changed {event.key}, which is for operators")
        if request.ended_at is not None and self._latest_made_at > request.ended_at:
            raise Violation("RB-44", f"late, and after a later request: {request.change.sentence}")
        self._latest_made_at = max(self._latest_made_at, request.made_at)
        self._last[event.key] = (request, now)
        if event.key.startswith(keys.resources):
            self._resource_changed(request, event, keys.name(event.key, keys.resources))
        elif event.key.startswith(keys.drains):
            label = keys.name(event.key, keys.drains)
            (self.drained.discard if event.value is None else self.drained.add)(label)
        elif event.key == keys.policy:
            self._policy_changed(request, event)

    def _policy_changed(self, request: Request, event: Changed) -> None:
        entry = None
        if event.value is not None:
            entry = KeyValue(event.key, event.value, event.revision, event.revision)
        before, after = self.policy, values.load_policy(entry)
        if after != request.change.policy_after(before):
            raise Violation("RB-38", f"the policy became {after} from {before}: {request.change.sentence}")
        self._policies.append((event.revision, after))

    def _resource_changed(self, request: Request, event: Changed, resource: Resource) -> None:
        before = self.specs.get(resource)
        after = None
        if event.value is not None:
            entry = KeyValue(event.key, event.value, event.revision, event.revision)
            after = values.load_resource(resource, entry)
        if after != request.change.result(resource, before):
            raise Violation("RB-29", f"{resource} became {after} from {before}: {request.change.sentence}")
        self._specs[resource].append((event.revision, after))
        if after is None:
            self.specs.pop(resource, None)
        else:
            self.specs[resource] = after

    def ended(self, request: Request, error: RebalanserError | None) -> None:
        """The operator learns how its request ended."""
        request.ended_at = self._world.now
        if error is None:
            self._latest_made_at = max(self._latest_made_at, request.made_at)
            self._check_done(request)

    def _check_done(self, request: Request) -> None:
        change, keys = request.change, self._world.keys
        for resource in change.resources:
            before = self.specs.get(resource)
            if before != change.result(resource, before):
                self._check_overtaken(request, keys.resource(resource), "RB-29")
        if change.drain is not None:
            label, drained = change.drain
            if (label in self.drained) != drained:
                self._check_overtaken(request, keys.drain(label), "RB-30")
        if change.policy_after(self.policy) != self.policy:
            self._check_overtaken(request, keys.policy, "RB-38")

    def _check_overtaken(self, request: Request, key: str, rule: str) -> None:
        last, at = self._last.get(key, (request, 0.0))
        if last is request or at < request.made_at:
            raise Violation(rule, f"is said to be done, and is not: {request.change.sentence}")


class Operator:
    """A program that changes resources and drains, through a link of its own."""

    def __init__(self, world: OperatorWorld, label: str) -> None:
        self.world = world
        self.label = label
        self.link = Link()
        self.clock = LocalClock(0.0, 0.0)

    @property
    def now(self) -> float:
        """Seconds of its monotonic clock."""
        return self.world.now

    def post(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        """Let something reach it at a true time."""
        self.world.scheduler.at(at, action, *arguments)

    def ask(self, change: Change, failed: Callable[[], None] = lambda: None) -> None:
        """Make a request; ``failed`` is called if it ends with an error."""
        world = self.world
        request = world.operations.begin(change)
        if world.trace:
            world.say(self.label, change.sentence)

        def ended(result: Any) -> None:
            error = result if isinstance(result, RebalanserError) else None
            world.operations.ended(request, error)
            if world.trace:
                world.say(self.label, f"{error or 'done'}: {change.sentence}")
            if error is not None:
                failed()

        ScriptRunner(self, COMMAND, request.origin, change.script(world.translation), ended).begin()
