"""A registry's watch on the states of a queue, told as an engine tells it."""

from __future__ import annotations

from collections.abc import Sequence

from rebalanser.errors import UnusableStore
from rebalanser.registry.contract import Changed, HistoryLost, WatchEvent
from rebalanser.tasks.engine import Change, Lost, Sink, Wants
from rebalanser.tasks.key_value.keys import QueueKeys
from rebalanser.tasks.key_value.values import is_marked, load_task, status_of
from rebalanser.tasks.model import Stored


class StatesTold:
    """The sink of a registry's watch that tells an engine's sink.

    Deletions are not told: only what is complete is collected. What cannot be read is told as lost, so that
    the reader finds the error where it can be raised.
    """

    def __init__(self, keys: QueueKeys, sink: Sink, wants: Wants | None = None) -> None:
        self._keys = keys
        self._sink = sink
        self._wants = wants

    def __call__(self, events: Sequence[WatchEvent]) -> None:
        """Tell what these events say."""
        changed: list[Stored] = []
        for event in events:
            told = self._lost_or_changed(event)
            if isinstance(told, Stored):
                changed.append(told)
            elif told is not None:
                self._tell(changed)
                changed = []
                self._sink(told)
        self._tell(changed)

    def _tell(self, changed: Sequence[Stored]) -> None:
        if changed:
            self._sink(changed)

    def _lost_or_changed(self, event: WatchEvent) -> Stored | Lost | None:
        if isinstance(event, HistoryLost):
            return Lost(event.revision)
        return self._changed(event)

    def _changed(self, event: Changed) -> Stored | Lost | None:
        """The task that was put; None where one was deleted or marked, or is not wanted."""
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
            return Lost(event.revision)
        return entry.stored
