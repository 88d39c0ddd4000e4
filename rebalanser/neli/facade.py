"""``Neli``: gives a host application the roles that it leads."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias, TypeVar

from rebalanser.core.neli.messages import CallFenced, CallInduced, CallLapsed, Fact
from rebalanser.core.neli.roles import Role, Roles, numbered
from rebalanser.core.neli.settings import GroupProtocol, Mode, NeliSettings, check
from rebalanser.errors import (
    InvalidHandlers,
    InvalidName,
    InvalidSettings,
    InvalidState,
    InvalidUrl,
    NotSettled,
)
from rebalanser.neli.contract import PARTITIONS, Call, Candidacy, Candidate, open_elections
from rebalanser.neli.facts import FactReporter
from rebalanser.neli.history import LeadershipHistory
from rebalanser.registry.keys import check_name
from rebalanser.registry.urls import KAFKA_VARIABLE
from rebalanser.runtime.handlers import name_of
from rebalanser.runtime.participant import run_until_stopped

CONNECT_TIMEOUT_S: Final = 10.0

RoleHandler: TypeAlias = Callable[[Role, int], None]
"""Called with a role and the fencing token of its leadership."""
HandlerT = TypeVar("HandlerT", bound=RoleHandler)
_Name = TypeVar("_Name", Mode, GroupProtocol)
FactHook: TypeAlias = Callable[[Fact], None]
_CallKind: TypeAlias = type[CallInduced] | type[CallLapsed] | type[CallFenced]
_NAMES: Final[dict[_CallKind, str]] = {
    CallInduced: "on_induced",
    CallLapsed: "on_lapsed",
    CallFenced: "on_fenced",
}


def check_takes_role(handler: object, what: str) -> None:
    """Check that a handler can be called with a role and a token, where its signature tells.

    Raises:
        InvalidHandlers: it can't.
    """
    if not callable(handler):
        raise InvalidHandlers(f"{handler!r} is no function")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InvalidHandlers(
            f"{what} is called with a role and a fencing token, and {name_of(handler)} can't be: {error}"
        ) from None


class Neli:
    """One process's part in a NELI group: it knows at any moment which roles it leads.

    ``topic`` and ``group`` name the group, ``roles`` the roles that this process knows of, by name, by
    number, or as a mapping of names to numbers; processes may know different ones. ``kafka`` is
    ``HOST:PORT,…`` or a
    ``kafka://`` URL with security settings, else the environment variable ``REBALANSER_KAFKA``. ``mode`` and
    ``settings`` say what a leader can count on and how fast; ``partitions`` is used only where the topic is
    missing. ``instance`` names this process for the coordinator across restarts (``group.instance.id``): a
    restart within the session timeout then moves nothing, and stopping hands nothing over before it is past.
    ``history_dir`` is a folder to which the process appends what it led and when, as JSON lines, and
    ``history_topic`` a topic for the same records, ``kafka://HOST:PORT/TOPIC``; else what the environment
    variables ``REBALANSER_HISTORY_DIR`` and ``REBALANSER_HISTORY_TOPIC`` say.

    Every method may be called from any thread.

    Raises:
        InvalidSettings: the settings contradict the mode; the message has the numbers (NE-11).
        InvalidUrl: no address is given.
        InvalidName: ``topic`` names no topic, or ``group`` no group.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        roles: Roles,
        *,
        kafka: str | None = None,
        mode: Mode | str | None = None,
        settings: NeliSettings | None = None,
        partitions: int = PARTITIONS,
        instance: str | None = None,
        history_dir: Path | str | None = None,
        history_topic: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        address = kafka if kafka is not None else os.environ.get(KAFKA_VARIABLE)
        if not address:
            raise InvalidUrl(f"no Kafka address: give kafka=HOST:PORT or set {KAFKA_VARIABLE}")
        if not isinstance(topic, str):
            raise InvalidName(f"a topic name is text, not {type(topic).__name__}")
        check_name(group, "consumer group")
        if isinstance(partitions, bool) or not isinstance(partitions, int):
            raise InvalidSettings(f"partitions is {partitions!r}: give a whole number")
        if partitions < 1:
            raise InvalidSettings(f"a topic of {partitions} partitions holds no role")
        if not isinstance(settings, NeliSettings | None):
            raise InvalidSettings(
                f"settings must be rebalanser.neli.NeliSettings(…), not {type(settings).__name__}"
            )
        chosen = _with_mode(settings or NeliSettings(), mode)
        check(chosen)
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._candidacy = Candidacy(topic, group, numbered(roles), chosen, partitions, instance)
        self._handlers: dict[_CallKind, RoleHandler] = {}
        self._hooks: list[FactHook] = []
        self._candidate: Candidate | None = None
        self._reporter: FactReporter | None = None
        self._history_dir = history_dir
        self._history_topic = history_topic
        self._history: LeadershipHistory | None = None
        self._started = threading.Event()
        self._calling = threading.local()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topic!r}, {self.group!r}, mode={self.settings.mode.value!r})"

    @property
    def topic(self) -> str:
        """The topic of the group's heartbeats."""
        return self._candidacy.topic

    @property
    def group(self) -> str:
        """The consumer group's id."""
        return self._candidacy.group

    @property
    def settings(self) -> NeliSettings:
        """The mode and the times."""
        return self._candidacy.settings

    def on_induced(self, handler: HandlerT) -> HandlerT:
        """Register a handler that is called when this process begins to lead a role."""
        return self._register(CallInduced, handler)

    def on_lapsed(self, handler: HandlerT) -> HandlerT:
        """Register a handler for an orderly handover of a role: it ends the role's work, then returns.

        No other process leads the role until then, for ``lapse_limit_s`` at most; ``is_leader`` is False
        already.
        """
        return self._register(CallLapsed, handler)

    def on_fenced(self, handler: HandlerT) -> HandlerT:
        """Register a handler for a leadership that ended out of order: another process may lead the role
        already."""
        return self._register(CallFenced, handler)

    def on_fact(self, hook: FactHook) -> FactHook:
        """Register a hook that is called with each fact, for metrics, in a thread of its own."""
        self._hooks.append(hook)
        return hook

    def _register(self, kind: _CallKind, handler: HandlerT) -> HandlerT:
        if kind in self._handlers:
            raise InvalidHandlers(f"{_NAMES[kind]} is registered already")
        if inspect.iscoroutinefunction(handler):
            raise InvalidHandlers(f"{name_of(handler)} is a coroutine function: use AsyncNeli")
        check_takes_role(handler, _NAMES[kind])
        if self._candidate is not None:
            raise InvalidState("handlers must be registered before the start")
        self._handlers[kind] = handler
        return handler

    def start(self) -> None:
        """Begin to take part; return once the topic was checked and the process is joining the group.

        Raises:
            InvalidState: it takes part already.
            FixConfiguration: a person has to change the topic, the group or the settings.
            RegistryUnavailable: no broker answered within ``connect_timeout_s``.
        """
        if self._candidate is not None:
            if not self._has_ended(self._candidate):
                raise InvalidState(f"{self!r} takes part already")
            self._clean_up()
        elections = open_elections(self._address, self._connect_timeout_s)
        self._history = LeadershipHistory.opened(self._candidacy, self._history_dir, self._history_topic)
        self._reporter = FactReporter(self.group, self._hooks, self._history)
        self._started.clear()
        candidacy = self._candidacy
        try:
            self._candidate = elections.stand(candidacy, self._called, self._reporter.tell)
            if self._candidacy is not candidacy:
                self._candidate.set_roles(self._candidacy.roles)
        except BaseException:
            self._clean_up()
            raise
        if self._history is not None:
            self._history.begin(self._candidate.process)
        self._started.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """Hand over all roles, leave the group, and wait at most ``timeout_s`` seconds until that is done.

        Stopping twice does nothing.

        Raises:
            InvalidState: called from a handler, which would wait for itself.
            NotSettled: it was not done in time; it continues.
            RebalanserError: the error that had ended it before, such as a second process of one instance.
        """
        candidate = self._candidate
        if candidate is None:
            return
        if getattr(self._calling, "now", False):
            raise InvalidState("stop() was called from a handler; call request_stop() there")
        candidate.stop()
        try:
            ended = candidate.wait(timeout_s)
        except BaseException:
            self._clean_up()
            raise
        if not ended:
            raise NotSettled(f"{self!r} has not stopped within {timeout_s:g} s")
        self._clean_up()

    def request_stop(self) -> None:
        """Begin to hand over and leave; returns at once. May be called from handlers."""
        if self._candidate is not None:
            self._candidate.stop()

    def run(self) -> None:
        """Take part until SIGINT, SIGTERM or SIGHUP, or until ``request_stop``; then hand over and leave.

        A second SIGINT has its usual effect.

        Raises:
            InvalidState: not in the main thread, which alone gets signals.
            RebalanserError: an error of ``start`` or ``stop``.
        """
        run_until_stopped(self)

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until it no longer takes part, at most ``timeout_s`` seconds; True if it has ended.

        Raises:
            RebalanserError: the error that ended it, unless a stop did.
        """
        candidate = self._candidate
        return candidate is None or candidate.wait(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def is_leader(self, role: Role) -> bool:
        """True if this process leads ``role`` now, computed at the call, without I/O (NE-4).

        Time passes between the answer and the action: pass the token along if two processes must not act
        (NE-15).
        """
        candidate = self._candidate
        return candidate is not None and candidate.leads(role)

    def token(self, role: Role) -> int | None:
        """Return the fencing token of a role that is led now, greater than any former leader's; else None."""
        candidate = self._candidate
        return None if candidate is None else candidate.token(role)

    def roles_held(self) -> dict[Role, int]:
        """Return the roles led now, each with its fencing token."""
        candidate = self._candidate
        return {} if candidate is None else candidate.held()

    def why_not(self, role: Role) -> str | None:
        """Return the reason why this process does not lead ``role`` now, as a sentence; None if it does."""
        candidate = self._candidate
        return "it does not take part" if candidate is None else candidate.why_not(role)

    def wait_leader(self, role: Role, timeout_s: float = 30.0) -> bool:
        """Wait until this process leads ``role``, at most ``timeout_s`` seconds; True if it does.

        Its handler may be called a moment later, and is not called if the role is lost first.

        Raises:
            InvalidState: it does not take part.
        """
        if self._candidate is None:
            raise InvalidState(f"{self!r} has not been started")
        return self._candidate.wait_leader(role, timeout_s)

    def set_roles(self, roles: Roles) -> None:
        """Replace the roles, at any time; those that remain are not interrupted (NE-1).

        Raises:
            InvalidSettings: a role is neither a text nor a whole number.
        """
        self._candidacy = replace(self._candidacy, roles=numbered(roles))
        if self._candidate is not None:
            self._candidate.set_roles(self._candidacy.roles)

    def _called(self, call: Call) -> None:
        """Call the handler for each role; after all were called, raise the first error."""
        handler = self._handlers.get(type(call))
        if handler is None:
            return
        self._started.wait()  # a handler may ask, or stop, what start() has not returned yet
        errors: list[Exception] = []
        self._calling.now = True
        try:
            for role in sorted(call.roles, key=str):
                try:
                    handler(role, call.token)
                except Exception as error:
                    errors.append(error)
        finally:
            self._calling.now = False
        if errors:
            raise errors[0]

    def _has_ended(self, candidate: Candidate) -> bool:
        try:
            return candidate.wait(0)
        except Exception:
            return True

    def _clean_up(self) -> None:
        self._candidate = None
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
        if self._history is not None:
            self._history.close()
            self._history = None


def _with_mode(settings: NeliSettings, mode: Mode | str | None) -> NeliSettings:
    """Return the settings with this mode, if one is given; texts become members of their enums."""
    return replace(
        settings,
        mode=_member_of(Mode, settings.mode if mode is None else mode, "mode"),
        protocol=_member_of(GroupProtocol, settings.protocol, "group protocol"),
    )


def _member_of(names: type[_Name], given: str, what: str) -> _Name:
    try:
        return names(given)
    except ValueError:
        known = ", ".join(names)
        raise InvalidSettings(f"{given!r} is no {what}; known are {known}") from None
