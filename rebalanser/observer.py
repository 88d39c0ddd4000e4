"""Reports what happens on a node to the log, the history and the application's hooks."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rebalanser.core.clock import Clock
from rebalanser.core.group import Fact, FactKind, Report
from rebalanser.runtime.logs import get_logger, log_fact, prepare
from rebalanser.runtime.narration import Narrator, trouble_of
from rebalanser.settings import Settings

if TYPE_CHECKING:
    from rebalanser.history import Event, Journal
    from rebalanser.history.journal import Moment

CLOSE_TIMEOUT_S = 2.0
QUEUE_SIZE = 10_000
SHORTEST_NOTE_S = 60.0
"""Minimum seconds for which the registry keeps what went wrong."""
NOTE_PAUSE_S = 1.0
"""Seconds between two notes."""

_log = get_logger()


class Observer:
    """Passes what happens on, in order. Never blocks the protocol and never fails it.

    A report takes its time and its numbers in the history at once. What is told of each resource is made in
    threads of the observer, one for the history, and one for the log and the hooks, since either of these may
    block, as a terminal does under Ctrl-S, and a node that waits for one could not stop in time.
    ``process`` names the process in the history: the stem of the ids of its node's incarnations. What the
    ``narrator`` has a sentence for is not logged.

    Raises:
        FixConfiguration: the settings name a history that can't be written.
    """

    def __init__(
        self,
        group: str,
        label: str,
        process: str,
        settings: Settings,
        clock: Clock,
        hooks: Sequence[Callable[[Fact], None]],
        narrator: Narrator | None = None,
        troubles: TroubleNotes | None = None,
    ) -> None:
        prepare()
        self._troubles = troubles
        self._narrator = narrator
        self._group = group
        self._process = process
        self._hooks = hooks
        self._journal = _open_journal(group, label, process, settings, clock)
        self._queue: queue.Queue[Report | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self._dropped = 0
        self._in_order = threading.Lock()
        self._writer = None if self._journal is None else _HistoryWriter(group, self._journal, settings)
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-facts-{group}", daemon=True)
        self._thread.start()

    def observe(self, report: Report) -> None:
        """Pass a report on. If the log and the hooks are too slow for it, it is counted and dropped."""
        with self._in_order:
            if self._writer is not None:
                self._writer.write(report)
            try:
                self._queue.put_nowait(report)
            except queue.Full:
                self._dropped += report.count

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            narrated = self._narrator is not None and self._narrator.narrate(report)
            for fact in report.facts():
                if not narrated:
                    self._call(self._log, fact)
                if self._troubles is not None:
                    self._call(self._troubles.take, fact)
                for hook in self._hooks:
                    self._call(hook, fact)
            if self._dropped and self._queue.empty():
                dropped, self._dropped = self._dropped, 0
                self._warn(
                    "facts were dropped: log and hooks are too slow", action="facts_dropped", count=dropped
                )

    def _log(self, fact: Fact) -> None:
        log_fact(fact, self._group)

    def _call(self, hook: Callable[[Fact], None], fact: Fact) -> None:
        try:
            hook(fact)
        except BaseException as error:
            self._warn("a log or a hook raised", action="hook_failed", exc_info=error)

    def _warn(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(Exception):
            _log.warning(event, group=self._group, **fields)

    def warn_of(self, reasons: Sequence[str]) -> None:
        """Warn at start of what is known to weaken this registry's promises."""
        for reason in reasons:
            self._warn(reason, action="unsafe_registry")
            self.observe(Report(Fact(FactKind.UNSAFE_REGISTRY, self._process, detail={"reason": reason})))

    def close(self) -> None:
        """Pass on what is queued for the log and the hooks, and write the history to disk."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._troubles is not None:
            self._troubles.close()
        if self._writer is not None:
            self._writer.close()
        if self._journal is not None:
            self._journal.close(CLOSE_TIMEOUT_S)


class TroubleNotes:
    """Keeps in the registry what went wrong lately in this node's application, for all who look at the group.

    ``note`` is called in a thread of its own, which begins with the first trouble. What can't be written now
    is left out: the next trouble is tried again.
    """

    def __init__(
        self, label: str, note: Callable[[str, str | None, float], None], longest_pause_s: float
    ) -> None:
        self._label = label
        self._note = note
        self._for_s = max(SHORTEST_NOTE_S, 2 * longest_pause_s)
        self._latest: Fact | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, fact: Fact) -> None:
        """Note a trouble, or that OnStart has returned after it had raised; never waits."""
        if trouble_of(fact) is None:
            started_after_all = (
                fact.kind is FactKind.START_RETURNED
                and self._latest is not None
                and self._latest.kind is FactKind.START_FAILED
            )
            if not started_after_all:
                return
        self._latest = fact
        self._changed.set()
        if self._thread is None:
            name = f"rebalanser-troubles-{self._label}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        noted: str | None = None
        noted_at = -math.inf
        while self._changed.wait() and not self._closed.is_set():
            self._changed.clear()
            text = None if self._latest is None else trouble_of(self._latest)
            if text == noted and time.monotonic() - noted_at < self._for_s / 2:
                continue
            with contextlib.suppress(Exception):
                self._note(self._label, text, self._for_s)
                noted, noted_at = text, time.monotonic()
            self._closed.wait(NOTE_PAUSE_S)

    def close(self) -> None:
        """Note nothing more."""
        self._closed.set()
        self._changed.set()


class _HistoryWriter:
    """Writes reports into a history from a thread of its own; what it has no room for is missing there."""

    def __init__(self, group: str, journal: Journal, settings: Settings) -> None:
        self._group = group
        self._journal = journal
        self._fenced = settings.fenced
        offers: dict[str, float | str | None] = {
            "capacity": settings.capacity,
            "tags": ",".join(sorted(settings.tags)),
            "zone": settings.zone,
        }
        self._offers = {name: value for name, value in offers.items() if value}
        self._written = 0
        self._waiting: queue.Queue[tuple[Moment, Report] | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-records-{group}", daemon=True)
        self._thread.start()

    def write(self, report: Report) -> None:
        """Take in a report as of now; never waits."""
        moment = self._journal.moment(report.count)
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((moment, report))

    def close(self) -> None:
        """Give everything that was taken in to the journal, for as long as it goes on taking some of it."""
        asked, before = False, -1
        while self._thread.is_alive() and self._written != before:
            before = self._written
            with contextlib.suppress(queue.Full):
                if not asked:
                    self._waiting.put(None, timeout=CLOSE_TIMEOUT_S)
                    asked = True
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "the history is not completely written", action="history_incomplete", group=self._group
            )

    def _run(self) -> None:
        while (taken := self._waiting.get()) is not None:
            moment, report = taken
            self._journal.write_at(moment, self._events(report))

    def _events(self, report: Report) -> Iterator[Event]:
        from rebalanser.history import event_of  # noqa: PLC0415 - loaded with the journal

        for fact in report.facts():
            self._written += 1
            yield event_of(fact, fenced=self._fenced, offers=self._offers)


def _open_journal(group: str, label: str, process: str, settings: Settings, clock: Clock) -> Journal | None:
    """The journal that the settings ask for; without one its modules, slow to import, are not loaded."""
    if settings.history_dir is None and settings.history_topic is None:
        return None
    from rebalanser.history import Journal, Protocol, author_here, open_sinks  # noqa: PLC0415

    return Journal(
        author_here(Protocol.GROUP, group, process, label),
        open_sinks(
            settings.history_dir,
            settings.history_topic,
            group,
            label,
            settings.history_max_bytes,
            settings.history_file_mode,
        ),
        wall=clock.wall,
        monotonic=clock.now,
    )
