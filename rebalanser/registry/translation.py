"""The one translation of the protocol's commands, and of an operator's wishes, into registry operations.

:mod:`~rebalanser.registry.dialogue` says what a dialogue is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from rebalanser.errors import RegistryUnavailable, UnusableStore
from rebalanser.protocol.messages import (
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
    RemoveBarriers,
    Resign,
)
from rebalanser.protocol.types import (
    NodeId,
    Resource,
    ResourceSpec,
    Topic,
    TopicKind,
)
from rebalanser.registry import values
from rebalanser.registry.contract import (
    Absent,
    Changed,
    Delete,
    Get,
    HistoryLost,
    KeyValue,
    Operation,
    Put,
    Range,
    Result,
    Target,
    Transaction,
    Unchanged,
    WatchEvent,
)
from rebalanser.registry.coordinator import GroupView, Holding, Progress
from rebalanser.registry.dialogue import (
    Dialogue,
    Reading,
    all_entries,
    one_entry,
    outcome_of,
    sized,
)
from rebalanser.registry.leader_dialogues import LeaderDialogues
from rebalanser.registry.member_dialogues import MemberDialogues

MOST_TRIES: Final = 100
"""So often an operator's request is made again because another's took effect before it."""
OTHERS_CHANGE_IT: Final = "other operators change the same group all the time; try again"


class Translation(MemberDialogues, LeaderDialogues):
    """Commands of one group as dialogues with a registry, and its watches as notices."""

    def dialogue(self, command: Command) -> Dialogue:
        """The dialogue that carries out a command."""
        match command:
            case Join():
                return self._join(command)
            case Heartbeat():
                return self._heartbeat(command)
            case ReadShare() | ReadBarriers() | AddBarriers() | RemoveBarriers() | Acknowledge() | Leave():
                return self._member_dialogue(command)
            case Campaign():
                return self._campaign(command)
            case Resign():
                return self._resign(command)
            case ReadGroup():
                return self._read_group(command)
            case Publish():
                return self._publish(command)

    def _member_dialogue(
        self, command: ReadShare | ReadBarriers | AddBarriers | RemoveBarriers | Acknowledge | Leave
    ) -> Dialogue:
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
            case Leave():
                return self._leave(command)

    def read(self) -> Reading[GroupView]:
        """All of the group with its barriers, at one revision."""
        reads = (*self._group_reads(), Range(self.keys.barriers), Get(self.keys.term))
        answer = yield Transaction(then=reads)
        outcome = outcome_of(answer)
        term = one_entry(outcome.results[7])
        return GroupView(
            group=self._group_in(outcome),
            leadership=values.load_leadership(term) if term else None,
            holdings=tuple(
                Holding(self.keys.resource_of_barrier(entry.key), entry.value.decode(), entry.create_revision)
                for entry in all_entries(outcome.results[6])
            ),
        )

    def put_resources(self, specs: Sequence[ResourceSpec], progress: Progress) -> Reading[int]:
        """Write what differs from what is there; how many resources are new."""
        answer = yield Transaction(then=(Range(self.keys.resources), Get(self.keys.operator)))
        resources, operator = outcome_of(answer).results
        present = {entry.key: entry.value for entry in all_entries(resources)}
        puts = [Put(self.keys.resource(spec.resource), values.dump_resource(spec)) for spec in specs]
        differing = [put for put in puts if present.get(put.key) != put.value]
        yield from self._change(differing, _epoch_in(operator), len(specs) - len(differing), progress)
        return sum(put.key not in present for put in puts)

    def weigh_resources(self, weights: Mapping[Resource, float], progress: Progress) -> Reading[int]:
        """Change the weights of those that are there, and nothing else of them; how many changed (AU-7).

        What another operator changes between the reading and the writing is read again, some times over.
        """
        changed = 0
        for _ in range(MOST_TRIES):
            answer = yield Transaction(then=(Range(self.keys.resources), Get(self.keys.operator)))
            resources, operator = outcome_of(answer).results
            epoch = _epoch_in(operator)
            puts = self._weighed(all_entries(resources), weights)
            done = len(weights) - len(puts)
            progress(done)
            for chunk in self._operator_chunks(puts):
                answer = yield self._in_epoch(epoch, chunk)
                if not outcome_of(answer).succeeded:
                    break
                epoch = outcome_of(answer).revision
                changed += len(chunk)
                done += len(chunk)
                progress(done)
            else:
                return changed
        raise RegistryUnavailable(OTHERS_CHANGE_IT)

    def _weighed(self, entries: Iterable[KeyValue], weights: Mapping[Resource, float]) -> list[Put]:
        found = {self.keys.resource(resource): resource for resource in weights}
        puts = []
        for entry in entries:
            if (resource := found.get(entry.key)) is None:
                continue
            spec = replace(values.load_resource(resource, entry), weight=weights[resource])
            if (value := values.dump_resource(spec)) != entry.value:
                puts.append(Put(entry.key, value))
        return puts

    def remove_resources(self, resources: Sequence[Resource], progress: Progress) -> Reading[int]:
        """Delete what is there; how many there were."""
        answer = yield Transaction(then=(Range(self.keys.resources), Get(self.keys.operator)))
        found, operator = outcome_of(answer).results
        present = {entry.key for entry in all_entries(found)}
        deletes = [Delete(key) for key in map(self.keys.resource, resources) if key in present]
        yield from self._change(deletes, _epoch_in(operator), len(resources) - len(deletes), progress)
        return len(deletes)

    def set_drained(self, label: str, drained: bool) -> Reading[None]:
        """Mark a node as drained, or not; changes nothing where it is so already."""
        key = self.keys.drain(label)
        answer = yield Transaction(then=(Get(key), Get(self.keys.operator)))
        present, operator = outcome_of(answer).results
        change: list[Put | Delete] = []
        if (one_entry(present) is not None) != drained:
            change.append(Put(key, b"") if drained else Delete(key))
        yield from self._change(change, _epoch_in(operator), 0, lambda _: None)

    def _change(
        self, operations: Sequence[Put | Delete], epoch: int, done: int, progress: Progress
    ) -> Reading[None]:
        """Write for an operator; if another's request took effect since ``epoch``, after that one."""
        progress(done)
        for chunk in self._operator_chunks(operations):
            for _ in range(MOST_TRIES):
                outcome = outcome_of((yield self._in_epoch(epoch, chunk)))
                epoch = outcome.revision if outcome.succeeded else _epoch_in(outcome.results[0])
                if outcome.succeeded:
                    break
            else:
                raise RegistryUnavailable(OTHERS_CHANGE_IT)
            done += len(chunk)
            progress(done)

    def _operator_chunks(self, operations: Sequence[Put | Delete]) -> list[list[Operation]]:
        """Chunks of what an operator writes; an empty one if that is nothing, as it begins an epoch too."""
        return list(self._chunks(sized(operations))) or [[]]

    def _in_epoch(self, epoch: int, operations: Sequence[Operation]) -> Transaction:
        """Write for an operator and begin an epoch, if no request of an operator took effect since ``epoch``.

        So a request that arrives late, after its operator has made another, has no effect (RB-44). ``epoch``
        is the revision at which the latest request took effect, 0 if there was none. The answer to one that
        has no effect tells the present epoch.
        """
        key = self.keys.operator
        return Transaction(
            guards=(Unchanged(key, epoch) if epoch else Absent(key),),
            then=(*operations, Put(key, b"")),
            otherwise=(Get(key),),
        )

    def targets(self, topic: Topic) -> tuple[Target, ...]:
        """What to watch for a topic."""
        match topic.kind:
            case TopicKind.ALLOCATION:
                return (Target(self.keys.header),)
            case TopicKind.LEADERSHIP:
                return (Target(self.keys.term),)
            case TopicKind.NODE:
                return (Target(self.keys.node(topic.node)),)
            case TopicKind.PROGRESS:
                return (Target(self.keys.release(topic.node)),)
            case TopicKind.ACKNOWLEDGEMENTS:
                return (Target(self.keys.acks, prefix=True),)
            case TopicKind.GROUP:
                prefixes = (self.keys.nodes, self.keys.resources, self.keys.drains)
                return tuple(Target(prefix, prefix=True) for prefix in prefixes)

    def notices(self, topic: Topic, events: Sequence[WatchEvent], node: NodeId) -> list[Noticed]:
        """What a watched topic's events tell ``node``: the latest of them, or each acknowledgement."""
        if topic.kind is TopicKind.ACKNOWLEDGEMENTS:
            return [self._acknowledgement(topic, event) for event in events if not _is_deletion(event)]
        if topic.kind is TopicKind.NODE:
            events = [event for event in events if isinstance(event, HistoryLost) or _is_deletion(event)]
        if not events:
            return []
        latest = max(events, key=lambda event: event.revision)
        version = None
        if topic.kind is TopicKind.ALLOCATION and isinstance(latest, Changed) and latest.value is not None:
            with suppress(UnusableStore):
                version = values.load_header(_as_entry(latest)).shares.get(node)
        return [Noticed(topic, latest.revision, version)]

    def _acknowledgement(self, topic: Topic, event: WatchEvent) -> Noticed:
        if isinstance(event, HistoryLost) or event.value is None:
            return Noticed(topic, event.revision)
        acknowledger = self.keys.name(event.key, self.keys.acks)
        version = None
        with suppress(UnusableStore):
            version = values.load_acknowledgement(_as_entry(event))
        return Noticed(Topic(topic.kind, acknowledger), event.revision, version)


def _epoch_in(result: Result) -> int:
    """The revision at which the latest request of an operator took effect; 0 before the first one."""
    entry = one_entry(result)
    return entry.mod_revision if entry else 0


def _is_deletion(event: WatchEvent) -> bool:
    return isinstance(event, Changed) and event.value is None


def _as_entry(event: Changed) -> KeyValue:
    return KeyValue(event.key, event.value or b"", event.revision, event.revision)
