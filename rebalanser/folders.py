"""Folders: where a user's state is kept, who may read what is made there, and names in them that last."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from rebalanser import forks
from rebalanser.errors import InvalidSettings, UnusableFolder

PRIVATE: Final = "0600"
"""The mode of files that this user alone may read and write."""
_making = threading.Lock()


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
        make_folder(folder)
    except OSError as error:
        raise UnusableFolder(f"the state folder {folder} can't be made ({error.strerror})") from error
    return folder


def file_mode_of(text: str) -> int:
    """The mode of a file that octal digits name, such as 0640.

    Raises:
        InvalidSettings: it is none, its owner could not read and write the file, or anybody execute it.
    """
    if not re.fullmatch("0?[0-7]{3}", text):
        raise InvalidSettings(f"{text!r} is no mode of a file: write octal digits such as 0640")
    mode = int(text, 8)
    usable = f"0{mode & 0o666 | 0o600:o}"
    if mode & 0o600 != 0o600:
        raise InvalidSettings(f"{text!r} keeps the owner from reading or writing the file; {usable} does not")
    if mode & 0o111:
        raise InvalidSettings(f"{text!r} lets the file be executed; {usable} does not")
    return mode


def make_folder(folder: Path, file_mode: int = 0o600) -> None:
    """Make a folder and the missing ones above it; who may read files of ``file_mode`` may enter them.

    Raises:
        OSError: it can't be made, or something else is there.
    """
    mode = file_mode | (file_mode & 0o444) >> 2
    if not folder.is_dir():
        if folder.parent != folder:
            make_folder(folder.parent, file_mode)
        folder.mkdir(mode, exist_ok=True)
        folder.chmod(mode)


def make_file(path: Path, mode: int = 0o600) -> None:
    """Make an empty file of this mode, whatever the umask, unless there is one.

    Opening it reports what is wrong if it can't be made. SQLite gives the files beside it the same mode.
    """
    # One at a time: closing a descriptor of a file drops all locks that this process holds on it.
    with forks.postponed, _making, suppress(OSError):
        descriptor = os.open(path.resolve(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
