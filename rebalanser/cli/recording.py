"""The options of commands that write an ownership history, and the sink that follows from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from rebalanser.history import HistorySink, open_sinks
from rebalanser.roles.history import DIR_VARIABLE, TOPIC_VARIABLE
from rebalanser.settings import Settings

CLOSE_TIMEOUT_S: Final = 2.0

HistoryOption = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FOLDER",
        envvar=DIR_VARIABLE,
        show_default=False,
        help="Write down what happens, for `rebalanser audit`: JSON lines in files in this folder.",
    ),
]
HistoryTopicOption = Annotated[
    str | None,
    typer.Option(
        "--history-topic",
        metavar="URL",
        envvar=TOPIC_VARIABLE,
        show_default=False,
        help="The same to a topic, kafka://HOST:PORT/TOPIC.",
    ),
]


@contextlib.contextmanager
def recorded(
    folder: Path | None, topic: str | None, group: str, label: str, settings: Settings
) -> Iterator[HistorySink | None]:
    """Where ``label`` of ``group`` writes its history while the context lasts; None where nobody wants one.

    Raises:
        InvalidUrl: ``topic`` is no URL.
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
