"""Golden scenarios: what is done to a world, and the story that must come of it, in files a person can read.

Above the line of dashes stands what is done: the first line says what world it is, and then every line is a
word with its arguments. Below it stands what must happen, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

_LINE = "-" * 40

Words: TypeAlias = Mapping[str, Callable[..., object]]
Begin: TypeAlias = Callable[[str, Callable[[str], None]], Words]
"""Makes the world that the first line describes, has it tell what happens, and gives its words."""


def play(script: str, begin: Begin) -> list[str]:
    """Do what a script says; what came of it."""
    first, *lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    story: list[str] = []
    words = begin(first, story.append)
    for line in lines:
        word, *arguments = line.split()
        story.append(f"> {line}")
        words[word](*arguments)
    return story


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that hold a story."""
    return sorted(folder.glob("*.txt"))


def read(path: Path) -> tuple[str, list[str]]:
    """The script of a file, and the story that must come of it."""
    script, _, story = path.read_text().partition(f"{_LINE}\n")
    return script, story.splitlines()


def write_anew(folder: Path, begin: Begin) -> None:
    """Write what comes of every script of a folder into its file, to be read before it is kept."""
    for path in files_in(folder):
        script, _ = read(path)
        path.write_text(f"{script}{_LINE}\n" + "".join(f"{line}\n" for line in play(script, begin)))
