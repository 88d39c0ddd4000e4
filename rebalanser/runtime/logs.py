"""Structured logs that leave the host application's logging alone.

Everything goes to standard-library loggers named ``rebalanser`` or below; the host application decides what
is shown, and where. Until it has configured logging, warnings and errors go to standard error, one line each.

A line reads ``text action=WORD key=value …``, and a traceback follows it. The same fields are on the record
as ``action`` and ``fields``, for formatters that write JSON, with an exception's type and message as
``error``. Neither structlog's nor logging's global configuration is touched or relied on. No secret is ever
in a line, nor in the exception that belongs to it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import sys
import threading
import traceback
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
LONGEST_LINE_CHARS: Final = 1000
"""Maximum length of a line on standard error by default.

In UTF-8 it fits into the 4,096 bytes that Linux writes to a pipe at once, so it never blocks.
"""

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
"""Level of each kind of fact."""

_ERROR: Final = "_error"
_logfmt: Final = structlog.processors.LogfmtRenderer(
    key_order=["action", "group", "node"], drop_missing=True, bool_as_flag=False
)
_facts: Final = logging.getLogger(FACTS)


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
    """Make one readable line, and the fields for the record; the last processor.

    The redacted traceback follows the line, so no formatter may add the exception again as it was.
    """
    text = _one_line(str(event.pop("event", "") or ""))
    trace, error = event.pop("exception", None), event.pop(_ERROR, None)
    line = " ".join(part for part in (text, _logfmt(_logger, _method, dict(event))) if part)
    fields = {"text": text, **event, **({"exception": trace} if trace else {})}
    extra = {"action": event.get("action", ""), "fields": fields, **({"error": error} if error else {})}
    return (f"{line}\n{trace}" if trace else line,), {"extra": extra, "exc_info": False}


def _one_line(text: str) -> str:
    """Escape line breaks and control characters, so that no text looks like a line of its own."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {
        name: _one_line(value) if isinstance(value, str) and name != "exception" else value
        for name, value in event.items()
    }


def _keep_error(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep the exception's type and message beside the traceback that it becomes."""
    error = _error_in(event.get("exc_info"))
    return event if error is None else {**event, _ERROR: error}


def _error_in(exc_info: object) -> str | None:
    """Return type and message of a logged exception on one line; None without an exception."""
    error = exc_info
    if isinstance(exc_info, tuple):
        error = exc_info[1]
    elif exc_info and not isinstance(exc_info, BaseException):
        error = sys.exception()
    if not isinstance(error, BaseException):
        return None
    return " ".join("".join(traceback.format_exception_only(error)).split())


_PROCESSORS: Final[tuple[Processor, ...]] = (
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _keep_error,
    structlog.processors.format_exc_info,
    redact_fields,
    _escape_controls,
    _to_standard_library,
)


def get_logger(name: str = ROOT) -> structlog.stdlib.BoundLogger:
    """Return a structlog logger that writes to the standard logger ``name``, at or below ``rebalanser``.

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

    It is for the threads that end access: neither a log that blocks nor one that raises stops them.
    """

    def log() -> None:
        with contextlib.suppress(Exception):
            get_logger().error(event, exc_info=error, **fields)

    thread = threading.Thread(target=log, name="rebalanser-log", daemon=True)
    thread.start()
    thread.join(LOG_ASIDE_S)


class DefaultHandler(logging.Handler):
    """Shows warnings and errors on standard error until the host application has configured logging.

    Python's own handler of last resort would show the tracebacks too. A record is left to the host if any
    other handler gets it, if ``propagate`` was switched off on its way, or if ``logging.lastResort`` is None.
    A line that standard error cannot take at once is dropped, so that no thread waits for its reader.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line for a record that nothing else handles; raise nothing."""
        with contextlib.suppress(Exception):
            stream = sys.stderr
            if not self._is_handled_by_host(record) and _can_write(stream):
                stream.write(f"{_line_of(record)[:LONGEST_LINE_CHARS]}\n")
                stream.flush()

    def _is_handled_by_host(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            if not logger.propagate:
                return True
            logger = logger.parent
        return logging.lastResort is None


def _can_write(stream: TextIO) -> bool:
    """Return True if a line can be written without waiting; a stream without a descriptor never waits."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))


def _line_of(record: logging.LogRecord) -> str:
    """Return a record as one line: level, logger, text, fields and the exception without its traceback."""
    fields = getattr(record, "fields", None)
    shown: dict[str, object] = {}
    if fields is None:
        text, error = _one_line(redact(record.getMessage())), _error_in(record.exc_info)
        if action := getattr(record, "action", None):
            shown["action"] = action
    else:
        text, error = record.getMessage().partition("\n")[0], getattr(record, "error", None)
    if error is not None and "error" not in (fields or {}):
        shown["error"] = _one_line(redact(error))
    return f"{record.levelname} {record.name}: {text} {_logfmt(None, '', shown)}".rstrip()


logging.getLogger(ROOT).addHandler(DefaultHandler())


class _CliHandler(logging.StreamHandler[TextIO]):
    """Writes to the present standard error, so that it can be redirected."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_cli_logging(json: bool, verbose: int) -> None:
    """Show the logs on standard error, for the command line, which owns its process.

    ``verbose`` 0 shows warnings and errors, 1 everything but details, and 2 the details too. With ``json``
    each line is an object. Calling it again replaces what was configured.
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
    """Return the fields of a line of :func:`get_logger`; other lines stay texts."""
    record: logging.LogRecord = event["_record"]
    kept = {name: value for name, value in event.items() if name.startswith("_") or name == "exc_info"}
    fields = dict(getattr(record, "fields", {}))
    if not fields:
        action = getattr(record, "action", None)
        return {**event, **({"action": action} if action else {})}
    return {**kept, "event": fields.pop("text"), **fields}
