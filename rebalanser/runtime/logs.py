"""Structured logs that do not change the host application's logging.

All events go to standard-library loggers named ``rebalanser`` or below; the host application decides what is
shown, and where. Until it has configured logging, warnings and errors go to standard error, one line each.

A line reads ``text action=WORD key=value …``, and a traceback follows it. The same fields are on the record
as ``action`` and ``fields``, for formatters that write JSON, with an exception's type and message as
``error`` and the file and line that raised it as ``raised_at``. Neither structlog's nor logging's global
configuration is touched or relied on. No secret is ever in a line, nor in the exception that belongs to it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import sys
import threading
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from rebalanser.core.group.messages import Fact, FactKind
from rebalanser.redaction import redact

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

ROOT: Final = "rebalanser"
FACTS: Final = "rebalanser.facts"
LOG_ASIDE_S: Final = 0.5
LONGEST_LINE_CHARS: Final = 1000
"""Maximum length of a line that ``write_default_line`` writes."""
PIPE_BYTES: Final = 4096
"""Number of bytes that Linux writes to a pipe at once. No line is longer, so none blocks."""
MOST_BYTES_PER_CHAR: Final = 10
"""Maximum for an ASCII stream, which may write a character as ``\\U0001f98a``."""

_STRANGE: Final = {
    FactKind.ISOLATED,
    FactKind.SESSION_LOST,
    FactKind.LAPSING,
    FactKind.START_REFUSED,
    FactKind.LOOP_SLOW,
    FactKind.RESIGNED,
    FactKind.UNREADABLE,
    FactKind.WORKER_RETURNED,
    FactKind.UNSAFE_REGISTRY,
}
_WRONG: Final = {
    FactKind.HANDLER_OVERRAN,
    FactKind.START_FAILED,
    FactKind.STOP_FAILED,
    FactKind.WORKER_FAILED,
    FactKind.ENGINE_FAILED,
}
LOGGED_WHERE_IT_HAPPENS: Final = frozenset(
    {FactKind.WORKER_FAILED, FactKind.WORKER_RETURNED, FactKind.ENGINE_FAILED, FactKind.UNSAFE_REGISTRY}
)
"""Kinds of facts that are logged where they happen, with more detail such as a traceback."""
_DETAILED: Final = {
    FactKind.BARRIER_ADDED,
    FactKind.BARRIER_BLOCKED,
    FactKind.BARRIER_REMOVED,
    FactKind.GROUP_READ,
    FactKind.LOAD_REPORTED,
}
_SENTENCES: Final = {
    FactKind.UNREADABLE: "keys of the group can't be read; docs/how-to/monitoring.md says how to delete them"
}
"""Texts of kinds whose name alone does not say what to do."""


def _level(kind: FactKind) -> int:
    if kind in _WRONG:
        return logging.ERROR
    if kind in _STRANGE or kind is FactKind.JOIN_FAILED:
        return logging.WARNING
    return logging.DEBUG if kind in _DETAILED else logging.INFO


LEVELS: Final[Mapping[FactKind, int]] = MappingProxyType({kind: _level(kind) for kind in FactKind})
"""Level of each kind of fact."""

_facts: Final = logging.getLogger(FACTS)


class _Logger:
    """A structlog logger that is created on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _made(self) -> BoundLogger:
        from rebalanser.runtime.log_lines import structlog_logger  # noqa: PLC0415 - slow to import

        return structlog_logger(self._name)

    def __getattr__(self, attribute: str) -> object:
        return getattr(self._made, attribute)


def get_logger(name: str = ROOT) -> BoundLogger:
    """Return a structlog logger that writes to the standard logger ``name``, at or below ``rebalanser``.

    ``log.warning("a hook raised", action="hook_failed", group="orders")``; ``exc_info`` adds the traceback.
    structlog is imported on the first use of such a logger; see ``prepare``.
    """
    return cast("BoundLogger", _Logger(name))


def prepare() -> None:
    """Import structlog now, so that the first line about a problem does not wait for that."""
    from rebalanser.runtime import log_lines  # noqa: F401, PLC0415


_fact_log: Final = get_logger(FACTS)


