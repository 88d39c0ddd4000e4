"""Watches of the replica's changes, and the latest changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from rebalanser.core.group.messages import Noticed
from rebalanser.core.group.types import NodeId, Topic
from rebalanser.registry.contract import Changed, HistoryLost, WatchEvent
from rebalanser.registry.coordinator import Listener
from rebalanser.registry.store import ChangeHistory
from rebalanser.registry.translation import Translation

MAX_HISTORY: Final = 10_000
"""Maximum changes kept for watches that begin in the past."""

Delivery: TypeAlias = tuple[Listener, Sequence[Noticed]]


@dataclass(frozen=True, slots=True)
class _Watch:
    topic: Topic
    since: int
    listener: Listener


class Watches:
    """The watched topics of one connection. It calls no listener: its caller does that."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._history = ChangeHistory(MAX_HISTORY)
        self._watches: dict[tuple[NodeId, Topic], _Watch] = {}

    def replace(self, node: NodeId, topics: Mapping[Topic, int], listener: Listener) -> list[Delivery]:
        """Watch exactly these topics of ``node``; return the notices of past changes for new ones."""
        before = self._watches
        self._watches = {}
        deliveries: list[Delivery] = []
        for topic, since in topics.items():
            key = (node, topic)
            known = before.get(key)
            self._watches[key] = known or _Watch(topic, since, listener)
            if known is None:
                deliveries += self._past(self._watches[key])
        return deliveries

    def _past(self, watch: _Watch) -> Iterator[Delivery]:
        if watch.since < self._history.oldest:
            yield from self._deliveries(watch, [HistoryLost(self._history.oldest - 1)])
        for changes in self._history:
            yield from self._deliveries(watch, changes)

    def changed(self, commits: Iterable[tuple[Changed, ...]]) -> list[Delivery]:
        """Return the notices that these commits cause."""
        deliveries: list[Delivery] = []
        for changes in commits:
            self._history.append(changes)
            for watch in self._watches.values():
                deliveries += self._deliveries(watch, changes)
        return deliveries

    def lost(self, revision: int) -> list[Delivery]:
        """Return notices to read again, for all: changes up to this revision may be missing."""
        self._history.forget(revision + 1)
        return [
            delivery
            for watch in self._watches.values()
            for delivery in self._deliveries(watch, [HistoryLost(max(revision, watch.since))])
        ]

    def _deliveries(self, watch: _Watch, events: Sequence[WatchEvent]) -> Iterator[Delivery]:
        targets = self._translation.targets(watch.topic)
        concerned = [
            event
            for event in events
            if isinstance(event, HistoryLost)
            or (event.revision >= watch.since and any(target.covers(event.key) for target in targets))
        ]
        notices = self._translation.notices(watch.topic, concerned) if concerned else []
        if notices:
            yield watch.listener, notices
