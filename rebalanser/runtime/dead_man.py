"""The dead man's switch: the kernel kills this process unless its timer is set again in time (RB-34).

A POSIX timer on CLOCK_BOOTTIME with SIGKILL as its signal needs no thread, no interpreter and no handler of
this process: it fires while the process is stopped, while a C call holds the interpreter's lock, and while a
handler never returns. CLOCK_BOOTTIME continues while the host is suspended, as a lease does.

The kernel sends the signal as one process would send it to another, so it can't kill the first process of a
container (PID 1 of its namespace): there the switch is refused.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any, Final

from rebalanser.errors import Forked, InternalError, InvalidSettings, InvalidState

_SIGEV_SIGNAL: Final = 0
_TIMER_ABSTIME: Final = 1
_NS: Final = 1_000_000_000


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` of glibc and musl: 64 bytes in all, of which SIGEV_SIGNAL needs the first three."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * (64 - ctypes.sizeof(ctypes.c_void_p) - 2 * ctypes.sizeof(ctypes.c_int))),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: a first time of 0 disarms; with an interval of 0 the timer fires once."""

    _fields_ = (("interval", _TimeSpec), ("first", _TimeSpec))


class DeadMansSwitch:
    """Kills this process with SIGKILL at the deadline last given. May be used from any thread.

    A child of ``fork`` does not inherit the timer, and a timer of its own may get the same id. So in a child
    ``arm`` raises, and the other methods do nothing.
    """

    __slots__ = ("_clear", "_first", "_libc", "_lock", "_pid", "_spec", "_timer")

    def __init__(self) -> None:
        """Create the timer, disarmed.

        Raises:
            InvalidSettings: this system can't have the timer; the message says why.
        """
        self._libc = _library()
        self._timer: ctypes.c_void_p | None = _create(self._libc)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        spec = _TimerSpec()
        self._first = spec.first
        self._spec = ctypes.byref(spec)
        self._clear = ctypes.byref(_TimerSpec())

    @staticmethod
    def available() -> str | None:
        """Return why this system can't have the switch, or None if it can."""
        try:
            DeadMansSwitch().close()
        except InvalidSettings as refused:
            return str(refused)
        return None

    def arm(self, deadline: float) -> None:
        """Kill this process at ``deadline`` (seconds of CLOCK_BOOTTIME), at once if that is past.

        Replaces the previous deadline. Takes a few microseconds.

        Raises:
            Forked: this process is a child of the one that made the switch.
            InvalidState: the switch is closed.
        """
        if os.getpid() != self._pid:
            raise Forked("the dead man's switch guards the parent of this process only")
        nanoseconds = max(1, int(deadline * _NS))
        with self._lock:
            if self._timer is None:
                raise InvalidState("the dead man's switch is closed")
            self._first.seconds, self._first.nanoseconds = divmod(nanoseconds, _NS)
            self._set(self._timer, self._spec)

    def disarm(self) -> None:
        """Cancel the deadline. Does nothing once closed."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._timer is not None:
                self._set(self._timer, self._clear)

    def close(self) -> None:
        """Disarm and delete the timer. Closing twice does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            timer, self._timer = self._timer, None
            if timer is not None:
                self._libc.timer_delete(timer)

    def _set(self, timer: ctypes.c_void_p, spec: Any) -> None:
        if self._libc.timer_settime(timer, _TIMER_ABSTIME, spec, None):
            raise InternalError(f"the dead man's switch can't be set: {_errno()}")


def _library() -> Any:
    """Load the C library's timer functions; calls keep the interpreter's lock.

    A call takes less than a microsecond. If it released the lock, another thread could run for 5 ms.
    """
    if sys.platform != "linux":
        raise _refused(f"{sys.platform} is not Linux")
    for name in (None, "librt.so.1"):
        try:
            library = ctypes.PyDLL(name, use_errno=True)
        except OSError:
            continue
        if hasattr(library, "timer_create"):
            return library
    raise _refused("the C library has no timer_create")


def _create(library: Any) -> ctypes.c_void_p:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        raise _refused("the system has no CLOCK_BOOTTIME")
    if os.getpid() == 1:
        raise _refused(
            "PID 1 of a container can't be killed by its own timer; run it under an init (docker run --init)"
        )
    timer = ctypes.c_void_p()
    event = _SigEvent(signo=signal.SIGKILL, notify=_SIGEV_SIGNAL)
    if library.timer_create(ctypes.c_int(clock), ctypes.byref(event), ctypes.byref(timer)):
        raise _refused(f"timer_create failed: {_errno()}")
    return timer


def _errno() -> str:
    return os.strerror(ctypes.get_errno())


def _refused(reason: str) -> InvalidSettings:
    return InvalidSettings(
        f'on_overrun="kill" needs a kernel timer, which is not available here: {reason}; '
        'choose on_overrun="report" and resources that check the fencing token'
    )
