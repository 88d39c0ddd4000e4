"""Opens the sinks that settings name: files in a folder, a topic, or both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rebalanser.folders import PRIVATE
from rebalanser.history.records import Record
from rebalanser.history.sinks import HistorySink, JsonlSink, NullSink
from rebalanser.registry.urls import load_opener, parse_url

ENTRY_POINT_GROUP: Final = "rebalanser.history"
"""Openers of topics by URL scheme: ``open_sink(url, group, label)`` gives a ``HistorySink``."""
MAX_FILES: Final = 8
"""How many files the limit of a node's history is cut into."""


class TeeSink:
    """Gives every record to several sinks. One that drops records or is slow to close holds no other up."""

    def __init__(self, sinks: Sequence[HistorySink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        """Give the record to all."""
        for sink in self._sinks:
            sink.write(record)

    def close(self, timeout_s: float) -> None:
        """Close all, one after another, each within its share of what is left of ``timeout_s`` seconds."""
        ends = time.monotonic() + timeout_s
        for left in range(len(self._sinks), 0, -1):
            self._sinks[-left].close(max(0.0, ends - time.monotonic()) / left)


def open_sinks(
    history_dir: Path | None,
    history_topic: str | None,
    group: str,
    label: str,
    max_bytes: int,
    file_mode: str = PRIVATE,
) -> HistorySink:
    """Where records go: files in ``history_dir``, of ``max_bytes`` at most, and the topic at the URL.

    A topic is ``kafka://HOST:PORT[,HOST:PORT]/TOPIC``. Both may be named, or none: then nothing is kept.
    ``group`` and ``label`` name the files, which are made with the mode ``file_mode``. Nothing is waited for;
    what can't be reached is tried again.

    Raises:
        InvalidUrl: ``history_topic`` is no URL.
        UnknownScheme: no installed package has topics of that scheme.
        MissingExtra: the package that the topic needs is not installed; the message names the extra.
        InvalidSettings: ``file_mode`` is no mode of a file, such as 0640.
    """
    sinks: list[HistorySink] = []
    if history_topic is not None:
        sinks.append(_open_topic(history_topic, group, label))
    if history_dir is not None:
        sinks.append(
            JsonlSink(
                history_dir,
                group,
                label,
                max_file_bytes=max_bytes // MAX_FILES,
                max_files=MAX_FILES,
                file_mode=file_mode,
            )
        )
    return sinks[0] if len(sinks) == 1 else TeeSink(sinks) if sinks else NullSink()


def _open_topic(url: str, group: str, label: str) -> HistorySink:
    sink: HistorySink = load_opener(parse_url(url).scheme, ENTRY_POINT_GROUP)(url, group, label)
    return sink
