"""Facts of a leader or a worker, in the history and in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rebalanser.core.clock import Clock
from rebalanser.core.shiva.messages import Fact, FactKind
from rebalanser.core.shiva.types import Mode
from rebalanser.history import (
    UNLIMITED_S,
    Event,
    HistorySink,
    Journal,
    NullSink,
    Protocol,
    author_here,
)
from rebalanser.history.records import Value
from rebalanser.runtime.logs import get_logger

CLOSE_TIMEOUT_S: Final = 2.0
_OF_WORKERS: Final = {
    FactKind.WORKER_ADDED,
    FactKind.WORKER_REFUSED,
    FactKind.WORKER_REMOVED,
    FactKind.WORKER_STALLED,
    FactKind.WORKER_CORDONED,
    FactKind.WORKER_UNCORDONED,
}

_WARNINGS = frozenset(
    {
        FactKind.WORKER_REMOVED,
        FactKind.WORKER_REFUSED,
        FactKind.WORKER_STALLED,
        FactKind.COMMAND_REFUSED,
        FactKind.RECORD_SET_ASIDE,
        FactKind.DOCUMENT_REFUSED,
        FactKind.FILES_REFUSED,
        FactKind.APPLICATION_FAILED,
        FactKind.LEADER_SILENT,
    }
)
LEVELS: Final[Mapping[FactKind, int]] = MappingProxyType(
    {kind: logging.WARNING if kind in _WARNINGS else logging.INFO for kind in FactKind}
)
"""Level of each kind of fact."""


class FactWriter:
    """Writes the facts of a leader or a worker, first to its history, then to the log. Thread-safe.

    ``process`` is its name in the history, and ``label`` its name for operators. Facts of several
    incarnations, such as the terms of a leader, have one sequence of numbers.
    """

    def __init__(
        self, cluster: str, process: str, label: str, sink: HistorySink | None, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._label = label
        self._clock = clock
        self._lock = threading.Lock()
        self._at = 0.0
        self._journal = Journal(
            author_here(Protocol.SHIVA, cluster, process, label),
            sink or NullSink(),
            wall=lambda: clock.wall() - (clock.now() - self._at),
            monotonic=lambda: self._at,
        )

    def tell(self, fact: Fact, node: str, incarnation: int) -> None:
        """Write a fact; ``node`` is the id of the incarnation, which is never used again."""
        with self._lock:
            self._at = self._clock.now() if fact.at is None else fact.at
            self._journal.write(event_of(fact, node, incarnation, label=self._label))
        log_fact(fact, self._cluster)

    def close(self) -> None:
        """Flush and close the history, within two seconds."""
        self._journal.close(CLOSE_TIMEOUT_S)


def event_of(fact: Fact, node: str, incarnation: int, *, label: str) -> Event:
    """Return a fact for the journal of the leader or worker with the name ``label``."""
    detail: dict[str, Value] = dict(fact.detail)
    if fact.worker and (fact.worker != label or fact.kind in _OF_WORKERS):
        detail["worker"] = fact.worker
    published = fact.kind is FactKind.DOCUMENT_PUBLISHED
    if published:
        detail["nodes"], detail["resources"] = detail.pop("workers"), detail.pop("applications")
    begins = fact.kind is FactKind.PROCESS_STARTING
    available = begins and detail.get("mode") == Mode.AVAILABLE.value
    return Event(
        kind=fact.kind,
        node=node,
        incarnation=incarnation,
        term=fact.term,
        version=fact.version,
        resource=None if fact.application is None else str(fact.application),
        token=fact.token,
        revision=fact.revision,
        value=float(fact.version) if published else None,
        overlap_limit_s=UNLIMITED_S if available else None,
        detail=detail,
    )


def log_fact(fact: Fact, cluster: str) -> None:
    """Log one line with its ``action``."""
    fields = {name: value for name, value in fact.detail.items() if value not in (None, "")}
    if fact.application is not None:
        fields["application"] = str(fact.application)
    if fact.worker:
        fields["worker"] = fact.worker
    if fact.token is not None:
        fields["token"] = fact.token
    text = fact.kind.value.replace("_", " ")
    get_logger("rebalanser.shiva").log(
        LEVELS[fact.kind], text, action=fact.kind.value, cluster=cluster, **fields
    )
