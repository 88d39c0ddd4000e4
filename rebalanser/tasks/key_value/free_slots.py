"""Free slots in a registry: published, withdrawn, read and watched."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rebalanser.errors import InternalError, UnusableStore
from rebalanser.registry.contract import (
    Changed,
    Delete,
    Get,
    HistoryLost,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Transaction,
    Unchanged,
    WatchEvent,
)
from rebalanser.tasks.engine import Lost, SlotSink
from rebalanser.tasks.index.free_slots import FreeSlot, GoneSlot, SlotNews, UsedSlot
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.reading import all_values
from rebalanser.tasks.key_value.steps import EngineCall
from rebalanser.tasks.key_value.values import dump_free_slot, load_slot


def publish(call: EngineCall, keys: QueueKeys, slots: Sequence[FreeSlot], used: Sequence[UsedSlot]) -> None:
    """Publish free slots, and delete used ones."""
    operations: list[Operation] = [Delete(keys.slot(each.process, each.holder)) for each in used]
    operations += [
        Put(keys.slot(each.process, each.holder), dump_free_slot(each), each.lease) for each in slots
    ]
    step = call.max_operations
    for start in range(0, len(operations), step):
        call.execute(Transaction(then=tuple(operations[start : start + step])))


def withdraw(
    call: EngineCall, keys: QueueKeys, process: str, holders: Collection[str] | None
) -> list[UsedSlot]:
    """Delete the free slots of a process; return the used ones."""
    used: list[UsedSlot] = []
    free: list[KeyValue] = []
    for item in all_values(call, keys.slots_of(process)):
        if holders is None or keys.process_and_holder(item.key)[1] in holders:
            slot = _loaded(keys, item)
            if isinstance(slot, UsedSlot):
                used.append(slot)
            elif slot is not None:
                free.append(item)
    step = max(1, call.max_operations - 1)
    for start in range(0, len(free), step):
        nested = tuple(map(_deletion, free[start : start + step]))
        for result in call.execute(Transaction(then=nested)).results:
            if not isinstance(result, Outcome):
                raise InternalError(f"a nested transaction was answered {result!r}")
            # A slot that has changed since it was read was used, and nothing else.
            found = None if result.succeeded else result.results[0]
            slot = _loaded(keys, found) if isinstance(found, KeyValue) else None
            if isinstance(slot, UsedSlot):
                used.append(slot)
    return used


def _deletion(item: KeyValue) -> Transaction:
    return Transaction((Unchanged(item.key, item.mod_revision),), (Delete(item.key),), (Get(item.key),))


def read(call: EngineCall, keys: QueueKeys) -> list[SlotNews]:
    """Read all slots."""
    loaded = (_loaded(keys, item) for item in all_values(call, keys.slots))
    return [slot for slot in loaded if slot is not None]


def _loaded(keys: QueueKeys, item: KeyValue) -> FreeSlot | UsedSlot | None:
    return _slot(keys, item.key, item.value, item.mod_revision)


def _slot(keys: QueueKeys, key: str, value: bytes, revision: int) -> FreeSlot | UsedSlot | None:
    """Load a slot; None if it can't be read, as one of a newer version."""
    try:
        return load_slot(*keys.process_and_holder(key), key, value, revision)
    except UnusableStore:
        return None


class SlotChangeSink:
    """The sink of a registry's watch that passes changes of slots on to an engine's sink."""

    def __init__(self, keys: QueueKeys, sink: SlotSink) -> None:
        self._keys = keys
        self._sink = sink

    def __call__(self, events: Sequence[WatchEvent]) -> None:
        """Report the changes of these events."""
        news: list[SlotNews] = []
        for event in events:
            if isinstance(event, HistoryLost):
                self._report(news)
                news = []
                self._sink(Lost(event.revision))
                continue
            change = self._changed(event)
            if change is not None:
                news.append(change)
        self._report(news)

    def _changed(self, event: Changed) -> SlotNews | None:
        if event.value is None:
            process, holder = self._keys.process_and_holder(event.key)
            return GoneSlot(holder, process)
        return _slot(self._keys, event.key, event.value, event.revision)

    def _report(self, news: Sequence[SlotNews]) -> None:
        if news:
            self._sink(news)
