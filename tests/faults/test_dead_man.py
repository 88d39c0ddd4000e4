"""The dead man's switch on real processes: what hangs or is stopped dies, what lives on does not (RB-34)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from rebalanser.errors import Forked, InternalError, InvalidSettings, InvalidState
from rebalanser.runtime.dead_man import DeadMansSwitch
from rebalanser.testing.pausing import pause
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG_S = 600
OTHERS_S = 300.0
"""Deadline of a switch that is disarmed; later than ``PATIENCE_S`` would be no proof."""
DIES_WITHIN_S = 5.0
"""Most between arming and the death of a process that hangs, whose deadline is 0.3 s (RB-34)."""

PRELUDE = textwrap.dedent("""
    import ctypes, os, re, sys, threading, time
    from rebalanser.runtime.clock import SystemClock
    from rebalanser.runtime.dead_man import DeadMansSwitch

    clock = SystemClock()
    switch = DeadMansSwitch()

    def say(word):
        print(word, flush=True)
""")

COUNTING = textwrap.dedent("""
    import mmap, os, sys, threading, time

    def count():
        with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
            number = 0
            while True:
                number += 1
                shared[:] = number.to_bytes(8, "big")

    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    threading.Thread(target=count, daemon=True).start()
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    print("counting", flush=True)
    time.sleep(600)
""")
"""Counts in a file, on one CPU, with a main thread that comes last."""

pytestmark = pytest.mark.skipif(
    DeadMansSwitch.available() is not None, reason=DeadMansSwitch.available() or "it is available"
)


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts Python with a switch and a body; what still lives afterwards is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        code = PRELUDE + textwrap.dedent(body)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def died_after_s(process: subprocess.Popen[str], word: str = "armed") -> float:
    """Seconds of the lease clock from what the child said to its death by SIGKILL."""
    said, _, at = heard(process).partition(" ")
    assert said == word
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    return time.clock_gettime(time.CLOCK_BOOTTIME) - float(at)


ARMED = """
    now = clock.now()
    say(f"armed {now}")
    switch.arm(now + 0.3)
