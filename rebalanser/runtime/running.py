"""Taking part until a signal or somebody in the process says stop, in the main thread or its event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

from rebalanser.errors import InvalidState

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Participant(Protocol):
    """What takes part in something from its start to its stop, in threads of its own."""

    def start(self) -> None:
        """Begin to take part."""

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until it takes part no longer; whether that is so."""

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop, and wait until that is done."""


class AsyncParticipant(Protocol):
    """A participant whose start and stop are awaited."""

    async def start(self) -> None:
        """Begin to take part."""

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""

    async def stop(self, timeout_s: float | None = None) -> None:
        """Stop, and wait until that is done."""


def run_until_stopped(participant: Participant) -> None:
    """Take part until SIGINT or SIGTERM, or until asked to stop; then stop.

    A second SIGINT has its usual effect; further SIGTERMs are ignored, as some supervisors send several.

    Raises:
        InvalidState: it was not called in the main thread, which alone gets signals.
    """
    _refuse_other_threads()
    with _stopping_on_signals(participant.request_stop) as asked:
        participant.start()
        impatient = False
        try:
            if asked.is_set():
                participant.request_stop()
            participant.wait_stopped()
        except KeyboardInterrupt:
            impatient = True
            raise
        finally:
            if not impatient:
                participant.stop()


async def run_in_loop_until_stopped(
    participant: AsyncParticipant, wait_stopped: Callable[[], object]
) -> None:
    """:func:`run_until_stopped` in an event loop; ``wait_stopped`` blocks, and is called in a thread.

    A second signal has its usual effect.
    """
    _refuse_other_threads()
    with _stopping_on_signals_in_loop(participant.request_stop) as asked:
        await participant.start()
        try:
            if asked.is_set():
                participant.request_stop()
            await asyncio.to_thread(wait_stopped)
        finally:
            await participant.stop()


def _refuse_other_threads() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise InvalidState("run() waits for signals, in the main thread only; use start() and stop()")


@contextmanager
def _stopping_on_signals(request_stop: Callable[[], None]) -> Iterator[threading.Event]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    asked = threading.Event()

    def stop(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT] or signal.SIG_DFL)
        asked.set()
        # A thread of its own: this very one may have been interrupted with a lock that stopping needs.
        threading.Thread(target=request_stop, name="rebalanser-signal", daemon=True).start()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def _stopping_on_signals_in_loop(request_stop: Callable[[], None]) -> Iterator[asyncio.Event]:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        asked.set()
        request_stop()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield asked
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
