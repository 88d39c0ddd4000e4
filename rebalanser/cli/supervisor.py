"""Supervises one subprocess per owned resource: starts it on arrival, stops it before the resource leaves.

A subprocess that exits by itself is restarted after a ``GrowingDelay``. Its output is passed on line by line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, StrEnum, auto
from typing import BinaryIO, Final, TextIO, TypeAlias

from tenacity import RetryCallState, Retrying, retry_if_result
from tenacity.nap import sleep_using_event
from tenacity.stop import stop_when_event_set

from rebalanser.core.clock import GrowingDelay
from rebalanser.errors import InternalError
from rebalanser.group import Group
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.owned import Owned
from rebalanser.runtime.shim_client import CommandStarted, Exited, Outcome, ShimClient
from rebalanser.runtime.supervisor_shim import SupervisedCommand
from rebalanser.settings import Settings

LONGEST_LINE_BYTES: Final = 65_536
"""Maximum length of a line; a longer one is shown in parts."""
LAST_LINES_S: Final = 0.1
"""Maximum seconds to wait for the last lines of a command that has exited."""

STOP_SHARE: Final = 0.8
"""Share of ``stop_timeout_s`` until SIGKILL; the rest is for OnStop to notice and return."""
OWN_HANDS_SHARE: Final = 0.9
"""Share after which the supervisor itself kills, as the shim may have been stopped (SIGSTOP)."""
EXTENSIONS_PER_HEARTBEAT: Final = 4
NEAR: Final = 0.8
"""Similarity from which on a word counts as a mistyped placeholder."""
_PLACEHOLDERS: Final = ("resource", "token")
_PLACEHOLDER: Final = re.compile(rf"\{{({'|'.join(_PLACEHOLDERS)})\}}")
_IN_BRACES: Final = re.compile(r"(?<!\$)\{(\w+)\}")


class Style(Enum):
    """Form of the subprocesses' output."""

    AS_IT_IS = auto()
    """Subprocesses write directly to this process's standard output and error."""
    PREFIXED = auto()
    """Each line begins with ``[resource]``."""
    JSON = auto()
    """Each line is an object, as is each event, on standard output."""


class LineForwarder:
    """Passes on whole lines, so that those of several subprocesses do not mix. Thread-safe."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._lock = threading.Lock()
        self._readers: defaultdict[str, list[threading.Thread]] = defaultdict(list)
        self._begun: dict[str, threading.Event] = {}

    @contextlib.contextmanager
    def of(self, resource: str) -> Iterator[Sequence[int]]:
        """Open the files for a subprocess's output; none if it inherits those of this process."""
        if self._style is Style.AS_IT_IS:
            yield ()
            return
        self._begun[resource] = threading.Event()
        with contextlib.ExitStack() as ends:
            yield [ends.enter_context(self._pipe(resource, stream)) for stream in ("stdout", "stderr")]

    @contextlib.contextmanager
    def _pipe(self, resource: str, stream: str) -> Iterator[int]:
        reading, writing = os.pipe()
        try:
            lines = os.fdopen(reading, "rb")
            name = f"rebalanser-{stream}-{resource}"
            reader = threading.Thread(
                target=self._read,
                args=(resource, stream, lines, self._begun[resource]),
                name=name,
                daemon=True,
            )
            reader.start()
            self._readers[resource].append(reader)
            yield writing
        finally:
            os.close(writing)

    def begin(self, resource: str) -> None:
        """Pass on the output of a subprocess, and report that it has started."""
        if resource in self._begun:
            self._begun[resource].set()

    def finish(self, resource: str) -> None:
        """Wait a moment for the last lines of a subprocess that has exited."""
        self.begin(resource)
        for reader in self._readers.pop(resource, []):
            reader.join(LAST_LINES_S)

    def _read(self, resource: str, stream: str, lines: BinaryIO, begun: threading.Event) -> None:
        begun.wait()
        with lines:
            while line := lines.readline(LONGEST_LINE_BYTES):
                text = line.decode(errors="replace").removesuffix("\n")
                if self._style is Style.JSON:
                    self.tell("output", resource=resource, stream=stream, line=text)
                else:
                    self._write(sys.stdout if stream == "stdout" else sys.stderr, f"[{resource}] {text}")

    def tell(self, event: str, **what: str | int) -> None:
        """Report an event: as an object on standard output, or as a line on standard error."""
        if self._style is Style.JSON:
            self._write(sys.stdout, json.dumps({"event": event, **what}))
            return
        details = ", ".join(f"{name} {value}" for name, value in what.items())
        self._write(sys.stderr, f"rebalanser: {event.replace('_', ' ')} {details}")

    def _write(self, to: TextIO, line: str) -> None:
        """Write a whole line. If its reader is gone, the subprocesses go on."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            to.write(f"{line}\n")
            to.flush()


def mistyped(command: Sequence[str]) -> tuple[str, str] | None:
    """Return a word in braces that is nearly a placeholder, and that one; ``${…}`` is the shell's."""
    for word in (match[1] for part in command for match in _IN_BRACES.finditer(part)):
        near = get_close_matches(word, _PLACEHOLDERS, 1, NEAR)
        if near and word not in _PLACEHOLDERS:
            return word, near[0]
    return None


