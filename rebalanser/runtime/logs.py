"""Structured logs that leave the host application's logging alone.

Everything goes to standard-library loggers named ``rebalanser`` or below, which have no handler of their own:
the host application decides what is seen, and where. A line reads ``text action=WORD key=value …``; the same
fields are on the record as ``action`` and ``fields``, for formatters that write JSON. Neither structlog's
nor logging's global configuration is touched or relied on. No secret is ever in a line, nor in the exception
that belongs to it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from rebalanser.protocol.messages import Fact, FactKind
from rebalanser.redaction import HIDDEN, names_secret, redact

ROOT: Final = "rebalanser"
FACTS: Final = "rebalanser.facts"
LOG_ASIDE_S: Final = 0.5

_STRANGE: Final = {FactKind.ISOLATED, FactKind.SESSION_LOST, FactKind.LAPSING, FactKind.START_REFUSED}
_WRONG: Final = {FactKind.HANDLER_OVERRAN, FactKind.START_FAILED, FactKind.STOP_FAILED}
_DETAILED: Final = {
    FactKind.BARRIER_ADDED,
    FactKind.BARRIER_BLOCKED,
    FactKind.BARRIER_REMOVED,
    FactKind.GROUP_READ,
    FactKind.LOAD_REPORTED,
}


def _level(kind: FactKind) -> int:
    if kind in _WRONG:
        return logging.ERROR
    if kind in _STRANGE or kind is FactKind.JOIN_FAILED:
        return logging.WARNING
    return logging.DEBUG if kind in _DETAILED else logging.INFO


LEVELS: Final[Mapping[FactKind, int]] = MappingProxyType({kind: _level(kind) for kind in FactKind})
"""At which level each kind of fact is logged."""

logging.getLogger(ROOT).addHandler(logging.NullHandler())
_logfmt: Final = structlog.processors.LogfmtRenderer(
    key_order=["action", "group", "node"], drop_missing=True, bool_as_flag=False
)
_facts: Final = logging.getLogger(FACTS)


def redact_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A structlog processor that takes secrets out of every text, at any depth, and out of named fields."""
    return cast(EventDict, _clean(event))


def _clean(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: HIDDEN if names_secret(str(name)) else _clean(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(part) for part in value]
    return redact(str(value))


def _to_standard_library(
    _logger: WrappedLogger, _method: str, event: EventDict
) -> tuple[tuple[str], dict[str, Any]]:
    """The last processor: one readable line, and the fields beside it.

    The exception is in the line, redacted; so no formatter may add it again as it was.
    """
    text = _one_line(str(event.pop("event", "") or ""))
    trace = event.pop("exception", None)
    line = " ".join(part for part in (text, _logfmt(_logger, _method, dict(event))) if part)
    fields = {"text": text, **event, **({"exception": trace} if trace else {})}
    extra = {"action": event.get("action", ""), "fields": fields}
    return (f"{line}\n{trace}" if trace else line,), {"extra": extra, "exc_info": False}


def _one_line(text: str) -> str:
    """No line break and no control character, so that no text can look like a line of its own."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {
        name: _one_line(value) if isinstance(value, str) and name != "exception" else value
        for name, value in event.items()
    }


_PROCESSORS: Final[tuple[Processor, ...]] = (
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.processors.format_exc_info,
    redact_fields,
    _escape_controls,
    _to_standard_library,
)


def get_logger(name: str = ROOT) -> structlog.stdlib.BoundLogger:
    """A structlog logger that writes to the standard library's logger ``name``, at or below ``rebalanser``.

    ``log.warning("a hook raised", action="hook_failed", group="orders")``; ``exc_info`` adds the traceback.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger


_fact_log: Final = get_logger(FACTS)


def log_fact(fact: Fact, group: str) -> None:
    """Log what happened on a node, with its kind as ``action``, at the level of :data:`LEVELS`."""
    level = LEVELS[fact.kind]
    if not _facts.isEnabledFor(level):
        return
    known = {
        "resource": fact.resource,
        "token": fact.token,
        "revision": fact.revision,
        "load": fact.value if fact.kind is FactKind.LOAD_REPORTED else None,
    }
    fields: dict[str, Any] = {
        **fact.detail,
        "action": fact.kind.value,
        "group": group,
        "node": fact.node,
        "term": fact.term,
        "version": fact.version,
        **{name: value for name, value in known.items() if value is not None},
    }
    _fact_log.log(level, fact.kind.value.replace("_", " "), **fields)


def log_aside(event: str, error: BaseException, **fields: Any) -> None:
    """Log an error from a thread of its own, and wait for it half a second at most.

    For the threads that lead access to its end: neither a log that blocks nor one that raises may stop them.
    """

    def log() -> None:
        with contextlib.suppress(Exception):
            get_logger().error(event, exc_info=error, **fields)

    thread = threading.Thread(target=log, name="rebalanser-log", daemon=True)
    thread.start()
    thread.join(LOG_ASIDE_S)


class _CliHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error as it is at the time, so that it can be redirected."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_cli_logging(json: bool, verbose: int) -> None:
    """Show the logs on standard error, for the command line, which owns its process.

    Warnings and worse, from ``verbose`` 1 on everything but details, from 2 on those too. With ``json`` each
    line is an object. Calling it again replaces what was configured.
    """
    renderer: Processor = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False)
    )
    before: list[Processor] = [
        _fields_of_record,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=json),
        structlog.processors.format_exc_info,
    ]
    handler = _CliHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, redact_fields, renderer],
        )
    )
    root = logging.getLogger(ROOT)
    for old in [handler for handler in root.handlers if isinstance(handler, _CliHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))
    root.propagate = False


def _fields_of_record(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Take a line of :func:`get_logger` apart again; one that was logged otherwise stays a text."""
    record: logging.LogRecord = event["_record"]
    kept = {name: value for name, value in event.items() if name.startswith("_") or name == "exc_info"}
    fields = dict(getattr(record, "fields", {}))
    if not fields:
        action = getattr(record, "action", None)
        return {**event, **({"action": action} if action else {})}
    return {**kept, "event": fields.pop("text"), **fields}