def log_fact(fact: Fact, group: str) -> None:
    """Log what happened on a node, with its kind as ``action``, at the level of ``LEVELS``.

    Kinds in ``LOGGED_WHERE_IT_HAPPENS`` are in the log already.
    """
    level = LEVELS[fact.kind]
    if fact.kind in LOGGED_WHERE_IT_HAPPENS or not _facts.isEnabledFor(level):
        return
    known = {
        "resource": fact.resource,
        "token": fact.token,
        "revision": fact.revision,
        "load": fact.value if fact.kind is FactKind.LOAD_REPORTED else None,
        "took_s": fact.value if fact.kind is FactKind.LOOP_SLOW else None,
        "keys": fact.value if fact.kind is FactKind.UNREADABLE else None,
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
    _fact_log.log(level, _SENTENCES.get(fact.kind) or fact.kind.value.replace("_", " "), **fields)


def log_aside(event: str, error: BaseException, **fields: Any) -> None:
    """Log an error in another thread, and wait at most ``LOG_ASIDE_S`` for that.

    For threads that end access: neither a log that blocks nor one that raises stops them. If no thread can be
    started, it writes a line to standard error instead, or nothing while the interpreter ends.
    """

    def log() -> None:
        with contextlib.suppress(Exception):
            get_logger().error(event, exc_info=error, **fields)

    thread = threading.Thread(target=log, name="rebalanser-log", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            write_default_line(f"ERROR rebalanser: {event}: {redact(repr(error))}")
        return
    thread.join(LOG_ASIDE_S)


class DefaultHandler(logging.Handler):
    """Shows warnings and errors on standard error until the host application has configured logging.

    Python's own handler of last resort would show tracebacks too. A record is left to the host application if
    another handler gets it, if a logger on its way has ``propagate`` off, or if ``logging.lastResort`` is
    None. A line that standard error can't take at once is dropped, so that no thread waits for its reader.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line for a record that no other handler gets; raise nothing."""
        with contextlib.suppress(Exception):
            if not _is_handled_by_host(record.name):
                write_default_line(_line_of(record))


def _is_handled_by_host(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, DefaultHandler) for handler in logger.handlers):
            return True
        if not logger.propagate:
            return True
        logger = logger.parent
    return logging.lastResort is None


def is_unconfigured() -> bool:
    """Return True if the host application has configured no handler or level that applies to facts."""
    untouched = _facts.getEffectiveLevel() == logging.WARNING and _facts.isEnabledFor(logging.WARNING)
    return untouched and not _is_handled_by_host(FACTS)


def write_default_line(text: str) -> None:
    """Write a line to standard error, unless that would block; raise nothing."""
    with contextlib.suppress(Exception):
        stream = sys.stderr
        if _can_write(stream):
            line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
            stream.write(f"{_fitting(line, stream)}\n")
            stream.flush()


def _fitting(line: str, stream: TextIO) -> str:
    """Return the start of a line that the stream can write at once."""
    line = line[:LONGEST_LINE_CHARS]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    errors = getattr(stream, "errors", None) or "strict"
    if len(line.encode(encoding, errors)) < PIPE_BYTES:
        return line
    return line[: PIPE_BYTES // MOST_BYTES_PER_CHAR - 1]


def _can_write(stream: TextIO) -> bool:
    """Return True if a line can be written without blocking, as always without a file descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))


def _line_of(record: logging.LogRecord) -> str:
    """Return a record as one line: level, logger, text, fields and the exception without its traceback."""
    from rebalanser.runtime.log_lines import error_in, logfmt, one_line, place_in  # noqa: PLC0415 - slow

    fields = getattr(record, "fields", None)
    shown: dict[str, object] = {}
    if fields is None:
        text = one_line(redact(record.getMessage()))
        error, raised_at = error_in(record.exc_info), place_in(record.exc_info)
        if action := getattr(record, "action", None):
            shown["action"] = action
    else:
        text = record.getMessage().partition("\n")[0]
        error, raised_at = getattr(record, "error", None), getattr(record, "raised_at", None)
    if error is not None and "error" not in (fields or {}):
        shown["error"] = one_line(redact(error))
    if raised_at is not None:
        shown["raised_at"] = one_line(redact(raised_at))
    return f"{record.levelname} {record.name}: {text} {logfmt(shown)}".rstrip()


logging.getLogger(ROOT).addHandler(DefaultHandler())


class _CliHandler(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, so that it can be redirected."""

    def __init__(self, json: bool) -> None:
        super().__init__(sys.stderr)
        self._json = json

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; the first one creates the formatter."""
        if self.formatter is None:
            from rebalanser.runtime.log_lines import cli_formatter  # noqa: PLC0415 - slow to import

            self.formatter = cli_formatter(self._json)
        return super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_cli_logging(json: bool, verbose: int) -> None:
    """Show the logs on standard error; for the command line, which owns its process.

    ``verbose`` 0 shows warnings and errors, 1 everything but details, and 2 details too. With ``json`` each
    line is an object. A second call replaces the first.
    """
    handler = _CliHandler(json)
    root = logging.getLogger(ROOT)
    for old in [handler for handler in root.handlers if isinstance(handler, _CliHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))
    root.propagate = False