"""


@pytest.mark.rule("RB-34")
def test_a_stopped_process_dies(child: Callable[[str], subprocess.Popen[str]]) -> None:
    process = child("switch.arm(clock.now() + 1.5)\nsay('armed')\n" + f"time.sleep({LONG_S})")
    assert heard(process) == "armed"
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it was stopped before it died"
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_of_a_paused_process_no_thread_runs_on(tmp_path: Path) -> None:
    """The signal goes to its main thread, which waits here for the CPU that another thread has."""
    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    process = subprocess.Popen([sys.executable, "-c", COUNTING, str(counter)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(20):
            pause(process)
            before = counter.read_bytes()
            time.sleep(0.02)
            assert counter.read_bytes() == before
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.rule("RB-34")
@pytest.mark.parametrize("linger", [False, True])
def test_what_the_kernel_had_taken_is_sent_after_death_unless_the_socket_lingers_for_no_time(
    child: Callable[[str], subprocess.Popen[str]], linger: bool
) -> None:
    written = 200_000
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen()
        process = child(f"""
            import socket, struct
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {4 * written})
            client.connect({server.getsockname()})
            if {linger}:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(bytes({written}))
            switch.arm(clock.now())
            time.sleep({LONG_S})
        """)
        receiver, _ = server.accept()
    with receiver:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        received, reset = 0, False
        try:
            while chunk := receiver.recv(written):
                received += len(chunk)
        except ConnectionResetError:
            reset = True
    assert reset == linger
    assert received < written if linger else received == written


@pytest.mark.rule("RB-34")
@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(f"ctypes.PyDLL(None).sleep({LONG_S})", id="interpreter lock held by a C call"),
        pytest.param("re.match(r'(a+)+$', 'a' * 60 + 'b')", id="regular expression without an end"),
        pytest.param(f"threading.Event().wait({LONG_S})", id="handler that never returns"),
        pytest.param(
            f"threading.Thread(target=ctypes.PyDLL(None).sleep, args=({LONG_S},)).start()",
            id="interpreter lock held by another thread",
        ),
    ],
)
def test_a_process_that_hangs_dies_in_time(child: Callable[[str], subprocess.Popen[str]], hang: str) -> None:
    waited_s = died_after_s(child(textwrap.dedent(ARMED) + hang))
    assert 0.3 <= waited_s < DIES_WITHIN_S


@pytest.mark.rule("RB-34")
def test_a_past_deadline_kills_at_once(child: Callable[[str], subprocess.Popen[str]]) -> None:
    for past in ("clock.now()", "clock.now() - 1000", "0.0", "-5.0"):
        process = child(f"say('armed')\nswitch.arm({past})\ntime.sleep({LONG_S})")
        assert heard(process) == "armed"
        assert process.wait(PATIENCE_S) == -signal.SIGKILL, past


def test_arming_again_replaces_the_deadline(child: Callable[[str], subprocess.Popen[str]]) -> None:
    process = child("""
        began = clock.now()
        while (now := clock.now()) < began + 1.5:
            switch.arm(now + 1)
            time.sleep(0.01)
        say(f"armed {now}")
        switch.arm(now + 0.3)
        time.sleep(600)
    """)
    assert died_after_s(process) >= 0.3, "the first deadlines are long past, and the last one counts"


@pytest.mark.parametrize("end", ["switch.disarm()", "switch.close()", "switch.close(); switch.close()"])
def test_disarmed_or_closed_it_lives(child: Callable[[str], subprocess.Popen[str]], end: str) -> None:
    process = child(f"switch.arm(clock.now() + 0.5)\n{end}\ntime.sleep(0.8)\nsay('alive')")
    assert heard(process) == "alive"
    assert process.wait(PATIENCE_S) == 0


def test_two_switches_do_not_disturb_each_other(child: Callable[[str], subprocess.Popen[str]]) -> None:
    process = child("""
        other = DeadMansSwitch()
        now = clock.now()
        switch.arm(now + 300)
        say(f"armed {now}")
        other.arm(now + 0.3)
        switch.disarm()
        switch.close()
        time.sleep(600)
    """)
    assert 0.3 <= died_after_s(process) < OTHERS_S, "the other switch would have killed it later"


def test_a_forked_child_has_no_switch_and_touches_no_other(
    child: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = child("""
        switch.arm(clock.now() + 600)
        pid = os.fork()
        if pid == 0:
            own = DeadMansSwitch()
            own.arm(clock.now() + 0.3)
            try:
                switch.arm(clock.now() + 600)
            except Exception as error:
                say(type(error).__name__)
            switch.disarm()
            switch.close()
            time.sleep(600)
        _, status = os.waitpid(pid, 0)
        say(f"child died of {os.WTERMSIG(status)}")
        switch.arm(clock.now() + 0.1)
        time.sleep(600)
    """)
    assert heard(process) == Forked.__name__
    assert heard(process) == f"child died of {signal.SIGKILL:d}", "of its own switch, of the same id"
    assert process.wait(PATIENCE_S) == -signal.SIGKILL, "the parent's switch still works"


def test_once_closed_it_can_not_be_armed() -> None:
    switch = DeadMansSwitch()
    switch.close()
    switch.disarm()
    with pytest.raises(InvalidState, match="closed"):
        switch.arm(1.0)


def test_a_timer_that_can_not_be_set_is_told() -> None:
    switch = DeadMansSwitch()
    timer = switch._timer
    assert timer is not None
    switch._libc.timer_delete(timer)
    with pytest.raises(InternalError, match="Invalid argument"):
        switch.arm(1e9)


@pytest.mark.rule("RB-34")
@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (lambda patch: patch.setattr("sys.platform", "darwin"), "darwin is not Linux"),
        (lambda patch: patch.delattr("time.CLOCK_BOOTTIME"), "no CLOCK_BOOTTIME"),
        (lambda patch: patch.setattr("os.getpid", lambda: 1), "PID 1"),
        (lambda patch: patch.setattr("ctypes.PyDLL", _NoTimers), "no timer_create"),
        (lambda patch: patch.setattr("ctypes.PyDLL", _FullTimers), "timer_create failed"),
    ],
    ids=["system", "clock", "container", "library", "kernel"],
)
def test_asking_for_it_is_refused_where_it_can_not_be_had(
    monkeypatch: pytest.MonkeyPatch, patch: Callable[[pytest.MonkeyPatch], None], reason: str
) -> None:
    patch(monkeypatch)
    with pytest.raises(InvalidSettings, match=reason):
        DeadMansSwitch()
    assert reason in (DeadMansSwitch.available() or "")


class _NoTimers:
    """A C library of before timers."""

    def __init__(self, name: str | None, *, use_errno: bool) -> None:
        if name is not None:
            raise OSError(f"{name}: cannot open shared object file")


class _FullTimers:
    """A C library whose kernel gives no timer."""

    def __init__(self, name: str | None, *, use_errno: bool) -> None:
        pass

    def timer_create(self, *_args: object) -> int:
        """Fail as for want of resources."""
        return -1


def test_the_first_process_of_a_container_is_refused() -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is missing: install util-linux")
    namespace = [unshare, "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this system gives no process namespace")
    code = "from rebalanser.runtime.dead_man import DeadMansSwitch as D; print(D.available())"
    result = subprocess.run(
        [*namespace, sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "PID 1" in result.stdout
