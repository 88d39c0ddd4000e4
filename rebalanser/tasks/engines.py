"""Engines by URL: those that are registered, under the entry-point group ``rebalanser.engines``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from rebalanser.registry.urls import RegistryUrl, load_opener, parse_url
from rebalanser.tasks.engine import Engine

ENTRY_POINT_GROUP: Final = "rebalanser.engines"

Opener: TypeAlias = Callable[[RegistryUrl, float], Engine]
"""``open(url, timeout_s)``: an engine that has answered once, or an error that says what was tried."""


def open_engine(url: str, timeout_s: float) -> Engine:
    """Open the engine at ``url``, waiting at most ``timeout_s`` seconds for its first answer.

    Raises:
        InvalidUrl: it is none.
        UnknownScheme: no engine has this scheme; the message names those that there are.
        MissingExtra: its packages are not installed; the message names the extra.
        RegistryUnavailable: it did not answer in time.
        UnusableStore: it is of a newer version, or no store of tasks can be there.
    """
    parsed = parse_url(url)
    opener: Opener = load_opener(parsed.scheme, ENTRY_POINT_GROUP)
    return opener(parsed, timeout_s)
