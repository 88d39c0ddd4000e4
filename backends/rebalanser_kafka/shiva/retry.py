"""Retries of reads while a broker is unavailable, or has just come back and leads no topic yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

import tenacity

from rebalanser.errors import RegistryUnavailable

_PAUSE_S: Final = 0.1
_LEAST_S: Final = 0.001
T = TypeVar("T")


def patiently(ask: Callable[[float], T], timeout_s: float) -> T:
    """Return the answer of ``ask``, a read that gets the seconds left; retry while the broker is away.

    Raises:
        RegistryUnavailable: the last one that ``ask`` raised within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    asking = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RegistryUnavailable),
        wait=tenacity.wait_fixed(_PAUSE_S),
        stop=lambda _state: time.monotonic() + _PAUSE_S >= deadline,
        reraise=True,
    )
    return asking(lambda: ask(max(_LEAST_S, deadline - time.monotonic())))
