"""Asking a broker again while it is not well: one that has just come back does not lead its topics yet."""

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
    """What ``ask`` answers, given how many seconds are left; it must be of no effect.

    Raises:
        RegistryUnavailable: the last that it raised within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    asking = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(RegistryUnavailable),
        wait=tenacity.wait_fixed(_PAUSE_S),
        stop=lambda _state: time.monotonic() + _PAUSE_S >= deadline,
        reraise=True,
    )
    return asking(lambda: ask(max(_LEAST_S, deadline - time.monotonic())))
