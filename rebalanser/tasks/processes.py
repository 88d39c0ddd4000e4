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

from rebalanser.core.tasks.failures import summary_of
from rebalanser.errors import InternalError, InvalidHandlers, RebalanserError
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.child_process import (
    BodyDone,
    BodyFailed,
    ChildReady,
    ChildRequest,
    DeadlineRequest,
    LoadFunctions,
    LogRequest,
    NumberedAnswer,
    NumberedRequest,
    RenewalRequest,
    RunBody,
    UpdateRequest,
    refuse_in_child,
)
from rebalanser.tasks.execution.bodies import BodyCall, BodyWaits
from rebalanser.tasks.execution.outcomes import BodyLost, BodyOutcome, Cut, Raised, raised
from rebalanser.tasks.execution.worker_claim import WorkerClaim
from rebalanser.tasks.functions import TaskBody, reference_of
from rebalanser.tasks.loops import ErrorPolicy

KILL_GRACE_S: Final = 2.0
"""Seconds between SIGTERM and SIGKILL."""
REAP_S: Final = 5.0
"""Maximum seconds to wait for a process after SIGKILL."""
LOOK_S: Final = 1.0
"""Seconds between two checks that a process lives; another one may hold its pipe open."""
_log = get_logger()


class ChildProcess:
    """A process that runs one body at a time. To be made in a thread that outlives it.

    The kernel kills it when that thread ends, and so with the worker, however that ends (SK-17). It leads a
    process group of its own, which is killed as a whole, and which gets no signal of the terminal.

    Raises:
        OSError: it can't be started.
        RuntimeError: its threads can't be started; it is ended.
    """

    def __init__(self, references: Mapping[str, str]) -> None:
        self._pipe, theirs = connection.Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rebalanser.tasks.child_process import main; main({theirs.fileno()}, {os.getpid()})"
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
        self._outcome: Future[BodyOutcome] = Future()
        # A paused process reads nothing; only this thread may wait for that.
        self._sends = ThreadPoolExecutor(1, thread_name_prefix="rebalanser-tasks-sends")
        try:
            self._sends.submit(self._pipe.send, LoadFunctions(_preparation(references), references))
            threading.Thread(target=self._serve, name="rebalanser-tasks-child", daemon=True).start()
        except BaseException:  # no more threads: nobody else would end the process
            self._bury()
            raise

    @property
    def is_alive(self) -> bool:
        """True if it can take work, as far as is known."""
        return not self._gone.is_set()

    def call(self, claim: WorkerClaim, payload: bytes) -> Future[BodyOutcome]:
        """Call a body in it. The future is done when the body has ended, also by the end of the process."""
        outcome: Future[BodyOutcome] = Future()
        with self._lock:
            self._claim, self._outcome = claim, outcome
        if self._gone.is_set():
            self._tell_lost()
        self._send(RunBody(claim.facts, claim.deadline, payload, claim.max_bytes))
        return outcome

    def kill(self, grace_s: float = KILL_GRACE_S) -> None:
        """Send SIGTERM to its group, and SIGKILL ``grace_s`` seconds later; wait until it has ended."""
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
        """Let the idle process end; return at once."""
        self._send(None)

    def close(self) -> None:
        """Wait until the dismissed process has ended; kill it if that takes too long."""
        if not self._gone.wait(KILL_GRACE_S):
            self.kill(0.0)

    def _send(self, message: LoadFunctions | RunBody | NumberedAnswer | None) -> None:
        """Send a message in the sending thread; if the process has ended, the serving thread reports that."""
        with contextlib.suppress(RuntimeError):
            self._sends.submit(self._pipe.send, message)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the group, unless the process is reaped: then its number may be another's."""
        with self._lock:
            if not self._is_reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def _serve(self) -> None:
        try:
            while self._can_read():
                self._take(self._pipe.recv())
        except Exception as error:  # a killed process may have sent half a message
            _log.debug("the process of a body has ended", action="task_process_ended", error=repr(error))
        self._bury()

    def _can_read(self) -> bool:
        """Wait for a message or the end of the pipe; False if the process has ended and the pipe is open.

        A process that the body forked may hold it open.
        """
        while not connection.wait([self._pipe], LOOK_S):
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
        return True

    def _take(self, message: ChildReady | NumberedRequest | BodyDone) -> None:
        match message:
            case ChildReady(problem=None):
                self.ready.set_result(None)
            case ChildReady(problem=problem):
                self.ready.set_exception(
                    InvalidHandlers(f"a process for bodies can't import their functions: {problem}")
                )
            case NumberedRequest(number=number, request=request):
                self._send(self._answer(number, request))
            case BodyDone(outcome=outcome):
                with self._lock:
                    self._claim = None
                self._outcome.set_result(_raised(outcome) if isinstance(outcome, BodyFailed) else outcome)

    def _answer(self, number: int, request: ChildRequest) -> NumberedAnswer:
        claim = self._claim
        if claim is None:
            return NumberedAnswer(
                number, error=InternalError("a process asks for a claim while it runs no body")
            )
        try:
            return NumberedAnswer(number, _answered(claim, request))
        except RebalanserError as error:
            return NumberedAnswer(number, error=error)
        except Exception as error:  # the child waits for an answer, whatever it is
            return NumberedAnswer(number, error=InternalError(summary_of(error)))

    def _bury(self) -> None:
        """End the rest of the group, wait for the process, and fail the body that ran in it."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the host application reaps all children itself
            # Waited for before it is reaped, so that its number can't be another's until then.
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
    """Return the data to import functions by; this process's script only if a function is in it."""
    preparation: dict[str, Any] = {"sys_argv": sys.argv}
    if any(reference.startswith("__main__:") for reference in references.values()):
        script = sys.modules["__main__"]
        if script.__spec__ is not None:
            preparation["init_main_from_name"] = script.__spec__.name
        elif script.__file__ is not None:
            preparation["init_main_from_path"] = script.__file__
    return preparation


