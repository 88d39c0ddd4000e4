"""Who stops on which signal, and when a further one has its usual effect."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rebalanser.errors import InvalidState
from rebalanser.runtime import participant
from rebalanser.runtime.participant import (
    SAME_PRESS_S,
    STOP_SIGNALS,
    in_own_thread,
    run_in_loop_until_stopped,
    run_until_stopped,
)
from rebalanser.testing import FakeClock
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.rule("RB-26")


class Work:
    """Takes part until it is asked to stop; a test may have something done in each of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked = threading.Event()
        self.doing: dict[str, Callable[[], object]] = {"wait": lambda: self.asked.wait(PATIENCE_S)}

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.doing.get(name, lambda: None)()

    def start(self) -> None:
        self._called("start")

    def request_stop(self) -> None:
        self.asked.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        assert timeout_s in {None, participant.LOOK_S}
        self._called("wait")
        return True

    def stop(self, timeout_s: float | None = None) -> None:
        assert timeout_s is None
        self._called("stop")


@pytest.fixture
def clock(hangup: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    """The clock by which SIGINTs are told apart."""
    clock = FakeClock()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(participant, "_SIGNALS", participant._StopSignals(clock.now))
    yield clock
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class CaughtElsewhere(Work):
    """Begins with a thread of its own that catches SIGTERM, as any thread may after a pause."""

    def start(self) -> None:
        main = threading.main_thread()

        def sleeps() -> bool:
            """True if the main thread waits: a signal does not wake it then."""
            file = sys._current_frames()[main.ident or 0].f_code.co_filename
            state = Path(f"/proc/self/task/{main.native_id}/stat").read_text().rpartition(")")[2].split()[0]
            return state == "S" and file.endswith(("threading.py", "selectors.py"))

        def catch() -> None:
            wait_until(sleeps)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        thread = threading.Thread(target=catch)
        self.doing["wait"] = thread.start
        self.calls.append("start")

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        if "wait" not in self.calls:
            self._called("wait")
        patience_s = PATIENCE_S if timeout_s is None else timeout_s
        heard = self.asked.wait(patience_s)
        assert heard or patience_s < PATIENCE_S, "nothing wakes the main thread"
        return heard


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("in_loop", [False, True])
def test_a_signal_that_another_thread_has_caught_stops_it_too(
    monkeypatch: pytest.MonkeyPatch, *, in_loop: bool
) -> None:
    monkeypatch.setattr(participant, "LOOK_S", 0.01)
    work = CaughtElsewhere()

    class Participant:
        async def start(self) -> None:
            work.start()

        def request_stop(self) -> None:
            work.request_stop()

        async def stop(self, timeout_s: float | None = None) -> None:
            work.stop(timeout_s)

    async def run() -> None:
        await run_in_loop_until_stopped(Participant(), partial(work.wait_stopped, PATIENCE_S))

    if in_loop:
        asyncio.run(run())
    else:
        run_until_stopped(work)
    assert work.asked.is_set()
    assert work.calls == ["start", "wait", "stop"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops_all_that_run_and_what_begins_to_run_later(number: signal.Signals) -> None:
    first, second = threading.Event(), threading.Event()
    work = Work()
    with participant._SIGNALS.stopping(first.set), participant._SIGNALS.stopping(second.set):
        assert not participant._SIGNALS.asked
        signal.raise_signal(number)
        assert first.wait(PATIENCE_S)
        assert second.wait(PATIENCE_S)
        run_until_stopped(work)
    assert work.calls == ["start", "wait", "stop"]
    with participant._SIGNALS.stopping(first.set):
        assert not participant._SIGNALS.asked, "all that ran has ended"


@pytest.mark.usefixtures("clock")
def test_what_was_told_to_ignore_sighup_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with participant._SIGNALS.stopping(lambda: None):
            signal.raise_signal(signal.SIGHUP)
            assert not participant._SIGNALS.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("clock")
def test_further_signals_other_than_sigint_are_ignored() -> None:
    asked: list[int] = []
    work = Work()

    def ask() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
        work.asked.wait(PATIENCE_S)

    work.doing["wait"] = ask
    with participant._SIGNALS.stopping(lambda: asked.append(1)):
        run_until_stopped(work)
    assert asked == [1]
    assert work.calls == ["start", "wait", "stop"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_further_sigint_ends_the_wait_and_nothing_is_awaited_any_more(
    clock: FakeClock, first: signal.Signals
) -> None:
    work = Work()

    def press() -> None:
        signal.raise_signal(first)
        interrupt()
        clock.advance(0.9 * SAME_PRESS_S)
        interrupt()
        work.calls.append("goes on")
        clock.advance(0.2 * SAME_PRESS_S)
        interrupt()

    work.doing["wait"] = press
    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(work)
    assert work.calls == ["start", "wait", "goes on"]


def test_a_further_sigint_never_comes_between_the_wait_and_the_stop(clock: FakeClock) -> None:
    work = Work()

    def press() -> None:
        clock.advance(2 * SAME_PRESS_S)
        interrupt()
        work.calls.append("stopped")

    work.doing |= {"wait": interrupt, "stop": press}
    run_until_stopped(work)
    assert work.calls == ["start", "wait", "stop", "stopped"]


def test_a_sigint_that_was_put_off_comes_with_the_wait(clock: FakeClock) -> None:
    work = Work()

    def press() -> None:
        if threading.current_thread() is threading.main_thread():
            clock.advance(2 * SAME_PRESS_S)
            interrupt()

    work.request_stop = press  # type: ignore[method-assign]
    work.doing["start"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(work)
    assert work.calls == ["start"]


@pytest.mark.usefixtures("clock")
def test_what_fails_while_it_is_waited_for_is_stopped() -> None:
    work = Work()

    def fail() -> None:
        raise InvalidState("no")

    work.doing["wait"] = fail
    with pytest.raises(InvalidState, match="no"):
        run_until_stopped(work)
    assert work.calls == ["start", "wait", "stop"]


@pytest.mark.usefixtures("clock")
def test_a_signal_that_comes_too_early_to_be_obeyed_is_not_forgotten_in_a_loop() -> None:
    work, obeyed = Work(), threading.Event()

    class Starting:
        async def start(self) -> None:
            interrupt()
            await in_own_thread(obeyed.wait, PATIENCE_S)
            work.asked.clear()

        def request_stop(self) -> None:
            work.request_stop()
            obeyed.set()

        async def stop(self, timeout_s: float | None = None) -> None:
            work.stop(timeout_s)

    async def main() -> None:
        await run_in_loop_until_stopped(Starting(), work.wait_stopped)

    asyncio.run(main())
    assert work.asked.is_set()
    assert work.calls == ["wait", "stop"]


def test_a_blocking_call_is_made_in_a_thread_of_its_own() -> None:
    def fail() -> None:
        raise InvalidState("no")

    async def main() -> None:
        may_end = threading.Event()
        waiting = [asyncio.ensure_future(in_own_thread(may_end.wait, PATIENCE_S)) for _ in range(50)]
        assert await in_own_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(InvalidState, match="no"):
            await in_own_thread(fail)
        waiting.pop().cancel()
        may_end.set()
        assert all(await asyncio.gather(*waiting))

    asyncio.run(main())
