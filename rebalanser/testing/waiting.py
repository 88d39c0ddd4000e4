"""Waits of tests for real parts, such as processes and servers.

A wait ends as soon as its event happens. Its limit only ends a test that has failed, so one generous limit
serves all waits. Set the environment variable ``REBALANSER_TEST_PATIENCE`` to scale it on a slow or busy
machine: 2 doubles it. It is a positive number, by default 1, and scales pytest's timeout of each test too.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

import tenacity

from rebalanser.errors import InvalidSettings

PATIENCE_VARIABLE: Final = "REBALANSER_TEST_PATIENCE"
_LOOK_S: Final = 0.02

FoundT = TypeVar("FoundT")
EventT = TypeVar("EventT")


def patience_ratio() -> float:
    """Factor by which the environment variable ``REBALANSER_TEST_PATIENCE`` scales every limit; default 1.

    Raises:
        InvalidSettings: the variable is not a positive number.
    """
    text = os.environ.get(PATIENCE_VARIABLE, "1")
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not (0 < ratio < math.inf):
        raise InvalidSettings(f"invalid {PATIENCE_VARIABLE} {text!r}: use a positive number such as 2")
    return ratio


PATIENCE_S: Final = 120.0 * patience_ratio()
"""Limit of a wait, in seconds: 120 times ``REBALANSER_TEST_PATIENCE``."""


def wait_until(
    reached: Callable[[], FoundT | None], what: str | Callable[[], str] = "", timeout_s: float = PATIENCE_S
) -> FoundT:
    """Call ``reached`` every 20 ms until its result is true, and return that result.

    Raises:
        AssertionError: no true result within ``timeout_s`` seconds; ``what`` names the awaited event, or is
            called for that text once the time is over.
    """
    found = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda found: not found),
        stop=tenacity.stop_after_delay(timeout_s),
        wait=tenacity.wait_fixed(_LOOK_S),
        retry_error_callback=lambda _state: None,
    )(reached)
    if not found:
        told = what() if callable(what) else what
        raise AssertionError(f"not within {timeout_s:g} s{': ' if told else ''}{told}")
    return found


class Recorder(Generic[EventT]):
    """Records the events of a watch, and lets a test wait for them. May be used from any thread."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._told: list[EventT] = []
        self._threads: set[int] = set()
        self._more = threading.Condition()

    def record(self, events: Iterable[EventT]) -> None:
        """Record events, and the thread that reports them."""
        with self._more:
            self._told.extend(events)
            self._threads.add(threading.get_ident())
            self._more.notify_all()

    @property
    def told(self) -> tuple[EventT, ...]:
        """All events so far."""
        with self._more:
            return tuple(self._told)

    @property
    def threads(self) -> frozenset[int]:
        """The identifiers of the threads that called the sink."""
        with self._more:
            return frozenset(self._threads)

    def wait_until(self, satisfied: Callable[[Sequence[EventT]], bool], what: str) -> None:
        """Block until ``satisfied(told)``; raise AssertionError when patience is over."""
        with self._more:
            if not self._more.wait_for(lambda: satisfied(self._told), timeout=self._patience_s):
                raise AssertionError(
                    f"not told within {self._patience_s} s: {what}; told: {self._told[-20:]}"
                )
