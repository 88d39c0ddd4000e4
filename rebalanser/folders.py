"""Where a user's state is kept: ``$XDG_STATE_HOME/rebalanser``, else ``~/.local/state/rebalanser``."""

from __future__ import annotations

import os
from pathlib import Path

from rebalanser.errors import UnusableFolder


def state_folder() -> Path:
    """The folder, made if it is missing.

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
