"""The options of commands that write an ownership history, and the sink for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.history import HistorySink, open_sinks
from rebalanser.neli.history import DIR_VARIABLE, TOPIC_VARIABLE
from rebalanser.settings import Settings

CLOSE_TIMEOUT_S: Final = 2.0

HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FOLDER",
        envvar=DIR_VARIABLE,
        show_default=False,
        help="Write the ownership history for `rebalanser audit` to files of JSON lines in this folder.",
    ),
]
HistoryTopicOption = Annotated[
    str | None,
    typer.Option(
        "--history-topic",
        metavar="URL",
        envvar=TOPIC_VARIABLE,
        show_default=False,
        help="Write the history to a topic, kafka://HOST:PORT/TOPIC.",
    ),
]


@contextlib.contextmanager
def recorded(
    folder: Path | None, topic: str | None, group: str, label: str, settings: Settings
) -> Iterator[HistorySink | None]:
    """Open the history sink for ``label`` of ``group``, and close it at the end; None without a target.

    Raises:
        InvalidUrl: ``topic`` is not a URL.
        UnknownScheme: no installed package has topics of that scheme.
    """
    if folder is None and topic is None:
        yield None
        return
    sink = open_sinks(folder, topic, group, label, settings.history_max_bytes, settings.history_file_mode)
    try:
        yield sink
    finally:
        sink.close(CLOSE_TIMEOUT_S)
