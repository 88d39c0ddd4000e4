"""Reads and watches of an engine: tasks, payloads, logs, pages, counts and free slots of a queue."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Generic, TypeVar

from rebalanser.core.tasks import ids
from rebalanser.core.tasks.model import LimitId, Status, Stored, TaskId, Update
from rebalanser.core.tasks.rules import settles
from rebalanser.core.tasks.store import (
    Change,
    ChangeFilter,
    ChangesLost,
    FreeSlot,
    GoneSlot,
    Page,
    SlotNews,
    UsedSlot,
)
from rebalanser.errors import UnusableStore
from rebalanser.registry.contract import Changed, Get, HistoryLost, KeyValue, Range, Result, WatchEvent
from rebalanser.tasks.engine import Sink, SlotSink
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.steps import EngineCall
from rebalanser.tasks.key_value.values import is_marked, load_place, load_slot, load_task, status_of

NewsT = TypeVar("NewsT")


class _ChangeSink(ABC, Generic[NewsT]):
    """A sink of a registry's watch that passes changes on to an engine's sink, in their order."""

    def __init__(self, sink: Callable[[Sequence[NewsT] | ChangesLost], None]) -> None:
        self._sink = sink

    def __call__(self, events: Sequence[WatchEvent]) -> None:
        """Report the changes of these events."""
        changes: list[NewsT] = []
        for event in events:
            news = ChangesLost(event.revision) if isinstance(event, HistoryLost) else self._news_of(event)
            if isinstance(news, ChangesLost):
                self._report(changes)
                changes = []
                self._sink(news)
            elif news is not None:
                changes.append(news)
        self._report(changes)

    def _report(self, changes: Sequence[NewsT]) -> None:
        if changes:
            self._sink(changes)

    @abstractmethod
    def _news_of(self, event: Changed) -> NewsT | ChangesLost | None:
        """Return the news of a change; None if there is none."""


class StateSink(_ChangeSink[Stored]):
    """Reports changed states.

    Deletions are left out: only closed tasks are deleted. Unreadable values are reported as lost, so that a
    later read raises the error.
    """

    def __init__(self, keys: QueueKeys, sink: Sink, wants: ChangeFilter | None = None) -> None:
        super().__init__(sink)
        self._keys = keys
        self._wants = wants

    def _news_of(self, event: Changed) -> Stored | ChangesLost | None:
        """Return the task that was put; None if it was deleted or marked, or is not wanted."""
        value = event.value
        if value is None or is_marked(value):
            return None
        try:
            partition, task = self._keys.partition_and_task(event.key)
            if self._wants is not None and not self._wants(
                Change(task, partition, status_of(event.key, value), event.revision)
            ):
                return None
            entry = load_task(self._keys.queue, partition, task, event.key, value, event.revision)
        except UnusableStore:
            return ChangesLost(event.revision)
        return entry.stored


class SlotChangeSink(_ChangeSink[SlotNews]):
    """Reports slots that were published, used or deleted."""

    def __init__(self, keys: QueueKeys, sink: SlotSink) -> None:
        super().__init__(sink)
        self._keys = keys

    def _news_of(self, event: Changed) -> SlotNews | None:
        if event.value is None:
            process, holder = self._keys.process_and_holder(event.key)
            return GoneSlot(holder, process)
        return _slot_of(self._keys, event.key, event.value, event.revision)


MAX_COUNTED: Final = 10_000
"""Maximum number of tasks of a partition that are read to count those of a limit."""
STATES_AT_ONCE: Final = 500
"""Maximum states that one range reads."""
LONG_PAYLOADS_AT_ONCE: Final = 8
"""Maximum long payloads that one transaction reads."""
UPDATES_AT_ONCE: Final = 100
"""Maximum updates that one range reads."""


def key_values(result: Result) -> tuple[KeyValue, ...]:
    """Return the items of a ``Range``."""
    assert isinstance(result, tuple)
    return result


def all_values(call: EngineCall, prefix: str) -> list[KeyValue]:
    """Read all items of a prefix, in pages; the prefix must have few."""
    found: list[KeyValue] = []
    after = ""
    while items := key_values(call.read_all([Range(prefix, after, STATES_AT_ONCE)])[0]):
        found += items
        after = items[-1].key
        if len(items) < STATES_AT_ONCE:
            break
    return found


def load_stored(keys: QueueKeys, key: str, value: bytes, revision: int) -> Stored:
    """Load a task from the key and value of its state."""
    partition, task = keys.partition_and_task(key)
    return load_task(keys.queue, partition, task, key, value, revision).stored


def read(call: EngineCall, keys: QueueKeys, ids: Sequence[TaskId]) -> dict[TaskId, Stored]:
    """Read tasks: first their places, then their states; the result has those that exist."""
    places = call.get(map(keys.payload, ids))
    found = {task: places[keys.payload(task)] for task in ids if keys.payload(task) in places}
    states = call.get(keys.state(load_place(place).partition, task) for task, place in found.items())
    tasks = (load_stored(keys, item.key, item.value, item.mod_revision) for item in states.values())
    return {stored.head.id: stored for stored in tasks}


def payloads(call: EngineCall, keys: QueueKeys, ids: Sequence[TaskId]) -> dict[TaskId, bytes]:
    """Read payloads; the result has those of tasks that exist."""
    found: dict[TaskId, bytes] = {}
    long: list[TaskId] = []
    places = call.get(map(keys.payload, ids))
    for task in dict.fromkeys(ids):
        place = places.get(keys.payload(task))
        if place is None:
            continue
        payload = load_place(place).payload
        if payload is None:
            long.append(task)
        else:
            found[task] = payload
    for start in range(0, len(long), LONG_PAYLOADS_AT_ONCE):
        group = long[start : start + LONG_PAYLOADS_AT_ONCE]
        for task, item in zip(
            group, call.read_all([Get(keys.long_payload(task)) for task in group]), strict=True
        ):
            if isinstance(item, KeyValue):
                found[task] = item.value
    return found


def page(
    call: EngineCall,
    keys: QueueKeys,
    partitions: Sequence[int],
    statuses: frozenset[Status] | None,
    after: TaskId | None,
    limit: int,
) -> Page:
    """Read tasks of some partitions in the order of their ids."""
    step = min(STATES_AT_ONCE, 2 * limit // max(1, len(partitions)) + 8)
    ranges = [_after(keys, partition, after, step) for partition in partitions]
    firsts = [key_values(result) for result in call.read_all(ranges)]
    if not ranges:
        call.read_all([Range(keys.states, limit=1)])
    streams = (
        _stream(call, keys, partition, first, step, statuses)
        for partition, first in zip(partitions, firsts, strict=True)
    )
    items = list(islice(heapq.merge(*streams, key=lambda stored: stored.head.id), limit + 1))
    more = len(items) > limit
    del items[limit:]
    return Page(tuple(items), items[-1].head.id if more and items else None, call.seen)


def running(
    call: EngineCall, keys: QueueKeys, limits: Collection[LimitId], partitions: int
) -> dict[LimitId, int]:
    """Count the claimed tasks of limits, without partitions of more than ``MAX_COUNTED`` tasks."""
    wanted: dict[int, list[LimitId]] = {}
    for limit in limits if partitions else ():
        wanted.setdefault(ids.partition_of_limit(limit, partitions), []).append(limit)
    counts: Counter[LimitId] = Counter()
    for partition, of_partition in wanted.items():
        found = page(call, keys, [partition], None, None, MAX_COUNTED)
        if found.next is None:
            claimed = (each for each in found.items if each.state.status is Status.CLAIMED)
            counted = Counter(each.head.limit for each in claimed if each.head.is_limited)
            counts.update({limit: counted[limit] for limit in of_partition})
    return dict(counts)


def ready_since(call: EngineCall, keys: QueueKeys, partitions: Sequence[int], wall: float) -> float | None:
    """Return since when the oldest ready task waits, by its id."""
    after: TaskId | None = None
    since: float | None = None
    while since is None or since == wall:  # the ids found so far may contain no time
        found = page(call, keys, partitions, frozenset({Status.WAITING}), after, STATES_AT_ONCE)
        due = [each for each in found.items if each.state.due <= wall]
        needed = {task for each in due if each.state.claim is None for task in each.head.after}
        known = read(call, keys, list(needed)) if needed else {}
        ready = (
            each
            for each in due
            if each.state.claim is not None
            or all(
                settles(None if task not in known else known[task].state.status, each.head.after_failure)
                for task in each.head.after
            )
        )
        times = [ids.ready_since(each.head.id, each.state.due, wall) for each in ready]
        since = min([*times, *([] if since is None else [since])], default=None)
        after = found.next
        if after is None:
            break
    return since


def _after(keys: QueueKeys, partition: int, after: TaskId | None, step: int) -> Range:
    return Range(keys.states_of(partition), keys.state(partition, after) if after else "", step)


def _stream(
    call: EngineCall,
    keys: QueueKeys,
    partition: int,
    items: tuple[KeyValue, ...],
    step: int,
    statuses: frozenset[Status] | None,
) -> Iterator[Stored]:
    """Iterate over the tasks of a partition from ``items`` on, read on demand."""
    while items:
        for item in items:
            if statuses is None or status_of(item.key, item.value) in statuses:
                yield load_stored(keys, item.key, item.value, item.mod_revision)
        if len(items) < step:
            return
        step = min(2 * step, STATES_AT_ONCE)
        (result,) = call.read_all([Range(keys.states_of(partition), items[-1].key, step)])
        items = key_values(result)


def updates(
    call: EngineCall, keys: QueueKeys, task: TaskId, claim: int | None, first: int, limit: int
) -> list[Update]:
    """Read a task's log, of one claim from number ``first`` on or of all."""
    prefix = keys.log(task) if claim is None else keys.log_of_claim(task, claim)
    after = "" if claim is None or first == 0 else keys.update(task, claim, first - 1)
    found: list[Update] = []
    while len(found) < limit:
        step = min(UPDATES_AT_ONCE, limit - len(found))
        items = key_values(call.read_all([Range(prefix, after, step)])[0])
        found += [Update(*keys.claim_and_sequence(item.key), item.value) for item in items]
        if len(items) < step:
            break
        after = items[-1].key
    return found


def count(call: EngineCall, keys: QueueKeys) -> Mapping[Status, int]:
    """Count the tasks in each status."""
    counted: Counter[Status] = Counter()
    after = ""
    while items := key_values(call.read_all([Range(keys.states, after, STATES_AT_ONCE)])[0]):
        counted.update(status_of(item.key, item.value) for item in items)
        after = items[-1].key
    return dict(counted)


def slots(call: EngineCall, keys: QueueKeys) -> list[SlotNews]:
    """Read all slots."""
    loaded = (stored_slot(keys, item) for item in all_values(call, keys.slots))
    return [slot for slot in loaded if slot is not None]


def stored_slot(keys: QueueKeys, item: KeyValue) -> FreeSlot | UsedSlot | None:
    """Load a slot; None if it can't be read, as one of a newer version."""
    return _slot_of(keys, item.key, item.value, item.mod_revision)


def _slot_of(keys: QueueKeys, key: str, value: bytes, revision: int) -> FreeSlot | UsedSlot | None:
    try:
        return load_slot(*keys.process_and_holder(key), key, value, revision)
    except UnusableStore:
        return None
