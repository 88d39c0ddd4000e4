"""The readable trace of a run: when, where, and a sentence that says what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TypeAlias

from rebalanser.registry.contract import (
    Absent,
    Created,
    Delete,
    Get,
    Grant,
    Guard,
    KeepAlive,
    Operation,
    Outcome,
    Put,
    Range,
    Reply,
    Request,
    Revoke,
    Stat,
    Transaction,
    Unchanged,
)

Write: TypeAlias = Callable[[str], None]


class Trace:
    """Writes a line for each thing that happens; without ``write`` it costs nothing."""

    def __init__(self, write: Write | None) -> None:
        self.write = write

    def __bool__(self) -> bool:
        return self.write is not None

    def line(self, now: float, where: str, sentence: str) -> None:
        """One line: true time in seconds, the host or ``registry`` or ``operator``, and the sentence."""
        if self.write is not None:
            self.write(f"{now:9.4f}  {where:<8}  {sentence}")


def listed(names: Iterable[object]) -> str:
    """Names in a sentence, in order; "nothing" where there is none."""
    return ", ".join(sorted(map(str, names))) or "nothing"


def text(value: object) -> str:
    """A value of the protocol, the same in every process: sets are sorted, defaults left out."""
    if is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        told = ", ".join(f"{name}={text(part)}" for name, part in named if part not in (None, (), {}, False))
        return f"{type(value).__name__}({told})"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(map(text, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text(key)}: {text(part)}' for key, part in value.items())}}}"
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def request_sentence(request: Request, prefix: str) -> str:
    """What a request asks for; ``prefix`` is left out of keys."""
    match request:
        case Transaction():
            return _transaction(request, prefix)
        case Grant(ttl_s=ttl_s):
            return f"grant a lease of {ttl_s:g} s"
        case KeepAlive(lease=lease):
            return f"keep lease {lease} alive"
        case Revoke(lease=lease):
            return f"revoke lease {lease}"


def _transaction(transaction: Transaction, prefix: str) -> str:
    then = ", ".join(_operation(operation, prefix) for operation in transaction.then) or "nothing"
    if not transaction.guards:
        return then
    return f"if {' and '.join(_guard(guard, prefix) for guard in transaction.guards)}: {then}"


def _guard(guard: Guard, prefix: str) -> str:
    key = guard.key.removeprefix(prefix)
    match guard:
        case Absent():
            return f"{key} is absent"
        case Created(revision=revision):
            return f"{key} was created at {revision}"
        case Unchanged(revision=revision):
            return f"{key} stands since {revision}"


def _operation(operation: Operation, prefix: str) -> str:
    match operation:
        case Put(key=key):
            return f"put {key.removeprefix(prefix)}"
        case Delete(key=key):
            return f"delete {key.removeprefix(prefix)}"
        case Get(key=key):
            return f"get {key.removeprefix(prefix)}"
        case Range(prefix=under, modified_after=revision):
            since = f" since {revision}" if revision else ""
            return f"read {under.removeprefix(prefix)}*{since}"
        case Stat(prefix=under):
            return f"count {under.removeprefix(prefix)}*"
        case Transaction():
            return f"({_transaction(operation, prefix)})"


def reply_sentence(reply: Reply | Exception) -> str:
    """What came of a request."""
    if isinstance(reply, Outcome):
        return f"{'done' if reply.succeeded else 'REFUSED'} at revision {reply.revision}"
    return text(reply) if is_dataclass(reply) else f"{type(reply).__name__}: {reply}"
