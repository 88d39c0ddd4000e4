"""Waiting for real parts, such as processes and servers, until something is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import tenacity

PATIENCE_S: Final = 120.0
"""Far longer than anything takes that works, also on a busy machine; waiting ends as soon as it is so."""
_LOOK_S: Final = 0.02

FoundT = TypeVar("FoundT")


def wait_until(reached: Callable[[], FoundT | None], what: str = "", timeout_s: float = PATIENCE_S) -> FoundT:
    """Look every 20 ms until ``reached`` answers something true; that answer.

    Raises:
        AssertionError: it did not within ``timeout_s`` seconds; ``what`` says what was waited for.
    """
    found = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda found: not found),
        stop=tenacity.stop_after_delay(timeout_s),
        wait=tenacity.wait_fixed(_LOOK_S),
        retry_error_callback=lambda _state: None,
    )(reached)
    if not found:
        raise AssertionError(f"not within {timeout_s:g} s{': ' if what else ''}{what}")
    return found
