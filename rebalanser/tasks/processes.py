"""Calls bodies in processes of their own, which can be killed: one for each body that runs, used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rebalanser.errors import InvalidHandlers
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.calling import Job, Watch
from rebalanser.tasks.child import refuse_in_child
from rebalanser.tasks.child_process import ChildProcess
from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.outcomes import Cut, Outcome
from rebalanser.tasks.references import reference_of

START_LIMIT_S: Final = 60.0
"""How long a process may take to import the functions."""
START_PAUSE_S: Final = 1.0
"""How long a thread pauses after a process that could not be started; its task is given back."""
_log = get_logger()


class ProcessCaller:
    """Calls each body in a process that is killed once the body is out of time, or its claim is lost."""

    def __init__(self, functions: Mapping[str, TaskBody]) -> None:
        self._functions = functions
        self._references: dict[str, str] = {}
        self._watch = Watch()
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
        if child is None:
            return self._pause()
        cut = self._watch.until(job, child.ready, START_LIMIT_S)
        if cut is Cut.TIMED_OUT or (cut is None and child.ready.exception() is not None):
            return self._unusable(child)
        if cut is None:
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
        """It can end all."""
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

    def _child(self) -> ChildProcess | None:
        """A process that is idle, or a new one; None if none can be started."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
        try:
            return self._started()
        except (OSError, RuntimeError) as error:  # too many processes, or this one is ending
            _log.error(
                "no process for a body can be started", action="task_process_refused", error=repr(error)
            )
            return None

    def _started(self) -> ChildProcess:
        return self._starts.submit(ChildProcess, self._references).result()

    def _unusable(self, child: ChildProcess) -> Cut:
        _log.error(
            "a process for bodies ended as it began",
            action="task_process_unusable",
            error=str(child.ready.exception()) if child.ready.done() else "it took too long",
        )
        child.kill()
        return self._pause()

    def _pause(self) -> Cut:
        """The task is given back, its try not counted: nothing is known against its body."""
        time.sleep(START_PAUSE_S)
        return Cut.STOPPED
