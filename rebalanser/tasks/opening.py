"""A queue's engine, opened once: at the start, or, with an outbox, when it answers for the first time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rebalanser.errors import InvalidState
from rebalanser.tasks.context import Context
from rebalanser.tasks.cycles import Ancestry


@dataclass(frozen=True, slots=True)
class Opened:
    """A queue at an engine that has answered, and how many partitions the queue has."""

    context: Context
    partitions: int
    ancestry: Ancestry
    """What is known of what its tasks wait for."""


class Opening:
    """Opens a queue's engine when it is first needed, and keeps it. May be used from any thread."""

    def __init__(self, open_queue: Callable[[], Opened]) -> None:
        self._open_queue = open_queue
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._closed = False

    def opened(self) -> Opened:
        """What was opened; raises what opening raises, and is then tried again by the next who asks.

        Raises:
            InvalidState: it is closed.
        """
        opened = self._opened
        if opened is not None:
            return opened
        with self._lock:
            if self._closed:
                raise InvalidState("the queue is closed; make another one")
            if self._opened is None:
                self._opened = self._open_queue()
            return self._opened

    def close(self) -> None:
        """Write what waits and let go of the engine, if it was opened. Closing twice does nothing."""
        with self._lock:
            opened, self._opened, self._closed = self._opened, None, True
        if opened is not None:
            opened.context.close()
