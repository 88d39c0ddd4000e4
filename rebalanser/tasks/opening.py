"""A queue's engine: found by its URL, and opened at the start or, with an outbox, when it first answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rebalanser.errors import InvalidState
from rebalanser.registry.urls import RegistryUrl, load_opener, parse_url
from rebalanser.tasks.ancestry import Ancestry
from rebalanser.tasks.context import Context
from rebalanser.tasks.engine import Engine

ENTRY_POINT_GROUP: Final = "rebalanser.engines"

Opener: TypeAlias = Callable[[RegistryUrl, float], Engine]
"""``open(url, timeout_s)``: an engine that has answered once within that time, or an error that says what was
tried: RegistryUnavailable if it did not answer, UnusableStore if no store of tasks can be there."""


def load_engine(url: str) -> tuple[RegistryUrl, Opener]:
    """The URL taken apart, and what opens it.

    Raises:
        InvalidUrl: it is none.
        UnknownScheme: no engine has this scheme; the message names those that there are.
        MissingExtra: its packages are not installed; the message names the extra.
    """
    parsed = parse_url(url)
    opener: Opener = load_opener(parsed.scheme, ENTRY_POINT_GROUP)
    return parsed, opener


@dataclass(frozen=True, slots=True)
class Opened:
    """A queue at an engine that has answered, and how many partitions the queue has."""

    context: Context
    partitions: int
    ancestry: Ancestry
    """Known dependencies of its tasks."""


class Opening:
    """Opens a queue's engine when it is first needed, and keeps it. May be used from any thread."""

    def __init__(self, open_queue: Callable[[], Opened]) -> None:
        self._open_queue = open_queue
        self._lock = threading.Lock()
        self._opened: Opened | None = None
        self._closed = False

    def opened(self) -> Opened:
        """Return what was opened. Raises what opening raises; the next call tries again.

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