def filled_in(command: Sequence[str], resource: str, token: int) -> list[str]:
    """Return the command with ``{resource}`` and ``{token}`` replaced; inserted names are not searched."""
    values = {"resource": resource, "token": str(token)}
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], part) for part in command]


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Message: the command has to be stopped."""


Events: TypeAlias = "queue.SimpleQueue[Outcome | StopAsked]"


class RestartCondition(StrEnum):
    """Condition for restarting a subprocess that has exited by itself."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run of a command."""

    exited: Exited
    lasted_s: float


def _nothing_left_to_run(_state: RetryCallState) -> None:
    """True if the resource had to be given up, which is not a failure."""


def _allow_many_files() -> None:
    """Raise the limit of open files, as two pipes per resource may exceed 1,024; not for the commands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Supervisor:
    """Runs ``command`` once for each resource that this node owns in ``group``."""

    def __init__(
        self,
        group: Group,
        settings: Settings,
        command: Sequence[str],
        restart: RestartCondition,
        outputs: LineForwarder,
    ) -> None:
        self._group = group
        self._settings = settings
        self._command = command
        self._restart = restart
        self._outputs = outputs
        self._clock = SystemClock()
        self._stop_limit_s = STOP_SHARE * settings.stop_timeout_s
        self._processes: ShimClient | None = None
        self._shim_died = False
        self._over = threading.Event()
        self.failed: dict[str, int | None] = {}
        """Exit codes of commands that failed and are not restarted, by resource."""

    def run(self) -> None:
        """Take part in the group until SIGINT or SIGTERM. Raises what ``rebalanser.Group.run`` raises.

        Raises:
            InternalError: the shim died; everything has been stopped.
        """
        self._group.worker(self._work)
        with self._shim() as processes, self._extending(processes):
            _allow_many_files()
            self._group.run()
        if self._shim_died:
            raise InternalError("the shim of the subprocesses died; everything was stopped")

    def _work(self, owned: Owned) -> None:
        """Own the resource until it has to be given up, also if its command is not restarted."""
        self.supervise(owned)
        owned.stop_requested.wait()

    @contextlib.contextmanager
    def _shim(self) -> Iterator[ShimClient]:
        processes = ShimClient(self._lose_shim)
        self._processes = processes
        try:
            yield processes
        finally:
            processes.close()

    def _lose_shim(self) -> None:
        self._shim_died = True
        self._group.request_stop()

    @contextlib.contextmanager
    def _extending(self, processes: ShimClient) -> Iterator[None]:
        """Extend the shim's deadlines soon after every proof of life."""
        pause_s = self._settings.heartbeat_interval_s / EXTENSIONS_PER_HEARTBEAT

        def extend() -> None:
            while not self._over.wait(pause_s):
                self._extend(processes)

        thread = threading.Thread(target=extend, name="rebalanser-deadline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _extend(self, processes: ShimClient) -> None:
        owned = next(iter(self._group.resources.values()), None)
        if owned is not None and owned.deadline > 0:
            processes.extend(self._deadline_of(owned))

    def _deadline_of(self, owned: Owned) -> float:
        """Return the deadline on the clock that counts suspends; never later than the true one."""
        return self._clock.now() - time.monotonic() + owned.deadline

    def _job_of(self, owned: Owned) -> SupervisedCommand:
        return SupervisedCommand(
            command=filled_in(self._command, owned.resource, owned.token),
            environment={
                "REBALANSER_GROUP": self._group.name,
                "REBALANSER_NODE": self._group.node,
                "REBALANSER_RESOURCE": owned.resource,
                "REBALANSER_TOKEN": str(owned.token),
            },
            stop_limit_s=self._stop_limit_s,
            deadline=self._deadline_of(owned),
        )

    def supervise(self, owned: Owned) -> None:
        """Keep a resource's command running until the resource has to be given up; then stop it.

        Returns earlier if the command is not restarted.
        """
        events: Events = queue.SimpleQueue()
        delay = GrowingDelay()

        def delay_s(state: RetryCallState) -> float:
            run = state.outcome.result() if state.outcome else None
            return delay.after(run.lasted_s if run else 0.0)

        owned.stop_requested.call_when_set(lambda: events.put(StopAsked()))
        runs = Retrying(
            retry=retry_if_result(lambda run: self._again(owned, run)),
            stop=stop_when_event_set(owned.stop_requested),
            wait=delay_s,
            before_sleep=lambda state: self._tell_restart(owned, state),
            sleep=sleep_using_event(owned.stop_requested),
            retry_error_callback=_nothing_left_to_run,
        )
        try:
            runs(self._run_once, owned, events)
        except InternalError:
            self._lose_shim()

    def _tell_restart(self, owned: Owned, state: RetryCallState) -> None:
        """Report when the command will be restarted, unless its resource has to be given up."""
        if state.next_action is not None and not owned.stop_requested.is_set():
            self._tell("restarting", owned, after_s=f"{state.next_action.sleep:g}")

    def _again(self, owned: Owned, run: FinishedRun | None) -> bool:
        if run is None:
            return False
        failed = run.exited.code != 0
        wanted = self._restart is RestartCondition.ALWAYS or (
            self._restart is RestartCondition.ON_FAILURE and failed
        )
        again = wanted or run.exited.by_shim
        if failed and not again and not owned.stop_requested.is_set():
            self.failed[owned.resource] = run.exited.code
        return again

    def _run_once(self, owned: Owned, events: Events) -> FinishedRun | None:
        """Run the command until it exits or is stopped. Return None if there was no time to start it."""
        processes = self._processes
        if processes is None or owned.stop_requested.is_set():
            return None
        began = self._clock.now()
        if not owned.still_mine():
            return FinishedRun(Exited(None, "access ended", by_shim=True), 0.0)
        with self._outputs.of(owned.resource) as files:
            number = processes.start(self._job_of(owned), events.put, files)
        timeout_s: float | None = None
        while True:
            try:
                event = events.get(timeout=timeout_s)
            except queue.Empty:
                processes.kill(number)
                timeout_s = None
                continue
            match event:
                case CommandStarted(pid):
                    self._tell("started", owned, pid=pid)
                    self._outputs.begin(owned.resource)
                case StopAsked():
                    processes.stop(number, self._clock.now() + self._stop_limit_s)
                    timeout_s = OWN_HANDS_SHARE * self._settings.stop_timeout_s
                case Exited() as exited:
                    self._outputs.finish(owned.resource)
                    why = exited.error or ("access ended" if exited.by_shim else None)
                    word = "exited" if exited.error is None or exited.by_shim else "not_started"
                    self._tell(word, owned, code=exited.code, reason=why)
                    return FinishedRun(exited, self._clock.now() - began)

    def _tell(self, event: str, owned: Owned, **what: int | str | None) -> None:
        known = {name: value for name, value in what.items() if value is not None}
        self._outputs.tell(event, resource=owned.resource, token=owned.token, **known)
