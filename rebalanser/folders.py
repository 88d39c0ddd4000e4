"""Folders: where a user's state is kept, and names in them that last."""

from __future__ import annotations

import os
from pathlib import Path

from rebalanser.errors import UnusableFolder


def state_folder() -> Path:
    """``$XDG_STATE_HOME/rebalanser``, else ``~/.local/state/rebalanser``, made if it is missing.

    Raises:
        UnusableFolder: it can't be made.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    if not state.is_absolute():
        state = Path("~/.local/state").expanduser()
    folder = state / "rebalanser"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableFolder(f"the state folder {folder} can't be made ({error.strerror})") from error
    return folder


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
