"""Calls bodies in child processes, which can be killed: one for each running body, used again."""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection
from typing import Any, Final

from rebalanser.errors import InternalError, InvalidHandlers, RebalanserError
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.execution.bodies import BodyWaits, Job
from rebalanser.tasks.execution.outcomes import BodyLost, Cut, Outcome, Raised, raised, summary_of
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.tasks.functions import TaskBody, reference_of
from rebalanser.tasks.loops import ErrorPolicy
from rebalanser.tasks.processes.child import (
    Answered,
    AskDeadline,
    AskLog,
    AskRenewal,
    AskUpdate,
    Begin,
    ChildAsk,
    ChildReady,
    Done,
    Failed,
    Question,
    Work,
    refuse_in_child,
)

KILL_GRACE_S: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""
REAP_S: Final = 5.0
"""Maximum seconds to wait for a process after SIGKILL."""
LOOK_S: Final = 1.0
"""Seconds between looks whether a process lives; another one may hold its pipe open."""
_log = get_logger()


class ChildProcess:
    """A process that runs one body at a time. To be made in a thread that outlives it.

    The kernel kills it when that thread ends, and so with the worker, whatever ends that (SK-17). It leads a
    process group of its own, which is killed as a whole, and which no signal of the terminal reaches.

    Raises:
        OSError: it can't be started.
        RuntimeError: its threads can't be; it is ended.
    """

    def __init__(self, references: Mapping[str, str]) -> None:
        self._pipe, theirs = connection.Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rebalanser.tasks.processes.child import main; main({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
                    [multiprocessing.spawn.get_executable(), "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                self._pipe.close()
                raise
        self.ready: Future[None] = Future()
        """Done once the functions are imported; raises InvalidHandlers if they can't be."""
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._is_reaped = False
        self._claim: WorkerClaim | None = None
        self._outcome: Future[Outcome] = Future()
        # A process that is paused reads nothing; nobody but this thread is to wait for that.
        self._sends = ThreadPoolExecutor(1, thread_name_prefix="rebalanser-tasks-sends")
        try:
            self._sends.submit(self._pipe.send, Begin(_preparation(references), references))
            threading.Thread(target=self._serve, name="rebalanser-tasks-child", daemon=True).start()
        except BaseException:  # no more threads: nobody else would end the process
            self._bury()
            raise

    @property
    def is_alive(self) -> bool:
        """True if it can be given work, as far as is known."""
        return not self._gone.is_set()

    def call(self, claim: WorkerClaim, payload: bytes) -> Future[Outcome]:
        """Call a body in it. The future is done when that has ended, also by the end of the process."""
        outcome: Future[Outcome] = Future()
        with self._lock:
            self._claim, self._outcome = claim, outcome
        if self._gone.is_set():
            self._tell_lost()
        self._send(Work(claim.facts, claim.deadline, payload, claim.max_bytes))
        return outcome

    def kill(self, grace_s: float = KILL_GRACE_S) -> None:
        """SIGTERM, then SIGKILL ``grace_s`` seconds later, for it and its group; wait until it has ended."""
        if grace_s > 0:
            self._signal(signal.SIGTERM)
        if not self._gone.wait(grace_s):
            self._signal(signal.SIGKILL)
            if not self._gone.wait(REAP_S):
                _log.error(
                    "the kernel holds on to the process of a body that was killed",
                    action="task_process_stuck",
                    pid=self._process.pid,
                )

    def dismiss(self) -> None:
        """Tell the idle process to end; returns at once."""
        self._send(None)

    def close(self) -> None:
        """Wait until it has ended that was dismissed; it is killed if that takes too long."""
        if not self._gone.wait(KILL_GRACE_S):
            self.kill(0.0)

    def _send(self, message: Begin | Work | Answered | None) -> None:
        """Send it when it is read; where the process has ended, the thread that serves it tells."""
        with contextlib.suppress(RuntimeError):
            self._sends.submit(self._pipe.send, message)

    def _signal(self, number: signal.Signals) -> None:
        """Send it to the group, whose number is not another's before the process is reaped."""
        with self._lock:
            if not self._is_reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def _serve(self) -> None:
        try:
            while self._can_read():
                self._take(self._pipe.recv())
        except Exception as error:  # what a process says that is killed need not make sense
            _log.debug("the process of a body has ended", action="task_process_ended", error=repr(error))
        self._bury()

    def _can_read(self) -> bool:
        """Wait for something to read, which the end of the process is too; False if that has no end to read.

        A process that the body forked may hold the pipe open.
        """
        while not connection.wait([self._pipe], LOOK_S):
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
        return True

    def _take(self, message: ChildReady | Question | Done) -> None:
        match message:
            case ChildReady(problem=None):
                self.ready.set_result(None)
            case ChildReady(problem=problem):
                self.ready.set_exception(
                    InvalidHandlers(f"a process for bodies can't import their functions: {problem}")
                )
            case Question(number=number, ask=ask):
                self._send(self._answer(number, ask))
            case Done(outcome=outcome):
                with self._lock:
                    self._claim = None
                self._outcome.set_result(_raised(outcome) if isinstance(outcome, Failed) else outcome)

    def _answer(self, number: int, ask: ChildAsk) -> Answered:
        claim = self._claim
        if claim is None:
            return Answered(number, error=InternalError("a process asks for a claim while it runs no body"))
        try:
            return Answered(number, _asked(claim, ask))
        except RebalanserError as error:
            return Answered(number, error=error)
        except Exception as error:  # whoever waits must be told, whatever it is
            return Answered(number, error=InternalError(summary_of(error)))

    def _bury(self) -> None:
        """End what is left of the group, wait for the process, and tell who waits for it."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the host application reaps all children itself
            # Looked at before it is reaped, so that until then its number can't be another's.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._process.wait()
            self._is_reaped = True
        self._sends.shutdown(wait=False, cancel_futures=True)
        self._pipe.close()
        self._gone.set()
        if not self.ready.done():
            self.ready.set_exception(InvalidHandlers(f"a process for bodies {self._end()} as it began"))
        self._tell_lost()

    def _tell_lost(self) -> None:
        with self._lock:
            if self._claim is None:
                return
            self._claim = None
        self._outcome.set_result(raised(BodyLost(f"the process of the body {self._end()}")))

    def _end(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"ended with code {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"


def _preparation(references: Mapping[str, str]) -> dict[str, Any]:
    """Return what a process needs to import functions; this one's script only if a function is in it."""
    preparation: dict[str, Any] = {"sys_argv": sys.argv}
    if any(reference.startswith("__main__:") for reference in references.values()):
        script = sys.modules["__main__"]
        if script.__spec__ is not None:
            preparation["init_main_from_name"] = script.__spec__.name
        elif script.__file__ is not None:
            preparation["init_main_from_path"] = script.__file__
    return preparation


def _asked(claim: WorkerClaim, ask: ChildAsk) -> object:
    match ask:
        case AskUpdate(content=content):
            return claim.update(content)
        case AskLog(claim=number, first=first):
            return claim.log_page(number, first)
        case AskRenewal():
            return claim.renew()
        case AskDeadline():
            return claim.deadline


def _raised(failed: Failed) -> Raised:
    """The error as the body raised it, where it can be had; its text in any case."""
    error: BaseException | None = None
    if failed.error is not None:
        with contextlib.suppress(Exception):  # whatever its class does when it is read
            error = pickle.loads(failed.error)  # noqa: S301 - from a process that this one started
    error = error if isinstance(error, BaseException) else BodyLost(failed.summary)
    return Raised(error, failed.told, failed.types)


START_LIMIT_S: Final = 60.0
"""Maximum seconds in which a process imports the functions."""
START_PAUSE_S: Final = 1.0
"""Minimum seconds that a thread pauses after a process that could not be started; its task is given back."""
PROCESSES: Final = "processes"
"""The trouble of a worker that gets no process."""


class ProcessCaller:
    """Calls each body in a process that is killed once the body is out of time, or its claim is lost."""

    def __init__(self, functions: Mapping[str, TaskBody], errors: ErrorPolicy) -> None:
        self._functions = functions
        self._errors = errors
        self._references: dict[str, str] = {}
        self._watch = BodyWaits()
        self._idle: list[ChildProcess] = []
        self._lock = threading.Lock()
        # The kernel kills a process when the thread has ended that started it: this one lasts until the end.
        self._starts = ThreadPoolExecutor(1, thread_name_prefix="rebalanser-tasks-starts")

    def open(self) -> None:
        """See that all functions can be imported by a process.

        Raises:
            InvalidHandlers: one can't; the message names it.
            InvalidState: this is such a process.
        """
        try:
            refuse_in_child()
            self._references = {name: reference_of(body) for name, body in self._functions.items()}
            child = self._started()
            self._idle.append(child)
            try:
                child.ready.result(START_LIMIT_S)
            except TimeoutError as error:
                raise InvalidHandlers(f"a process took more than {START_LIMIT_S:g} s to import") from error
        except BaseException:
            self.close()
            raise

    def call(self, job: Job) -> Outcome:
        """Call a body in a process that is idle, or a new one."""
        child = self._child()
        if isinstance(child, Exception):
            return self._refused(f"it can't be started: {child!r}")
        cut = self._watch.until(job, child.ready, START_LIMIT_S)
        if cut is Cut.TIMED_OUT or (cut is None and child.ready.exception() is not None):
            child.kill()
            told = str(child.ready.exception()) if child.ready.done() else "it took too long to begin"
            return self._refused(told)
        if cut is None:
            self._errors.worked(PROCESSES)
            outcome = child.call(job.claim, job.payload)
            cut = self._watch.until(job, outcome, job.head.timeout_s)
        if cut is not None:
            child.kill()
            return cut
        if child.is_alive:
            with self._lock:
                self._idle.append(child)
        return outcome.result()

    def begin(self, _job: Job) -> None:
        """All are to be called: a thread waits for each process."""

    def takes_thread(self, _body: TaskBody) -> bool:
        """All do."""
        return True

    def can_end(self, _body: TaskBody) -> bool:
        """True: it can end all."""
        return True

    def cut_off(self) -> None:
        """Kill all processes that run a body, each by the thread that waits for it."""
        self._watch.stop()

    def close(self) -> None:
        """End the processes that are idle, and by the end of their thread those that are not."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.dismiss()
        for child in idle:
            child.close()
        self._starts.shutdown()
        self._errors.ended(PROCESSES)

    def _child(self) -> ChildProcess | Exception:
        """A process that is idle, or a new one; the error if none can be started."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
        try:
            return self._started()
        except (OSError, RuntimeError) as error:  # too many processes, or this one is ending
            return error

    def _started(self) -> ChildProcess:
        return self._starts.submit(ChildProcess, self._references).result()

    def _refused(self, told: str) -> Cut:
        """Pause, and have the task given back, its try not counted: nothing is known against its body.

        It is a trouble of the worker until a process begins.
        """
        error = InternalError(f"no process for a body: {told}")
        pause_s = self._errors.failed(PROCESSES, error, ends_process=False)
        time.sleep(max(pause_s, START_PAUSE_S))
        return Cut.STOPPED
