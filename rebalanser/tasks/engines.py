"""Engines by URL: those that are registered, under the entry-point group ``rebalanser.engines``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from rebalanser.registry.urls import RegistryUrl, load_opener, parse_url
from rebalanser.tasks.engine import Engine

ENTRY_POINT_GROUP: Final = "rebalanser.engines"

Opener: TypeAlias = Callable[[RegistryUrl, float], Engine]
"""``open(url, timeout_s)``: an engine that has answered once within that time, or an error that says what was
tried: RegistryUnavailable if it did not answer, UnusableStore if no store of tasks can be there."""


def load_engine(url: str) -> tuple[RegistryUrl, Opener]:
    """The URL taken apart, and what opens it.

    Raises:
        InvalidUrl: it is none.
        UnknownScheme: no engine has this scheme; the message names those that there are.
        MissingExtra: its packages are not installed; the message names the extra.
    """
    parsed = parse_url(url)
    opener: Opener = load_opener(parsed.scheme, ENTRY_POINT_GROUP)
    return parsed, opener
