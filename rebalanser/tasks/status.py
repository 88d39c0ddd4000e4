"""Status of a queue for the person on call: its tasks, its workers and their troubles.

Each process that claims tasks keeps a note in the store. It writes the note every ``NOTE_S`` seconds, and
within ``LOOK_S`` seconds after its troubles have changed. Notes are for people: no claim depends on one.
An old note is shown as silent; the store may take no writes.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rebalanser.core.fields import fields_for
from rebalanser.core.tasks.failures import ErrorKind, LoopFailure
from rebalanser.core.tasks.model import Status
from rebalanser.tasks.context import Context
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.pauses import Pauses

LOOK_S: Final = 1.0
"""Seconds between two looks for changed troubles."""
NOTE_S: Final = 10.0
"""Maximum seconds between two notes of a worker."""
SILENT_S: Final = 3 * NOTE_S
"""Seconds after which a worker whose note was not written anew counts as silent."""
KEPT_S: Final = 86_400.0
"""Seconds after which the note of a worker that did not delete it is deleted by another that starts."""
STOP_S: Final = 2.0
"""Maximum seconds that a worker which stops tries to delete its note."""


class TroubleDocument(BaseModel):
    """Failure in a process that is retried."""

    model_config = ConfigDict(frozen=True)

    loop: str
    kind: ErrorKind
    error: str
    since: float = Field(description="Seconds since 1970.")
    attempts: int = Field(description="Number of failures in a row.")

    @classmethod
    def of(cls, trouble: LoopFailure) -> Self:
        """Return the document of a trouble."""
        return cls(**fields_for(cls, trouble))


class WorkerDocument(BaseModel):
    """A process that claims tasks, as its last note says. A server's clients run its tasks elsewhere."""

    model_config = ConfigDict(frozen=True)

    worker: str = Field(description="Its label.")
    host: str
    pid: int
    started: float = Field(description="Seconds since 1970.")
    seen: float = Field(description="Time of this note, in seconds since 1970, by its own clock.")
    concurrency: int | None = Field(description="Maximum number of bodies at a time; null for a server.")
    running: int | None = Field(description="Number of bodies that run; null for a server.")
    troubles: tuple[TroubleDocument, ...]

    def is_silent(self, wall: float) -> bool:
        """True if its note is overdue: it was killed, is paused, or can't write."""
        return wall - self.seen > SILENT_S


class QueueStatus(BaseModel):
    """Status of a queue, as stored."""

    model_config = ConfigDict(frozen=True)

    queue: str
    counts: dict[Status, int]
    oldest_ready_s: float | None = Field(
        description="Seconds for which the oldest task that only waits for a worker has waited; null: none."
    )
    workers: tuple[WorkerDocument, ...]
    pauses: Pauses = Field(default=Pauses(), description="Pauses of the queue and its schedules.")
    deleted: int = Field(0, description="Number of tasks that workers deleted as their time was over.")
    swept: float | None = Field(
        None, description="Time of the last sweep for such tasks, in seconds since 1970; null: never."
    )


def workers_of(notes: Mapping[str, bytes]) -> Iterator[WorkerDocument]:
    """Iterate over the workers of these notes, without notes of other versions that can't be read."""
    for note in notes.values():
        try:
            yield WorkerDocument.model_validate_json(note)
        except ValidationError:
            continue


class WorkerNote:
    """Keeps the note of this process in the store.

    ``concurrency`` is None for a server; ``running`` gives the number of bodies that run.
    """

    def __init__(
        self,
        context: Context,
        label: str,
        concurrency: int | None = None,
        running: Callable[[], int] | None = None,
    ) -> None:
        self._context = context
        self._label = label
        self._concurrency = concurrency
        self._running = running
        self._process = secrets.token_hex(8)
        self._started = context.clock.wall()
        self._noted: frozenset[tuple[str, ErrorKind]] | None = None
        """The troubles of the last note; None before the first."""
        self._noted_at = 0.0
        self._ending = threading.Event()
        self._loop = Loop("status", self._step, context.errors, ends_process=False)

    def start(self) -> None:
        """Start the thread; the first note is written at once."""
        self._loop.start()

    def stop(self) -> None:
        """Delete the note; while the store is away it grows old instead."""
        self._ending.set()
        self._loop.end_soon()
        self._loop.join(STOP_S)
        try:
            self._write(None, STOP_S)
        except Exception as error:  # for people only: nothing depends on it
            self._context.errors.ignored("the note of a worker", error)

    def _step(self) -> bool:
        if self._ending.wait(LOOK_S if self._noted is not None else 0.0):
            return False
        if self._noted is None:
            self._delete_old()
        self.look()
        return True

    def look(self) -> None:
        """Write the note if it is due.

        Raises:
            RebalanserError: the store takes nothing; the next look tries again.
        """
        clock, troubles = self._context.clock, self._context.errors.troubles
        kinds = frozenset((each.loop, each.kind) for each in troubles if each.loop != self._loop.name)
        if kinds == self._noted and clock.now() - self._noted_at < NOTE_S:
            return
        document = WorkerDocument(
            worker=self._label,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            seen=clock.wall(),
            concurrency=self._concurrency,
            running=None if self._running is None else self._running(),
            troubles=tuple(TroubleDocument.of(each) for each in troubles if each.loop != self._loop.name),
        )
        self._write(document.model_dump_json().encode(), self._context.timeout_s)
        self._noted, self._noted_at = kinds, clock.now()

    def _write(self, note: bytes | None, timeout_s: float) -> None:
        context = self._context
        context.engine.note_worker(context.queue, self._process, note, timeout_s)

    def _delete_old(self) -> None:
        context = self._context
        for process, note in context.engine.workers(context.queue, context.timeout_s).items():
            found = next(workers_of({process: note}), None)
            if found is not None and context.clock.wall() - found.seen > KEPT_S:
                context.engine.note_worker(context.queue, process, None, context.timeout_s)
