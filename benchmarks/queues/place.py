"""Where a queue of a benchmark lives: told to every process of it by its environment."""

from __future__ import annotations

import os
from pathlib import Path

URL = "BENCH_URL"
"""Of the server, where there is one."""
FOLDER = "BENCH_FOLDER"
"""Where files go, and what bodies leave behind."""
VARIANT = "BENCH_VARIANT"
"""Which of the queue's settings are tried: one of those in ``queues.catalogue``."""
PATIENCE_S = 10
"""After how long a task of a worker that is dead may be taken by another, where that can be chosen."""


def url() -> str:
    """The server's."""
    return os.environ[URL]


def folder() -> Path:
    """The folder of this run."""
    return Path(os.environ[FOLDER])


def variant() -> str:
    """The settings to try."""
    return os.environ.get(VARIANT, "")
