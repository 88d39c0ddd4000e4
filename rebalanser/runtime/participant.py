"""Runs a participant until a signal or a call stops it, in the main thread or its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from rebalanser.errors import InvalidState

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request a graceful stop; SIGHUP does not if it was ignored before, as under nohup."""
SAME_PRESS_S: Final = 0.3
"""Seconds after the first SIGINT in which further ones count as the same: a terminal and a supervisor may
both send one."""

LOOK_S: Final = 1.0
"""Seconds after which the main thread wakes at the latest, to handle a signal that another thread has caught.

Handlers run only in the main thread, which such a signal does not wake. This happens after a pause: SIGTERM
and SIGCONT to a stopped process, as systemd sends them, may hit any thread.
"""

P = ParamSpec("P")
T = TypeVar("T")


class Participant(Protocol):
    """An object that runs in threads of its own from start to stop, such as a group."""

    def start(self) -> None:
        """Start."""

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until it has stopped. Return False on a timeout."""

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop, and wait until it has stopped."""


class AsyncParticipant(Protocol):
    """A participant whose start and stop are awaited."""

    async def start(self) -> None:
        """Start."""

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""

    async def stop(self, timeout_s: float | None = None) -> None:
        """Stop, and wait until it has stopped."""


class _StopSignals:
    """The participants of this process that stop on a signal. Handles the signals while there are any."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._stops: dict[object, Callable[[], None]] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._interrupted_at: float | None = None
        self._may_interrupt = True
        self._interrupt_due = False
        self.asked = False
        """True once a signal has requested a stop; a participant that starts later stops at once."""

    @contextlib.contextmanager
    def stopping(self, request_stop: Callable[[], None]) -> Iterator[None]:
        """Call ``request_stop``, in a thread, at the first signal within the block."""
        if not self._stops:
            self._install()
        registration = object()
        self._stops[registration] = request_stop
        try:
            yield
        finally:
            del self._stops[registration]
            if not self._stops:
                self._restore()

    def _install(self) -> None:
        self.asked = self._interrupt_due = False
        self._interrupted_at = None
        for number in STOP_SIGNALS:
            before = signal.getsignal(number)
            if number == signal.SIGHUP and before is signal.SIG_IGN:
                continue
            self._before[number] = before
            signal.signal(number, self._handle)

    def _restore(self) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self._is_first_interrupt():
            self._interrupt(frame)
            return
        if self.asked:
            return
        self.asked = True
        for stop in list(self._stops.values()):
            # In another thread: this one may have been interrupted while it held a lock that stopping needs.
            threading.Thread(target=stop, name="rebalanser-signal", daemon=True).start()

    def _is_first_interrupt(self) -> bool:
        now = self._now()
        if self._interrupted_at is None:
            self._interrupted_at = now
        return now - self._interrupted_at < SAME_PRESS_S

    def _interrupt(self, frame: FrameType | None) -> None:
        """Call the previous handler of SIGINT, now or as soon as that is safe."""
        self._interrupt_due = not self._may_interrupt
        if self._interrupt_due:
            return
        before = self._before[signal.SIGINT]
        (before if callable(before) else signal.default_int_handler)(signal.SIGINT, frame)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer a further SIGINT to the next call of ``interruptible`` in the block."""
        self._may_interrupt = False
        try:
            yield
        finally:
            self._may_interrupt = True

    def interruptible(self, wait: Callable[[], object]) -> None:
        """Call ``wait``; a further SIGINT may interrupt it."""
        self._may_interrupt = True
        try:
            if self._interrupt_due:
                self._interrupt(None)
            wait()
        finally:
            self._may_interrupt = False


_SIGNALS: Final = _StopSignals()
stopping_on_signals: Final = _SIGNALS.stopping


def run_until_stopped(participant: Participant) -> None:
    """Run a participant until SIGINT, SIGTERM or SIGHUP, or until a stop is requested; then stop it.

    A second SIGINT has its usual effect, unless it comes with the first one (``SAME_PRESS_S``). Further
    SIGTERMs and SIGHUPs are ignored, as some supervisors send several. A signal stops all participants of
    the process.

    Raises:
        InvalidState: it was not called in the main thread, the only one that gets signals.
    """
    _refuse_other_threads()
    with _SIGNALS.stopping(participant.request_stop):
        participant.start()
        with _SIGNALS.held():
            try:
                if _SIGNALS.asked:
                    participant.request_stop()
                _SIGNALS.interruptible(partial(_wait_awake, participant))
            except KeyboardInterrupt:
                raise
            except BaseException:
                participant.stop()
                raise
            participant.stop()


def _wait_awake(participant: Participant) -> None:
    while not participant.wait_stopped(LOOK_S):
        pass


async def run_in_loop_until_stopped(
    participant: AsyncParticipant, wait_stopped: Callable[[], object]
) -> None:
    """Do as ``run_until_stopped`` in an event loop; ``wait_stopped`` blocks, and runs in a thread."""
    _refuse_other_threads()
    with _SIGNALS.stopping(participant.request_stop):
        await participant.start()
        try:
            if _SIGNALS.asked:
                participant.request_stop()
            waiting = asyncio.ensure_future(in_own_thread(wait_stopped))
            while not (await asyncio.wait([waiting], timeout=LOOK_S))[0]:
                pass
            await waiting
        finally:
            await participant.stop()


async def in_own_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function that may block for long in a new thread, and return or raise what it does.

    The default executor has few threads, and they are for the host application.
    """
    return await begin_in_own_thread(function, *arguments, **named)


def begin_in_own_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> asyncio.Future[T]:
    """Begin such a call. Its future is no task, so that the end of the loop does not cancel it."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[T] = loop.create_future()
    call = partial(contextvars.copy_context().run, function, *arguments, **named)

    def answer(result: T | None, error: BaseException | None) -> None:
        if answered.done():
            return
        if error is not None:
            answered.set_exception(error)
        else:
            answered.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            loop.call_soon_threadsafe(answer, result, error)

    threading.Thread(target=run, name="rebalanser-waiting", daemon=True).start()
    return answered


def _refuse_other_threads() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise InvalidState("run() waits for signals, which only the main thread gets; use start() and stop()")
