"""The history of a process of a NELI group: the partitions that it led, with start and end."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from typing import Final, Self

from rebalanser.core.clock import Clock
from rebalanser.core.neli.messages import Fact, FactKind
from rebalanser.folders import PRIVATE
from rebalanser.history import Event, HistorySink, Journal, Protocol, author_here, open_sinks
from rebalanser.neli.contract import Candidacy
from rebalanser.runtime.clock import SystemClock

DIR_VARIABLE: Final = "REBALANSER_HISTORY_DIR"
MODE_VARIABLE: Final = "REBALANSER_HISTORY_FILE_MODE"
TOPIC_VARIABLE: Final = "REBALANSER_HISTORY_TOPIC"
MAX_BYTES: Final = 512 * 1024 * 1024
"""Maximum bytes of the history files of one label."""
CLOSE_TIMEOUT_S: Final = 2.0


class LeadershipHistory:
    """Writes the facts of one process of a group; never blocks and never fails it. Thread-safe.

    Each record has the time of its fact. If leadership ended while the process was stopped (SIGSTOP), its
    record is written later, with the time at which it ended (NE-4).
    """

    def __init__(self, candidacy: Candidacy, sink: HistorySink, clock: Clock) -> None:
        self._group = f"{candidacy.topic}/{candidacy.group}"
        self._label = label_of(candidacy)
        self._overlap_s = candidacy.settings.overlap_s
        self._sink = sink
        self._clock = clock
        self._lock = threading.Lock()
        self._process = ""
        self._journal: Journal | None = None
        self._early: list[Fact] = []
        self._at = 0.0

    @classmethod
    def opened(
        cls, candidacy: Candidacy, history_dir: Path | str | None, history_topic: str | None
    ) -> Self | None:
        """Return the history in this folder and at this topic, or those in the environment; None without any.

        Raises:
            InvalidUrl: ``history_topic`` is not a URL.
            UnknownScheme: no installed package has topics of that scheme.
            MissingExtra: the package that the topic needs is not installed.
            InvalidSettings: the mode of files in the environment is invalid.
        """
        folder = history_dir or os.environ.get(DIR_VARIABLE) or None
        topic = history_topic or os.environ.get(TOPIC_VARIABLE) or None
        if folder is None and topic is None:
            return None
        group, label = f"{candidacy.topic}/{candidacy.group}", label_of(candidacy)
        mode = os.environ.get(MODE_VARIABLE) or PRIVATE
        sink = open_sinks(Path(folder) if folder else None, topic, group, label, MAX_BYTES, mode)
        return cls(candidacy, sink, SystemClock())

    def begin(self, process: str) -> None:
        """Begin to write as ``process``: the candidate's id is known once it takes part."""
        with self._lock:
            self._process = process
            self._journal = Journal(
                author_here(Protocol.NELI, self._group, process, self._label),
                self._sink,
                wall=lambda: self._clock.wall() - (self._clock.now() - self._at),
                monotonic=lambda: self._at,
            )
            for fact in self._early:
                self._write(self._journal, fact)
            self._early.clear()

    def tell(self, fact: Fact) -> None:
        """Write a fact."""
        with self._lock:
            if self._journal is None:
                self._early.append(fact)
            else:
                self._write(self._journal, fact)

    def close(self) -> None:
        """Flush and close it, in two seconds at most."""
        self._sink.close(CLOSE_TIMEOUT_S)

    def _write(self, journal: Journal, fact: Fact) -> None:
        self._at = fact.at
        journal.write(event_of(fact, self._process, self._overlap_s))


def label_of(candidacy: Candidacy) -> str:
    """Return the name of the process for people: its instance, or else its host's name."""
    return candidacy.instance or platform.node() or "neli"


def event_of(fact: Fact, process: str, overlap_s: float) -> Event:
    """Convert a fact of ``process`` to a journal event; ``overlap_s`` is the possible overlap with a
    successor (NE-6)."""
    begins = fact.kind is FactKind.INDUCED
    return Event(
        kind=fact.kind,
        node=process,
        resource=None if fact.partition is None else str(fact.partition),
        token=fact.token,
        overlap_limit_s=overlap_s if begins and overlap_s else None,
        detail=fact.detail,
    )
