"""The clock that all processes of one host share, and the id of its current run."""

from __future__ import annotations

import time
from typing import Protocol

from rebalanser.boot_id import boot_id
from rebalanser.errors import UnusableStore
from rebalanser_sqlite.failures import OUT_OF_FILES, out_of_files


class MonotonicClock(Protocol):
    """A clock that never goes back while the host runs and is the same in all of its processes."""

    def now(self) -> float:
        """The present time in seconds."""


class HostClock:
    """``CLOCK_BOOTTIME`` if available, so that leases end while the host is suspended; else monotonic."""

    _id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def now(self) -> float:
        """Seconds since the host booted."""
        return time.clock_gettime(self._id)


def host_boot_id() -> str:
    """Return the id of the current run of this host's clock.

    Raises:
        UnusableStore: this platform has no such id, without which leases can't be used.
        RegistryUnavailable: the process or the host has no file descriptor left.
    """
    try:
        return boot_id()
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise out_of_files("the id of the host's boot") from error
        raise UnusableStore(
            f"sqlite:// needs the id of the host's boot, which cannot be read ({error}); use another registry"
        ) from error
