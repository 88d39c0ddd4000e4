"""``rebalanser tasks outbox``: shows waiting and refused tasks of an outbox."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.cli.options import JsonOption
from rebalanser.cli.output import Face, counted, printable
from rebalanser.core.tasks.ids import created_at, is_task_id
from rebalanser.errors import UnusableFolder
from rebalanser.tasks.documents import SpoolDocument, SpooledDocument
from rebalanser.tasks.outbox.spool import SUFFIX, Spool

TIMEOUT_S: Final = 10.0


def outbox(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", show_default=False, help="The outbox of the producers.")
    ],
    forget_refused: Annotated[
        bool, typer.Option("--forget-refused", help="Delete refused tasks after showing them.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show the tasks that wait in an outbox for the engine, and those that it has refused, with the reasons.

    Producers may run meanwhile. With --json an object per line, the sums of each queue after its tasks.
    """
    face = Face.of("", json)
    spools = _spools(folder)
    if not spools:
        face.answer({"queue": None, "waiting": 0, "refused": 0}, f"no queue has used {folder}")
    for path in spools:
        with closing(Spool(path, None, TIMEOUT_S)) as spool:
            _show(face, spool, forget_refused=forget_refused)


def _spools(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UnusableFolder(f"there is no folder {folder}")
    try:
        return sorted(folder.glob(f"*{SUFFIX}"))
    except OSError as error:
        raise UnusableFolder(f"{folder} can't be read: {error.strerror}") from error


def _show(face: Face, spool: Spool, *, forget_refused: bool) -> None:
    waiting = refused = 0
    for entry in spool.waiting():
        waiting += 1
        document = SpooledDocument.of(entry.enqueue.task, "", "")
        face.answer(document, *_lines(document))
    for entry in spool.refused():
        refused += 1
        kind, reason = ("", "") if entry.refusal is None else (entry.refusal.kind, entry.refusal.reason)
        document = SpooledDocument.of(entry.enqueue.task, kind, reason)
        face.answer(document, *_lines(document))
        if forget_refused:
            spool.forget(entry.number)
    name = spool.name()
    summary = SpoolDocument(queue=name.queue, engine=name.engine, waiting=waiting, refused=refused)
    face.answer(
        summary,
        f"queue {printable(name.queue)} at {printable(name.engine)}: {counted(waiting, 'task')} "
        f"{'waits' if waiting == 1 else 'wait'}, {refused:,} {'was' if refused == 1 else 'were'} refused",
    )


def _lines(task: SpooledDocument) -> Iterator[str]:
    """Return a task in one or two lines."""
    created = ""
    if is_task_id(task.id):
        at = datetime.fromtimestamp(created_at(task.id), UTC)
        created = f", of {at.isoformat(sep=' ', timespec='seconds')}"
    yield f"{task.id} {printable(task.name)}: {task.status}{created}"
    if task.reason:
        yield f"  {task.kind}: {printable(task.reason)}"
