"""Sentences on standard error about what happens on a node, for ``run()`` in a program without logging."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Final

from rebalanser.core.group import Fact, FactKind, Report
from rebalanser.core.group.messages import Handler
from rebalanser.redaction import redact
from rebalanser.runtime.logs import is_unconfigured, write_default_line

SILENCE_S: Final = 1.0
"""Seconds without an answer of the registry before a line names it."""
MOST_NAMES: Final = 5
"""Maximum number of resources that a sentence names."""
_SILENT: Final = frozenset(
    {FactKind.GROUP_READ, FactKind.ALLOCATION_ADOPTED, FactKind.BARRIER_BLOCKED, FactKind.STOP_ENTERED}
)
"""Kinds that get a line only if they say something new."""


@contextlib.contextmanager
def after_silence(say: Callable[[], object]) -> Iterator[None]:
    """Call ``say`` in another thread if the block takes longer than ``SILENCE_S``."""
    hint = threading.Timer(SILENCE_S, say)
    hint.daemon = True
    hint.start()
    try:
        yield
    finally:
        hint.cancel()


class Narrator:
    """Writes a line for each event of a node, while the program has not configured logging.

    A line that standard error can't take at once is dropped, so that no thread waits for its reader.
    """

    def __init__(self, group: str, label: str, url: str) -> None:
        self._group = group
        self._label = label
        self._url = url
        self._owned: set[str] = set()
        self._handled: Collection[str] = ()
        self._in_group: int | None = None
        self._given_nothing = False
        self._blocked: frozenset[str] = frozenset()

    def connecting(self) -> contextlib.AbstractContextManager[None]:
        """Name the registry if the block takes longer than ``SILENCE_S``."""
        return after_silence(lambda: self._say(f"is connecting to {self._url}"))

    def narrate(self, report: Report) -> bool:
        """Write a line for a report. Return False if it has none, or logging is configured."""
        if not is_unconfigured():
            return False
        sentence = self._sentence(report)
        if sentence is not None:
            self._say(sentence)
        return sentence is not None or report.fact.kind in _SILENT

    def _say(self, sentence: str) -> None:
        if is_unconfigured():
            write_default_line(f"rebalanser {self._group}: {self._label} {redact(sentence)}")

    def _sentence(self, report: Report) -> str | None:
        fact, resources = report.fact, report.each or ()
        match fact.kind:
            case FactKind.JOINED:
                self._owned.clear()
                self._given_nothing = False
                return f"joined the group at {self._url}"
            case FactKind.GROUP_READ:
                self._in_group = int(fact.detail.get("resources") or 0)
                return None
            case FactKind.ALLOCATION_ADOPTED:
                return self._given(int(fact.detail.get("resources") or 0))
            case FactKind.BARRIER_BLOCKED:
                before, self._blocked = self._blocked, frozenset(resources)
                new = self._blocked - before
                return f"waits for {shown_names(new)}, which other nodes have yet to give up" if new else None
            case FactKind.START_ENTERED:
                self._owned.update(resources)
                self._handled = resources
                return f"owns {shown_names(resources)}; {self._in_all()}"
            case FactKind.RELEASED:
                return f"releases {shown_names(resources)}" + (
                    "" if fact.value is None else f" for {fact.value:g} s"
                )
            case FactKind.STOP_ENTERED:
                self._handled = resources
                return None
            case FactKind.HANDLER_OVERRAN:
                return self._overran(fact.detail.get("handler"), fact.detail.get("limit_s"))
            case FactKind.STOP_RETURNED:
                self._owned.difference_update(resources)
                return f"gave up {shown_names(resources)}; {self._in_all()}"
            case _:
                return _sentence_of(fact)

    def _given(self, number: int) -> str | None:
        told, self._given_nothing = self._given_nothing, number == 0
        if number or told:
            return None
        if self._in_group == 0:
            return "owns nothing: the group has no resources; `rebalanser resources add` adds some"
        return f"is to own nothing now; `rebalanser status {self._group}` says why"

    def _overran(self, handler: object, limit_s: object) -> str:
        names = shown_names(self._handled)
        if handler == Handler.STOP:
            return (
                f"still stops {names} after its limit of {limit_s} s: OnStop or a worker has not returned, "
                "and no other node starts them before"
            )
        return (
            f"still starts {names} after its limit of {limit_s} s: OnStart has not returned, "
            "or the event loop is blocked"
        )

    def _in_all(self) -> str:
        number = len(self._owned)
        return f"it owns {number:,} {'resource' if number == 1 else 'resources'} now"


def trouble_of(fact: Fact) -> str | None:
    """Return a sentence about an error of the application, for ``status``; None for other facts."""
    error = fact.detail.get("error")
    match fact.kind:
        case FactKind.START_FAILED:
            return f"OnStart raised {error}"
        case FactKind.STOP_FAILED:
            return f"OnStop of {fact.resource} raised {error}"
        case FactKind.HANDLER_OVERRAN:
            return f"{fact.detail.get('handler')} ran longer than its limit of {fact.detail.get('limit_s')} s"
        case FactKind.WORKER_FAILED:
            return f"the worker of {fact.resource} raised {error}"
        case FactKind.WORKER_RETURNED:
            return f"the worker of {fact.resource} returned too early"
        case _:
            return None


def shown_names(resources: Collection[str]) -> str:
    """Return the first ``MOST_NAMES`` resources by name, and the number of the others."""
    shown = sorted(resources)[:MOST_NAMES]
    rest = len(resources) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def _sentence_of(fact: Fact) -> str | None:
    """Return the sentence of a kind that needs no other state; None for other kinds."""
    detail = fact.detail
    match fact.kind:
        case FactKind.JOIN_FAILED:
            again = "" if detail.get("fatal") else "; it tries again"
            return f"could not join: {detail.get('error')}{again}"
        case FactKind.ISOLATED:
            return "hears nothing from the registry: it gives up what it owns before its lease can end"
        case FactKind.RECONNECTED:
            return "hears from the registry again; its lease never ended"
        case FactKind.SESSION_LOST:
            return "lost its lease: it gives up everything and joins again"
        case FactKind.START_FAILED:
            return f"leaves, since OnStart raised {detail.get('error')}; it joins again after a delay"
        case FactKind.LAPSING:
            return "leaves when its lease ends, since OnStop raised; nobody else gets its resources before"
        case FactKind.LEFT:
            return "left the group"
        case _:
            return None
