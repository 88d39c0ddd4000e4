"""How the entries of a spool get into the engine: strictly in their order, each once (SK-4).

An entry is sent with its number until the engine has answered it, then deleted; so one whose answer was
lost, or whose forwarder died, is sent again, and the engine's tally tells whether it was taken. An entry that
is refused for good is dealt with in an order that loses no refusal: it is noted in the spool, then skipped in
the engine, and only then taken out of the spool's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from rebalanser.errors import DependencyCycle, InternalError, InvalidTask, RebalanserError, RequestTooLarge
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.answers import check_answer
from rebalanser.tasks.engine import Answer, Applied, Conflict, Enqueue, Skip, Taken
from rebalanser.tasks.flakes import partition_of
from rebalanser.tasks.model import Head, TaskId
from rebalanser.tasks.opening import Opened
from rebalanser.tasks.outbox_spool import Entry, Refusal, Spool, forwarded, placed

BATCH: Final = 60
"""Entries that are sent at once."""
_log = get_logger()

Told: TypeAlias = Callable[[int, RebalanserError | None], bool]
"""Told that an entry was forwarded, or why it was refused; whether somebody waited to hear of that."""


class Forwarding:
    """Forwards what a spool holds. Its user sees to it that there is one at a time for a spool."""

    def __init__(self, spool: Spool, opened: Opened, told: Told) -> None:
        self._spool = spool
        self._context = opened.context
        self._ancestry = opened.ancestry
        self._partitions = opened.partitions
        self._told = told

    def forward(self) -> bool:
        """Forward the next entries; False if there are none.

        Raises:
            RebalanserError: it could not be done now. Trying again does no entry twice.
        """
        entries = self._spool.first(BATCH)
        if not entries:
            return False
        head = entries[0]
        if head.refusal is not None:
            self._skip(head)
            return True
        ready = self._ready(entries)
        if ready:
            self._send(ready)
        else:
            self._refuse(head, DependencyCycle(f"task {head.head.id} would wait for itself"))
        return True

    def _ready(self, entries: Sequence[Entry]) -> list[Entry]:
        """The first entries, up to one that is refused already or would wait for itself."""
        ready: list[Entry] = []
        coming: dict[TaskId, Head] = {}
        for entry in entries:
            if entry.refusal is not None:
                break
            try:
                self._ancestry.refuse_cycle(entry.head, coming)
            except DependencyCycle:
                break
            ready.append(entry)
            coming[entry.head.id] = entry.head
        return ready

    def _send(self, entries: Sequence[Entry]) -> None:
        identity = self._spool.identity()
        writes = [placed(each, partition_of(each.head.id, self._partitions), identity) for each in entries]
        try:
            answers = self._context.engine.apply(writes, self._context.timeout_s)
        except RequestTooLarge as error:
            if len(entries) > 1:
                self._send(entries[:1])
            else:
                self._refuse(entries[0], error)
            return
        self._settle(entries, writes, answers)

    def _settle(self, entries: Sequence[Entry], writes: Sequence[Enqueue], answers: Sequence[Answer]) -> None:
        """Take note of the answers up to the first that is not good; what follows that one was not taken."""
        taken = 0
        for answer in answers:
            if not isinstance(answer, Applied | Taken):
                break
            taken += 1
        self._done(entries[:taken])
        if taken == len(entries):
            return
        entry, answer = entries[taken], answers[taken]
        if not isinstance(answer, Conflict):
            self._refused_or_there(entry, writes[taken], answer)
        elif taken == 0:
            self._renew(entry)

    def _done(self, entries: Sequence[Entry]) -> None:
        """Tell who waits, then forget: were it the other way round, a crash between would change nothing."""
        if entries:
            for entry in entries:
                self._told(entry.number, None)
            self._spool.forward(entries[0].number, entries[-1].number)

    def _refused_or_there(self, entry: Entry, write: Enqueue, answer: Answer) -> None:
        """The engine has another task of this id, or this very one, by another way; or it lacks another."""
        try:
            check_answer(write, answer)
        except InvalidTask as error:
            self._refuse(entry, error)
        else:
            self._count(entry)
            self._done([entry])

    def _refuse(self, entry: Entry, error: RebalanserError) -> None:
        self._spool.refuse(entry.number, Refusal(type(error).__name__, str(error)))
        self._skip(entry, error)

    def _skip(self, entry: Entry, error: RebalanserError | None = None) -> None:
        """Have a refused entry counted; then tell who waits, or keep it for an operator."""
        if not self._count(entry):
            self._done([entry])
        elif error is not None and self._told(entry.number, error):
            self._spool.forward(entry.number, entry.number)
        else:
            self._spool.keep(entry.number)
            reason = str(error) if entry.refusal is None else entry.refusal.reason
            _log.warning(
                "a spooled task was refused",
                action="task_refused",
                queue=entry.head.queue,
                task=entry.head.id,
                reason=reason,
            )

    def _count(self, entry: Entry) -> bool:
        """Have the engine count an entry as skipped; False if its task was made after all, by an earlier try
        that had not been answered."""
        write = Skip(entry.head.queue, forwarded(entry, self._spool.identity()))
        (answer,) = self._context.engine.apply([write], self._context.timeout_s)
        if isinstance(answer, Applied | Taken):
            return isinstance(answer, Applied)
        if isinstance(answer, Conflict):
            self._renew(entry)
            return self._count(entry)
        raise InternalError(f"a skip was answered {answer!r}")

    def _renew(self, entry: Entry) -> None:
        """The engine does not know of the entries before, which it had taken: it was put back or replaced."""
        _log.warning(
            "the engine has lost what it had taken from this outbox before",
            action="outbox_renewed",
            queue=entry.head.queue,
            outbox=str(self._spool.path),
            next=entry.number,
        )
        self._spool.renew(entry.number)
