"""What a worker of a queue writes into its history: its claims, and what they wrote (AU-4)."""

from __future__ import annotations

import uuid
from typing import Final, Self

from rebalanser.history import Event, Journal, Protocol, SkuldKind, author_here, open_sinks
from rebalanser.history.sinks import HistorySink
from rebalanser.runtime.clock import Clock
from rebalanser.settings import Settings
from rebalanser.tasks.model import TaskId

CLOSE_TIMEOUT_S: Final = 2.0


class TaskHistory:
    """Writes down what becomes of the claims of one process; never blocks it and never fails it."""

    def __init__(
        self, queue: str, label: str, sink: HistorySink | None, clock: Clock, *, fenced: bool = False
    ) -> None:
        self._process = uuid.uuid4().hex
        self._fenced = fenced
        self._journal = (
            None
            if sink is None
            else Journal(
                author_here(Protocol.SKULD, queue, self._process, label),
                sink,
                wall=clock.wall,
                monotonic=clock.now,
            )
        )

    @classmethod
    def opened(cls, queue: str, label: str, settings: Settings, clock: Clock) -> Self:
        """The history where the settings say: ``history_dir``, ``history_topic``, or nowhere.

        Raises:
            InvalidUrl: the topic is no URL.
            MissingExtra: the package that the topic needs is not installed.
        """
        if settings.history_dir is None and settings.history_topic is None:
            return cls(queue, label, None, clock)
        sink = open_sinks(
            settings.history_dir,
            settings.history_topic,
            queue,
            label,
            settings.history_max_bytes,
            settings.history_file_mode,
        )
        return cls(queue, label, sink, clock, fenced=settings.fenced)

    @property
    def is_written(self) -> bool:
        """Whether there is a place for it."""
        return self._journal is not None

    def write(
        self,
        kind: SkuldKind,
        task: TaskId,
        token: int,
        *,
        revision: int | None = None,
        value: int | None = None,
    ) -> None:
        """Something became of the claim of a task that has this token."""
        if self._journal is None:
            return
        self._journal.write(
            Event(
                kind,
                self._process,
                resource=task,
                token=token,
                revision=revision,
                value=value,
                fenced=self._fenced,
            )
        )

    def close(self) -> None:
        """Bring everything to where it belongs, in two seconds at most."""
        if self._journal is not None:
            self._journal.close(CLOSE_TIMEOUT_S)
