"""Reads the log events from the code: which calls log, at which level, with which fields.

``log_events.toml`` has the meaning of each event and what to do about it. Facts are logged by one function
for each protocol, so their events come from the kinds of facts and not from calls.
"""

from __future__ import annotations

import ast
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rebalanser.history import Protocol
from rebalanser.history.kinds import KINDS
from rebalanser.neli.facts import LEVELS as NELI_LEVELS
from rebalanser.runtime.logs import LEVELS as GROUP_LEVELS
from rebalanser.runtime.logs import LOGGED_WHERE_IT_HAPPENS
from rebalanser_kafka.shiva.facts import LEVELS as SHIVA_LEVELS

ROOT: Final = Path(__file__).resolve().parent.parent
NOTES: Final = ROOT / "docs" / "log_events.toml"
AREAS: Final = (
    ("history", r"rebalanser/history/|backends/rebalanser_kafka/history"),
    ("skuld", r"rebalanser/tasks/|rebalanser/cli/tasks|backends/rebalanser_sqlite/tasks/"),
    ("shiva", r"rebalanser/shiva/|rebalanser/cli/shiva|backends/rebalanser_kafka/shiva/"),
    ("neli", r"rebalanser/neli/|rebalanser/cli/neli|backends/rebalanser_kafka/neli/"),
    ("registries", r"backends/"),
    ("groups", r"rebalanser/"),
)
"""Areas of events, and the paths of their code; the first that fits counts."""
PASS_ON: Final = {
    "backends/rebalanser_kafka/shiva/facts.py",
    "backends/rebalanser_kafka/shiva/throttled_warning.py",
    "rebalanser/neli/facts.py",
    "rebalanser/observer.py",
    "rebalanser/owners.py",
    "rebalanser/runtime/logs.py",
}
"""Modules with a call that logs the action that its caller names."""
_LOGGER: Final = re.compile(r"_?log|_fact_log|_LIBRDKAFKA|get_logger\(.*\)")
_LEVELS: Final = {"exception": "error", "log_aside": "error", "_warn": "warning"}
_METHODS: Final = {"debug", "info", "warning", "error", "exception", "critical", "log"}


@dataclass(slots=True)
class Event:
    """An event: the levels and fields of all calls that log it."""

    levels: set[str] = field(default_factory=set)
    fields: dict[str, None] = field(default_factory=dict)
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class LogCall:
    """A call that logs; ``action`` is None where it passes on what it was given."""

    place: str
    action: str | None
    level: str
    fields: tuple[str, ...]


def calls(root: Path = ROOT) -> Iterator[LogCall]:
    """Every call that logs."""
    for folder in ("rebalanser", "backends"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith("rebalanser/testing/"):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Call):
                        yield from _log_calls(node, name)


def _log_calls(call: ast.Call, file: str) -> Iterator[LogCall]:
    match call.func:
        case ast.Attribute(attr=method, value=owner) if method in _METHODS:
            if not _LOGGER.fullmatch(ast.unparse(owner)):
                return
        case ast.Attribute(attr="_warn" as method) | ast.Name(id="log_aside" as method):
            pass
        case ast.Name(id="ThrottledWarning") | ast.Attribute(value=ast.Name(id="ThrottledWarning")):
            (action,) = (
                each.value
                for each in call.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
            yield LogCall(f"{file}:{call.lineno}", action, "warning", ())
            yield LogCall(f"{file}:{call.lineno}", f"{action}_over", "warning", ())
            return
        case _:
            return
    given = {each.arg: each.value for each in call.keywords if each.arg}
    action = _text(given.pop("action", None))
    if isinstance(extra := given.pop("extra", None), ast.Dict):
        named = {_text(key): value for key, value in zip(extra.keys, extra.values, strict=True)}
        action = _text(named.get("action"))
    if given.pop("exc_info", None) or method in ("exception", "log_aside"):
        given["error"] = ast.Constant("")
    yield LogCall(f"{file}:{call.lineno}", action, _LEVELS.get(method, method), tuple(given))


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def unnamed() -> list[str]:
    """Places that log something without an action."""
    return [
        call.place for call in calls() if call.action is None and call.place.partition(":")[0] not in PASS_ON
    ]


def area_of(place: str, action: str) -> str:
    """The area to which an event of a file belongs."""
    if action.startswith("history_"):
        return "history"
    return next(area for area, pattern in AREAS if re.match(pattern, place))


def events() -> dict[str, dict[str, Event]]:
    """Every event by area and name, as the code logs it."""
    found: dict[str, dict[str, Event]] = {area: {} for area, _ in AREAS}
    for call in calls():
        if call.action is not None:
            event = found[area_of(call.place, call.action)].setdefault(call.action, Event())
            event.levels.add(call.level)
            event.fields.update(dict.fromkeys(call.fields))
    for area, protocol, levels in (
        ("groups", Protocol.GROUP, GROUP_LEVELS),
        ("shiva", Protocol.SHIVA, SHIVA_LEVELS),
        ("neli", Protocol.NELI, NELI_LEVELS),
    ):
        for kind, level in levels.items():
            event = found[area].setdefault(str(kind.value), Event())
            if kind not in LOGGED_WHERE_IT_HAPPENS:
                event.levels.add(logging.getLevelName(level).lower())
            event.fields.update(dict.fromkeys(KINDS[protocol][kind].detail))
            event.meaning = KINDS[protocol][kind].meaning
    return found


def notes() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The hand-written part of each event: ``meaning``, ``remedy`` and further ``fields``."""
    return tomllib.loads(NOTES.read_text())


def rows(area: str) -> list[list[str]]:
    """The rows of an area's table: event, level, fields, meaning, remedy."""
    written = notes()[area]
    made = []
    for name, event in sorted(events()[area].items()):
        note = written.get(name, {})
        names = [*event.fields, *note.get("fields", [])]
        levels = sorted(event.levels, key=lambda level: -logging.getLevelNamesMapping()[level.upper()])
        made.append(
            [
                f"`{name}`",
                ", ".join(levels),
                ", ".join(f"`{each}`" for each in names),
                note.get("meaning", event.meaning),
                note.get("remedy", ""),
            ]
        )
    return made
