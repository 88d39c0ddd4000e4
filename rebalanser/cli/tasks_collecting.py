"""``rebalanser tasks collect``: delete what is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rebalanser.cli.face import Face, JsonOption, RegistryOption
from rebalanser.cli.lines import counted
from rebalanser.cli.tasks_options import QueueArgument, opened
from rebalanser.cli.times import parse_span


def collect(
    queue: QueueArgument,
    older_than: Annotated[
        float,
        typer.Option(
            parser=parse_span,
            metavar="SPAN",
            help="Only what was enqueued longer ago than this, such as 90s, 15m, 2h, 3d or 1w.",
        ),
    ] = "1d",  # type: ignore[assignment] # typer parses the default too
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Append each task to this file first, an object of JSON a line, with payload and log.",
        ),
    ] = None,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Delete complete tasks, each with all that it is connected to by dependencies, once all are complete.

    A task that changed meanwhile, or that another has come to depend on, stays for the next time. Producers
    and workers may go on. A deleted task's id is forgotten: enqueued once more it is a new task.
    """
    face = Face.of(registry, json)
    with opened(face, queue) as tasks:
        done = tasks.collect(older_than, archive)
    face.answer(
        {"queue": queue, "collected": done.tasks, "changed": done.changed},
        f"collected {counted(done.tasks, 'task')}"
        + (f"; {done.changed:,} changed meanwhile and stayed" if done.changed else ""),
    )
