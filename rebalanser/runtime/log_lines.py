"""The structlog processors of log events, and the formatter of the command line.

structlog takes long to import, so ``runtime.logs`` loads this module on first use.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from rebalanser.redaction import HIDDEN, names_secret, redact

_ERROR: Final = "_error"
_RAISED_AT: Final = "_raised_at"
_logfmt: Final = structlog.processors.LogfmtRenderer(
    key_order=["action", "group", "node"], drop_missing=True, bool_as_flag=False
)


def logfmt(fields: Mapping[str, object]) -> str:
    """Return fields as ``key=value …``."""
    return _logfmt(None, "", dict(fields))


def redact_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Hide secrets in every text, at any depth, and in fields with a secret's name; a structlog processor."""
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
    """Build one readable line, and the fields for the record; the last processor.

    The redacted traceback follows the line, so no formatter may add the original exception again.
    """
    text = one_line(str(event.pop("event", "") or ""))
    trace, error = event.pop("exception", None), event.pop(_ERROR, None)
    raised_at = event.pop(_RAISED_AT, None)
    line = " ".join(part for part in (text, logfmt(event)) if part)
    fields = {"text": text, **event, **({"exception": trace} if trace else {})}
    extra = {"action": event.get("action", ""), "fields": fields, "error": error, "raised_at": raised_at}
    extra = {name: value for name, value in extra.items() if value is not None}
    return (f"{line}\n{trace}" if trace else line,), {"extra": extra, "exc_info": False}


def one_line(text: str) -> str:
    """Escape line breaks and control characters, so that no text looks like a line of its own."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {
        name: one_line(value) if isinstance(value, str) and name != "exception" else value
        for name, value in event.items()
    }


def _keep_error(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep the exception's type, message and place; the next processor turns it into a traceback."""
    exc_info = event.get("exc_info")
    error, raised_at = error_in(exc_info), place_in(exc_info)
    return event if error is None else {**event, _ERROR: error, _RAISED_AT: raised_at}


def error_in(exc_info: object) -> str | None:
    """Return type and message of a logged exception on one line; None without an exception."""
    error = _exception_in(exc_info)
    return None if error is None else " ".join("".join(traceback.format_exception_only(error)).split())


def place_in(exc_info: object) -> str | None:
    """Return the place where a logged exception was raised, as ``FILE:LINE``; None if unknown."""
    error = _exception_in(exc_info)
    frames = traceback.extract_tb(error.__traceback__) if error else None
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _exception_in(exc_info: object) -> BaseException | None:
    error = exc_info
    if isinstance(exc_info, tuple):
        error = exc_info[1]
    elif exc_info and not isinstance(exc_info, BaseException):
        error = sys.exception()
    return error if isinstance(error, BaseException) else None


_PROCESSORS: Final[tuple[Processor, ...]] = (
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _keep_error,
    structlog.processors.format_exc_info,
    redact_fields,
    _escape_controls,
    _to_standard_library,
)


def structlog_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a structlog logger that writes to the standard logger ``name``."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger


def cli_formatter(json: bool) -> logging.Formatter:
    """Return the log formatter of the command line: for people, or with ``json`` one object per line."""
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
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=before,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, redact_fields, renderer],
    )


def _fields_of_record(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Return the fields of a record of ``structlog_logger``; keep the text of other records."""
    record: logging.LogRecord = event["_record"]
    kept = {name: value for name, value in event.items() if name.startswith("_") or name == "exc_info"}
    fields = dict(getattr(record, "fields", {}))
    if not fields:
        action = getattr(record, "action", None)
        return {**event, **({"action": action} if action else {})}
    return {**kept, "event": fields.pop("text"), **fields}
