"""Who is told what happens on a node: the log, the history, and the application's own hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rebalanser.history import HistorySink, JsonlSink, Record
from rebalanser.protocol import Fact
from rebalanser.runtime.clock import Clock
from rebalanser.runtime.logs import get_logger, log_fact
from rebalanser.settings import Settings

HISTORY_FILES = 8
CLOSE_TIMEOUT_S = 2.0

_log = get_logger()


class Observer:
    """Tells each fact on, in order. Never blocks the protocol and never fails it."""

    def __init__(
        self,
        group: str,
        label: str,
        settings: Settings,
        clock: Clock,
        hooks: Sequence[Callable[[Fact], None]],
    ) -> None:
        self._group = group
        self._label = label
        self._clock = clock
        self._hooks = hooks
        self._lock = threading.Lock()
        self._sequence = 0
        self._sink: HistorySink | None = None
        if settings.history_dir is not None:
            self._sink = JsonlSink(
                settings.history_dir,
                group,
                label,
                max_file_bytes=settings.history_max_bytes // HISTORY_FILES,
                max_files=HISTORY_FILES,
            )

    def observe(self, fact: Fact) -> None:
        """Tell everyone."""
        self._tell(self._write, fact)
        self._tell(self._log, fact)
        for hook in self._hooks:
            self._tell(hook, fact)

    def _write(self, fact: Fact) -> None:
        sink = self._sink
        if sink is None:
            return
        with self._lock:
            record = Record.from_fact(
                fact,
                group=self._group,
                label=self._label,
                sequence=self._sequence,
                wall=self._clock.wall(),
                monotonic=self._clock.now(),
            )
            self._sequence += 1
            sink.write(record)

    def _log(self, fact: Fact) -> None:
        log_fact(fact, self._group)

    def _tell(self, hook: Callable[[Fact], None], fact: Fact) -> None:
        try:
            hook(fact)
        except Exception:
            _log.exception("a hook raised", action="hook_failed", group=self._group)

    def warn_of(self, reasons: Sequence[str]) -> None:
        """Say at start what is known to weaken this registry's promises."""
        for reason in reasons:
            _log.warning(reason, action="unsafe_registry", group=self._group)

    def close(self) -> None:
        """Put what is still to be written on disk."""
        if self._sink is not None:
            self._sink.close(CLOSE_TIMEOUT_S)
