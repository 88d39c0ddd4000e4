"""Passes facts of a NELI group on to the history, the log, and the application's own hooks."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rebalanser.core.neli.messages import Fact, FactKind
from rebalanser.neli.history import LeadershipHistory
from rebalanser.runtime.logs import get_logger

QUEUE_SIZE: Final = 10_000
CLOSE_TIMEOUT_S: Final = 2.0

_WRONG: Final = {FactKind.FAILED, FactKind.HANDLER_FAILED, FactKind.HANDLER_OVERRAN}
_STRANGE: Final = {FactKind.CLOCK_OFF, FactKind.FENCED, FactKind.LOST}
_DETAILED: Final = {
    FactKind.COMMIT_FAILED,
    FactKind.ENDED,
    FactKind.RELEASED,
    FactKind.SUCCEEDS,
    FactKind.WAITS,
}


def _level(kind: FactKind) -> int:
    if kind in _WRONG:
        return logging.ERROR
    if kind in _STRANGE:
        return logging.WARNING
    return logging.DEBUG if kind in _DETAILED else logging.INFO


LEVELS: Final[Mapping[FactKind, int]] = MappingProxyType({kind: _level(kind) for kind in FactKind})
"""Log level of each kind of fact."""

_log: Final = get_logger("rebalanser.neli")


class FactReporter:
    """Passes facts on, in order: to the history at once, to log and hooks in a thread of its own.

    A log that blocks must not delay the polling; the history never blocks.
    """

    def __init__(
        self,
        group: str,
        hooks: Sequence[Callable[[Fact], None]],
        history: LeadershipHistory | None = None,
    ) -> None:
        self._group = group
        self._hooks = hooks
        self._history = history
        self._untold: queue.Queue[Fact | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self._dropped = 0
        name = f"rebalanser-neli-facts-{group}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def tell(self, fact: Fact) -> None:
        """Take a fact and return at once. Facts beyond the queue's limit are counted and dropped."""
        if self._history is not None:
            self._history.tell(fact)
        try:
            self._untold.put_nowait(fact)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Wait until all facts are passed on, two seconds at most."""
        with contextlib.suppress(queue.Full):
            self._untold.put(None, timeout=CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (fact := self._untold.get()) is not None:
            with contextlib.suppress(Exception):
                self._write(fact)
            for hook in self._hooks:
                try:
                    hook(fact)
                except Exception as error:
                    _log.warning("a hook raised", action="hook_failed", group=self._group, error=repr(error))
            if self._dropped and self._untold.empty():
                dropped, self._dropped = self._dropped, 0
                _log.warning("facts were dropped", action="facts_dropped", group=self._group, count=dropped)

    def _write(self, fact: Fact) -> None:
        known: dict[str, Any] = {"partition": fact.partition, "token": fact.token}
        fields = {
            **fact.detail,
            "action": fact.kind.value,
            "group": self._group,
            **{name: value for name, value in known.items() if value is not None},
        }
        _log.log(LEVELS[fact.kind], fact.kind.value.replace("_", " "), **fields)
