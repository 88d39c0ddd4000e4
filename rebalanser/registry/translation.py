"""The translation of the protocol's commands and of operator requests into scripts.

``registry.script`` defines scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

from rebalanser.core.group.messages import (
    Acknowledge,
    AddBarriers,
    Campaign,
    Command,
    Heartbeat,
    Join,
    Leave,
    Noticed,
    Publish,
    ReadBarriers,
    ReadGroup,
    ReadShare,
    RecordReleases,
    RemoveBarriers,
    Resign,
)
from rebalanser.core.group.types import (
    SPEC_FIELDS,
    Member,
    NodeId,
    Policy,
    Resource,
    ResourceSpec,
    Topic,
    TopicKind,
)
from rebalanser.errors import InternalError, RegistryUnavailable, UnusableStore
from rebalanser.redaction import redact
from rebalanser.registry import values
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Delete,
    Get,
    Grant,
    Granted,
    HistoryLost,
    KeyValue,
    Operation,
    Put,
    Range,
    Target,
    Transaction,
    Unchanged,
    WatchEvent,
)
from rebalanser.registry.coordinator import (
    MAX_OPERATOR_TRIES,
    OVERTAKEN,
    GroupView,
    Holding,
    HoldingsRead,
    Progress,
)
from rebalanser.registry.leader_scripts import MAX_ERROR_CHARS, LeaderScripts
from rebalanser.registry.member_scripts import MemberScripts
from rebalanser.registry.script import (
    CommandScript,
    Script,
    all_entries,
    one_entry,
    outcome_of,
    readable,
)

CHANGES_KEPT: Final = 100
"""Number of operator writes whose records are kept; a leader that has missed more reads the whole group."""
Found: TypeAlias = Mapping[str, KeyValue]
"""The entries that were read, by key."""


class Translation(MemberScripts, LeaderScripts):
    """Translates commands of one group into scripts, and events of watches into notices."""

    def script(self, command: Command) -> CommandScript:
        """Return the script that executes a command."""
        match command:
            case Join():
                return self._join(command)
            case Heartbeat():
                return self._heartbeat(command)
            case (
                ReadShare()
                | ReadBarriers()
                | AddBarriers()
                | RemoveBarriers()
                | Acknowledge()
                | RecordReleases()
                | Leave()
            ):
                return self._member_script(command)
            case Campaign():
                return self._campaign(command)
            case Resign():
                return self._resign(command)
            case ReadGroup():
                return self._read_group(command)
            case Publish():
                return self._publish(command)

    def _member_script(
        self,
        command: ReadShare
        | ReadBarriers
        | AddBarriers
        | RemoveBarriers
        | Acknowledge
        | RecordReleases
        | Leave,
    ) -> CommandScript:
        match command:
            case ReadShare():
                return self._read_share(command)
            case ReadBarriers():
                return self._read_barriers(command)
            case AddBarriers():
                return self._add_barriers(command)
            case RemoveBarriers():
                return self._remove_barriers(command)
            case Acknowledge():
                return self._acknowledge(command)
            case RecordReleases():
                return self._record_releases(command)
            case Leave():
                return self._leave(command)

    def read(self) -> Script[GroupView]:
        """Read all of the group and its barriers, at one revision."""
        keys = self.keys
        reads = (*self._group_reads(), Range(keys.barriers), Get(keys.term), Range(keys.troubles))
        answer = yield Transaction(then=reads)
        outcome = outcome_of(answer)
        barriers, term, troubles = outcome.results[len(self._group_reads()) :]
        leadership = one_entry(term)
        unreadable: dict[str, str] = {}
        holdings = readable(all_entries(barriers), self._holding, unreadable)
        errors = readable(all_entries(troubles), self._trouble, unreadable)
        group = self._group_in(outcome)
        return GroupView(
            group=replace(group, unreadable={**group.unreadable, **unreadable}),
            leadership=values.load_leadership(leadership) if leadership else None,
            holdings=tuple(holdings.values()),
            troubles=errors,
        )

    def _trouble(self, entry: KeyValue) -> tuple[str, str]:
        return self.keys.name(entry.key, self.keys.troubles), entry.value.decode(errors="replace")

    def _holding(self, entry: KeyValue) -> tuple[Resource, Holding]:
        resource = self.keys.resource_of_barrier(entry.key)
        return resource, Holding(resource, entry.value.decode(errors="replace"), entry.create_revision)

    def holdings(self) -> Script[HoldingsRead]:
        """Read all barriers and members, and nothing else of the group, at one revision."""
        reads = (Range(self.keys.nodes), Range(self.keys.barriers))
        outcome = outcome_of((yield Transaction(then=reads)))
        nodes, barriers = map(all_entries, outcome.results)
        members = readable(nodes, self._member, {})
        return HoldingsRead(outcome.revision, readable(barriers, self._holding, {}), members, whole=True)

    def holdings_at(self, keys: Collection[str]) -> Script[HoldingsRead]:
        """Read these barriers and members by their keys, and the members that hold the barriers.

        Other keys are ignored. Keys that do not fit in one transaction are read at several revisions. A
        barrier and its holder's key end with one lease, so a holder that is gone by then left no barrier.
        """
        folders = (self.keys.barriers, self.keys.nodes)
        wanted = [key for key in keys if key.startswith(folders)]
        revision, found = yield from self._read_keys(wanted or [self.keys.header])
        holdings: dict[Resource, Holding | None] = {}
        for key, entry in found.items():
            if key.startswith(self.keys.barriers):
                with suppress(UnusableStore):
                    resource = self.keys.resource_of_barrier(key)
                    holdings[resource] = self._holding(entry)[1] if entry else None
        holders = {self.keys.node(each.node) for each in holdings.values() if each is not None}
        if unread := holders - found.keys():
            found |= (yield from self._read_keys(unread))[1]
        members: dict[NodeId, Member | None] = {}
        for key, entry in found.items():
            if key.startswith(self.keys.nodes):
                with suppress(UnusableStore):
                    node = self.keys.name(key, self.keys.nodes)
                    members[node] = None
                    if entry is not None:
                        members[node] = values.load_member(node, entry)
        return HoldingsRead(revision, holdings, members, whole=False)

    def _read_keys(self, keys: Collection[str]) -> Script[tuple[int, dict[str, KeyValue | None]]]:
        """Read keys, in as few transactions as the limits allow; the revision is that of the first one."""
        found: dict[str, KeyValue | None] = {}
        revision = 0
        for chunk in self._chunks((key, len(key)) for key in sorted(keys)):
            outcome = outcome_of((yield Transaction(then=tuple(map(Get, chunk)))))
            revision = revision or outcome.revision
            found.update(zip(chunk, map(one_entry, outcome.results), strict=True))
        return revision, found

    def exists(self) -> Script[bool]:
        """Return True if the group exists; reads one key of each sort that shows it.

        A request of an operator shows it only if it changed anything.
        """
        keys = self.keys
        single = (keys.operator, keys.header, keys.term)
        folders = (keys.nodes, keys.resources, keys.drains, keys.barriers)
        reads: tuple[Operation, ...] = (*map(Get, single), *(Range(folder, limit=1) for folder in folders))
        operator, *others = outcome_of((yield Transaction(then=reads))).results
        return any(others) or values.load_changes(one_entry(operator)) > 0

    def resource(self, name: Resource) -> Script[ResourceSpec | None]:
        """Read one resource; None if there is none."""
        outcome = outcome_of((yield Transaction(then=(Get(self.keys.resource(name)),))))
        entry = one_entry(outcome.results[0])
        return None if entry is None else values.load_resource(name, entry)

    def stored_policy(self) -> Script[Policy]:
        """Read the policy; the default one if none was set."""
        outcome = outcome_of((yield Transaction(then=(Get(self.keys.policy),))))
        return values.load_policy(one_entry(outcome.results[0]))

    def leases(self, nodes: Sequence[NodeId]) -> Script[Mapping[NodeId, int]]:
        """Return the leases of the live ones of these nodes."""
        found: dict[NodeId, int] = {}
        for start in range(0, len(nodes), self._max_operations):
            some = nodes[start : start + self._max_operations]
            reads = tuple([Get(self.keys.node(node), keys_only=True) for node in some])
            entries = map(one_entry, outcome_of((yield Transaction(then=reads))).results)
            found.update({node: entry.lease for node, entry in zip(some, entries, strict=True) if entry})
        return found

    def put_resources(
        self, specs: Sequence[ResourceSpec], progress: Progress, fields: frozenset[str] = SPEC_FIELDS
    ) -> Script[int]:
        """Add resources, or change these fields of existing ones. Return the number of new ones."""

        def differing(found: Found) -> list[Put]:
            puts = (_put(self.keys.resource(spec.resource), spec, fields, found) for spec in specs)
            return [put for put in puts if put.key not in found or found[put.key].value != put.value]

        def new(chunk: Sequence[Put | Delete], found: Found) -> int:
            return sum(put.key not in found for put in chunk)

        keys = [self.keys.resource(spec.resource) for spec in specs]
        return (yield from self._change(self.keys.resources, keys, differing, new, progress))

    def weigh_resources(self, weights: Mapping[Resource, float], progress: Progress) -> Script[int]:
        """Change the weights of existing resources, and no other field. Return how many changed (AU-7)."""
        by_key = {self.keys.resource(resource): resource for resource in weights}

        def weighed(found: Found) -> list[Put]:
            specs = {
                key: replace(values.load_resource(resource, found[key]), weight=weights[resource])
                for key, resource in by_key.items()
                if key in found
            }
            puts = [Put(key, values.dump_resource(spec)) for key, spec in specs.items()]
            return [put for put in puts if put.value != found[put.key].value]

        return (yield from self._change(self.keys.resources, list(by_key), weighed, _all, progress))

    def remove_resources(self, resources: Sequence[Resource], progress: Progress) -> Script[int]:
        """Remove resources. Return how many existed."""
        keys = [self.keys.resource(resource) for resource in resources]

        def present(found: Found) -> list[Delete]:
            return [Delete(key) for key in keys if key in found]

        return (yield from self._change(self.keys.resources, keys, present, _all, progress))

    def set_drained(self, label: str, drained: bool) -> Script[None]:
        """Drain the nodes with a label, or end that."""
        key = self.keys.drain(label)

        def mark(found: Found) -> list[Put] | list[Delete]:
            if (key in found) == drained:
                return []
            return [Put(key, b"")] if drained else [Delete(key)]

        yield from self._change(self.keys.drains, [key], mark, _all, lambda _: None)

    def set_policy(self, policy: Policy, fields: frozenset[str]) -> Script[None]:
        """Change these fields of the policy."""
        key = self.keys.policy

        def changed(found: Found) -> list[Put] | list[Delete]:
            known = values.load_policy(found.get(key))
            new = replace(known, **{name: getattr(policy, name) for name in fields})
            if new == known:
                return []
            return [Delete(key)] if new == Policy() else [Put(key, values.dump_policy(new))]

        yield from self._change(key, [key], changed, _all, lambda _: None)

    def note_trouble(self, label: str, error: str | None, for_s: float) -> Script[None]:
        """Put the latest error of a node under a lease of its own, which is not renewed; or delete it."""
        key = self.keys.trouble(label)
        if error is None:
            yield Transaction(then=(Delete(key),))
            return
        granted = (yield Grant(for_s)).reply
        if not isinstance(granted, Granted):
            raise InternalError(f"a grant was answered with {granted!r}")
        text = redact(error).encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARS]
        yield Transaction(then=(Put(key, text.encode(), granted.lease),))

    def _change(
        self,
        prefix: str,
        keys: Sequence[str],
        compute: Callable[[Found], Sequence[Put | Delete]],
        count: Callable[[Sequence[Put | Delete], Found], int],
        progress: Progress,
    ) -> Script[int]:
        """Read these keys, all below a prefix, and write in chunks the changes computed from them.

        Keys that fit in one transaction are read alone, so that a small change costs little in a large group.
        Otherwise all keys below the prefix are read.

        If another operator request takes effect meanwhile, read again and start over (RB-44). Return the sum
        of ``count``.
        """
        few = len(keys) < self._max_operations and sum(map(len, keys)) <= self._chunk_bytes
        reads: tuple[Operation, ...] = tuple(map(Get, keys)) if few else (Range(prefix),)
        counted = tries = 0
        while tries < MAX_OPERATOR_TRIES:
            answer = yield Transaction(then=(*reads, Get(self.keys.operator)))
            *results, operator = outcome_of(answer).results
            entries = map(one_entry, results) if few else all_entries(results[0])
            found = {entry.key: entry for entry in entries if entry is not None}
            latest = one_entry(operator)
            epoch, requests = latest.mod_revision if latest else 0, values.load_changes(latest)
            changes = compute(found)
            done = len(keys) - len(changes)
            progress(done)
            # An empty chunk if there is nothing to write: that request has its place in the order too.
            for chunk in list(self._chunks((each, _size(each)) for each in changes)) or [[]]:
                requests += bool(chunk)
                outcome = outcome_of((yield self._in_epoch(epoch, requests, chunk)))
                if not outcome.succeeded:
                    tries += 1
                    break
                epoch, tries = outcome.revision, 0
                counted += count(chunk, found)
                done += len(chunk)
                progress(done)
            else:
                return counted
        raise RegistryUnavailable(OVERTAKEN)

    def _in_epoch(self, epoch: int, requests: int, operations: Sequence[Put | Delete]) -> Transaction:
        """Write for an operator and begin an epoch, if no other operator request took effect since ``epoch``.

        So a request that arrives late, after its operator has made another, has no effect (RB-44). ``epoch``
        is the revision at which the latest request took effect, 0 if there was none; ``requests`` counts
        those that have changed anything, this one too.
        """
        key = self.keys.operator
        bookkeeping: list[Operation] = [Put(key, values.dump_changes(requests))]
        if operations:
            changed = [operation.key.removeprefix(self.keys.prefix) for operation in operations]
            bookkeeping.append(Put(self.keys.change(requests), values.dump_change(changed)))
            if requests > CHANGES_KEPT:
                bookkeeping.append(Delete(self.keys.change(requests - CHANGES_KEPT)))
        return Transaction(
            guards=(Unchanged(key, epoch) if epoch else Absent(key),), then=(*operations, *bookkeeping)
        )

    def targets(self, topic: Topic) -> tuple[Target, ...]:
        """Return the targets to watch for a topic."""
        match topic.kind:
            case TopicKind.ALLOCATION:
                return (Target(self.keys.shares_of(topic.node), prefix=True),)
            case TopicKind.COMMIT:
                return (Target(self.keys.header),)
            case TopicKind.LEADERSHIP:
                return (Target(self.keys.term),)
            case TopicKind.NODE:
                return (Target(self.keys.node(topic.node)),)
            case TopicKind.REMOVALS:
                return (Target(self.keys.removal(topic.node)),)
            case TopicKind.ACKNOWLEDGEMENTS:
                return (Target(self.keys.acks, prefix=True),)
            case TopicKind.BARRIERS:
                return (Target(self.keys.barriers, prefix=True),)
            case TopicKind.GROUP:
                prefixes = (self.keys.nodes, self.keys.resources, self.keys.drains)
                targets = (Target(prefix, prefix=True) for prefix in prefixes)
                return (*targets, Target(self.keys.policy))

    def notices(self, topic: Topic, events: Sequence[WatchEvent]) -> list[Noticed]:
        """Return the notices of a topic's events: of the latest one, or of each acknowledgement."""
        if topic.kind is TopicKind.ACKNOWLEDGEMENTS:
            return [self._acknowledgement(topic, event) for event in events if not _is_deletion(event)]
        if topic.kind is TopicKind.NODE:
            events = [event for event in events if isinstance(event, HistoryLost) or _is_deletion(event)]
        if topic.kind is TopicKind.ALLOCATION:
            events = [event for event in events if not _is_deletion(event)]
        if not events:
            return []
        latest = max(event.revision for event in events)
        changed = frozenset(event.key for event in events if isinstance(event, Changed))
        some_lost = any(isinstance(event, HistoryLost) for event in events)
        if topic.kind in {TopicKind.GROUP, TopicKind.BARRIERS}:
            return [Noticed(topic, latest, lost=some_lost, keys=changed)]
        version = None
        if topic.kind is TopicKind.ALLOCATION and not some_lost:
            with suppress(UnusableStore):
                version = max(self.keys.share_part(key).version for key in changed)
        return [Noticed(topic, latest, version, lost=not changed)]

    def _acknowledgement(self, topic: Topic, event: WatchEvent) -> Noticed:
        if isinstance(event, HistoryLost) or event.value is None:
            return Noticed(topic, event.revision)
        acknowledger, version = "", None
        with suppress(UnusableStore):
            acknowledger = self.keys.name(event.key, self.keys.acks)
            version = values.load_acknowledgement(_as_entry(event))
        return Noticed(Topic(topic.kind, acknowledger), event.revision, version)


def _put(key: str, spec: ResourceSpec, fields: frozenset[str], found: Found) -> Put:
    """Write a resource; if it exists only these fields change."""
    if key in found and fields != SPEC_FIELDS:
        known = values.load_resource(spec.resource, found[key])
        spec = replace(known, **{name: getattr(spec, name) for name in fields})
    return Put(key, values.dump_resource(spec))


def _all(chunk: Sequence[Put | Delete], _found: Found) -> int:
    return len(chunk)


def _size(operation: Put | Delete) -> int:
    """Return the bytes that an operation takes; its key is also in the record of changes."""
    return 2 * len(operation.key) + (len(operation.value) if isinstance(operation, Put) else 0)


def _is_deletion(event: WatchEvent) -> bool:
    return isinstance(event, Changed) and event.value is None


def _as_entry(event: Changed) -> KeyValue:
    return KeyValue(event.key, event.value or b"", event.revision, event.revision)
