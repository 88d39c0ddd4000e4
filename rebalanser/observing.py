"""Who is told what happens on a node: the log, the history, and the application's own hooks."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rebalanser.history import Journal, Protocol, author_here, event_of, open_sinks
from rebalanser.protocol import Fact
from rebalanser.runtime.clock import Clock
from rebalanser.runtime.logs import get_logger, log_fact
from rebalanser.settings import Settings

CLOSE_TIMEOUT_S = 2.0
QUEUE_SIZE = 10_000

_log = get_logger()


class Observer:
    """Tells each fact on, in order. Never blocks the protocol and never fails it.

    The history takes a fact in at once; the log and the hooks hear of it in a thread of their own, since
    either may block, as a terminal does under Ctrl-S, and a node that waits for one could not stop in time.
    ``process`` names the process in the history: the stem of the ids of its node's incarnations.

    Raises:
        FixConfiguration: the history can't be written where the settings say.
    """

    def __init__(
        self,
        group: str,
        label: str,
        process: str,
        settings: Settings,
        clock: Clock,
        hooks: Sequence[Callable[[Fact], None]],
    ) -> None:
        self._group = group
        self._hooks = hooks
        self._fenced = settings.fenced
        self._journal = Journal(
            author_here(Protocol.GROUP, group, process, label),
            open_sinks(
                settings.history_dir, settings.history_topic, group, label, settings.history_max_bytes
            ),
            wall=clock.wall,
            monotonic=clock.now,
        )
        self._told: queue.Queue[Fact | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self._untold = 0
        self._thread = threading.Thread(target=self._run, name=f"rebalanser-facts-{group}", daemon=True)
        self._thread.start()

    def observe(self, fact: Fact) -> None:
        """Tell everyone. What comes faster than the log and the hooks can take it is counted and dropped."""
        self._journal.write(event_of(fact, fenced=self._fenced))
        try:
            self._told.put_nowait(fact)
        except queue.Full:
            self._untold += 1

    def _run(self) -> None:
        while (fact := self._told.get()) is not None:
            self._tell(self._log, fact)
            for hook in self._hooks:
                self._tell(hook, fact)
            if self._untold and self._told.empty():
                untold, self._untold = self._untold, 0
                self._warn(
                    "facts were dropped: log and hooks are too slow", action="facts_dropped", count=untold
                )

    def _log(self, fact: Fact) -> None:
        log_fact(fact, self._group)

    def _tell(self, hook: Callable[[Fact], None], fact: Fact) -> None:
        try:
            hook(fact)
        except BaseException as error:
            self._warn("a log or a hook raised", action="hook_failed", exc_info=error)

    def _warn(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(Exception):
            _log.warning(event, group=self._group, **fields)

    def warn_of(self, reasons: Sequence[str]) -> None:
        """Say at start what is known to weaken this registry's promises."""
        for reason in reasons:
            self._warn(reason, action="unsafe_registry")

    def close(self) -> None:
        """Let log and hooks hear what is still to be told, and put the history on disk."""
        with contextlib.suppress(queue.Full):
            self._told.put(None, timeout=CLOSE_TIMEOUT_S)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._journal.close(CLOSE_TIMEOUT_S)