def _answered(claim: WorkerClaim, request: ChildRequest) -> object:
    match request:
        case UpdateRequest(content=content):
            return claim.update(content)
        case LogRequest(claim=number, first=first):
            return claim.log_page(number, first)
        case RenewalRequest():
            return claim.renew()
        case DeadlineRequest():
            return claim.deadline


def _raised(failed: BodyFailed) -> Raised:
    """Return the error that the body raised, or a stand-in if it can't be unpickled; its text in any case."""
    error: BaseException | None = None
    if failed.error is not None:
        with contextlib.suppress(Exception):  # whatever its class does when it is read
            error = pickle.loads(failed.error)  # noqa: S301 - from a process that this one started
    error = error if isinstance(error, BaseException) else BodyLost(failed.summary)
    return Raised(error, failed.text, failed.types)


START_LIMIT_S: Final = 60.0
"""Maximum seconds in which a process imports the functions."""
START_PAUSE_S: Final = 1.0
"""Minimum seconds that a thread pauses after it could not start a process; its task is given back."""
PROCESSES: Final = "processes"
"""Name of the trouble of a worker that can start no process."""


class ProcessCaller:
    """Calls each body in a process, which is killed once the body is out of time or its claim is lost."""

    def __init__(self, functions: Mapping[str, TaskBody], errors: ErrorPolicy) -> None:
        self._functions = functions
        self._errors = errors
        self._references: dict[str, str] = {}
        self._watch = BodyWaits()
        self._idle: list[ChildProcess] = []
        self._lock = threading.Lock()
        # The kernel kills a process when the thread that started it ends: this one lasts until the end.
        self._starts = ThreadPoolExecutor(1, thread_name_prefix="rebalanser-tasks-starts")

    def open(self) -> None:
        """Start a process, to check that it can import all functions.

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

    def call(self, job: BodyCall) -> BodyOutcome:
        """Call a body in a process that is idle, or a new one."""
        child = self._child()
        if isinstance(child, Exception):
            return self._refused(f"it can't be started: {child!r}")
        cut = self._watch.until(job, child.ready, START_LIMIT_S)
        if cut is Cut.TIMED_OUT or (cut is None and child.ready.exception() is not None):
            child.kill()
            reason = str(child.ready.exception()) if child.ready.done() else "it took too long to begin"
            return self._refused(reason)
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

    def begin(self, _job: BodyCall) -> None:
        """Return None: all bodies must be called."""

    def takes_thread(self, _body: TaskBody) -> bool:
        """Return True: a thread waits for each process."""
        return True

    def can_end(self, _body: TaskBody) -> bool:
        """Return True: any process can be killed."""
        return True

    def cut_off(self) -> None:
        """Kill all processes that run a body, each by the thread that waits for it."""
        self._watch.stop()

    def close(self) -> None:
        """End the idle processes; the others end with the thread that started them."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.dismiss()
        for child in idle:
            child.close()
        self._starts.shutdown()
        self._errors.ended(PROCESSES)

    def _child(self) -> ChildProcess | Exception:
        """Return an idle process, or a new one; the error if none can be started."""
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

    def _refused(self, reason: str) -> Cut:
        """Pause, then give the task back without counting a try: its body is not at fault.

        It is a trouble of the worker until a process begins.
        """
        error = InternalError(f"no process for a body: {reason}")
        pause_s = self._errors.failed(PROCESSES, error, ends_process=False)
        time.sleep(max(pause_s, START_PAUSE_S))
        return Cut.STOPPED
