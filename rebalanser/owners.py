"""A cache of who owns what in a group, for those that send requests to owners."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType, TracebackType
from typing import Final, Self

from rebalanser.admin import Admin, Changes, Owner
from rebalanser.errors import InvalidArgument
from rebalanser.group import check_takes_one
from rebalanser.redaction import redact
from rebalanser.registry.urls import url_or_default
from rebalanser.runtime.logs import get_logger
from rebalanser.settings import Settings

CLOSE_TIMEOUT_S: Final = 5.0
_log = get_logger()


@dataclass(frozen=True, slots=True)
class OwnerChange:
    """A resource that has another owner, or another token, than before; None stands for nobody."""

    resource: str
    """The resource's name."""
    before: Owner | None
    """The owner before; None if nobody owned it."""
    after: Owner | None
    """The owner now; None if nobody owns it."""


ChangeHook = Callable[[OwnerChange], None]


class Owners:
    """Owners of all resources of the group ``name``, kept current by watches while its context lasts.

    It joins nothing, and waits for a group that is not there yet. An answer may be old by the time it is
    used, so the receiver of a request says whether it is the owner (``rebalanser.Owned.still_mine``), and
    the fencing token guards what is written. A change costs as much as it is large. All owners are read at
    first, every ``interval_s`` seconds, and when a watch lost some changes.

    Raises:
        InvalidArgument: ``interval_s`` is not above 0.
        FixConfiguration: the name, the URL or the registry has to be changed by a person.
        RetryLater: the registry did not answer in time.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        interval_s: float = 5.0,
    ) -> None:
        given: object = interval_s
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < inf:
            raise InvalidArgument(f"interval_s is {interval_s!r}: give seconds above 0")
        self._connect: Callable[[], Admin] = partial(
            Admin, name, url, settings=settings, timeout_s=interval_s
        )
        self._url = url
        self._interval_s = interval_s
        self._hooks: list[ChangeHook] = []
        self._owners: Mapping[str, Owner] = MappingProxyType({})
        self._exists: bool | None = None
        """Result of the last read; None if it failed, or before the first."""
        self._closed = threading.Event()
        self._closed.set()
        self._end = contextlib.ExitStack()

    def on_change(self, hook: ChangeHook) -> ChangeHook:
        """Register a hook for every change of an owner, from the first look on.

        It is called in a thread of its own, in which the next look waits for it; what it raises is logged.

        Raises:
            InvalidHandlers: it can't be called with one change.
        """
        check_takes_one(hook, "on_change", "a change")
        self._hooks.append(hook)
        return hook

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as end:
            admin = end.enter_context(self._connect())
            changed = end.enter_context(admin.changes())
            closed = self._closed = threading.Event()
            end.callback(closed.set)
            first = self._look(admin, self._all(admin, changed))
            name = f"rebalanser-owners-{admin.name}"
            thread = threading.Thread(
                target=self._follow, args=(admin, changed, closed, first), name=name, daemon=True
            )
            thread.start()
            end.callback(thread.join, CLOSE_TIMEOUT_S)
            end.callback(changed.set)
            end.callback(closed.set)
            self._end = end.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.close()

    @property
    def all(self) -> Mapping[str, Owner]:
        """The owners of all resources that have one, by resource."""
        return self._owners

    def get(self, resource: str) -> Owner | None:
        """The owner of a resource, or None where nobody owns it."""
        return self._owners.get(resource)

    @property
    def is_current(self) -> bool:
        """True if the context lasts, and the last look could read the registry and found the group."""
        return self._exists is True and not self._closed.is_set()

    def _follow(
        self, admin: Admin, changed: Changes, closed: threading.Event, first: list[OwnerChange]
    ) -> None:
        due_at = time.monotonic() + self._interval_s
        self._notify(first)
        while True:
            changed.wait(max(0.0, due_at - time.monotonic()))
            if closed.is_set():
                return
            try:
                is_whole = self._exists is None or time.monotonic() >= due_at
                found = None if is_whole else changed.owners(self._owners)
                if found is None:
                    found = self._all(admin, changed)
                    due_at = time.monotonic() + self._interval_s
                self._notify(self._look(admin, found))
            except Exception as error:
                due_at = time.monotonic() + self._interval_s
                if closed.is_set():
                    return
                known, self._exists = self._exists, None
                if known is not None:
                    self._warn("owners may be out of date", action="owners_stale", exc_info=error)

    def _all(self, admin: Admin, changed: Changes) -> dict[str, Owner | None]:
        """Read the owners of all resources, those too that have none any more."""
        changed.clear()
        return {**dict.fromkeys(self._owners), **admin.owners()}

    def _look(self, admin: Admin, found: Mapping[str, Owner | None]) -> list[OwnerChange]:
        """Take over the owners that were read, and return what changed."""
        before = self._owners
        differing = {
            resource: owner for resource, owner in sorted(found.items()) if before.get(resource) != owner
        }
        if differing:
            merged = {**before, **differing}
            now = {resource: owner for resource, owner in merged.items() if owner is not None}
            self._owners = MappingProxyType(now)
        exists = bool(self._owners) or admin.exists()
        if not exists and self._exists is not False:
            registry = redact(url_or_default(self._url))
            self._warn(
                "there is no such group yet", action="owners_unknown", group=admin.name, registry=registry
            )
        self._exists = exists
        return [OwnerChange(resource, before.get(resource), owner) for resource, owner in differing.items()]

    def _notify(self, changes: list[OwnerChange]) -> None:
        """Call the hooks; whatever one raises, ``sys.exit()`` too, the thread goes on."""
        for change in changes:
            for hook in self._hooks:
                try:
                    hook(change)
                except BaseException as error:
                    self._warn(
                        "a hook raised", action="hook_failed", resource=change.resource, exc_info=error
                    )

    def _warn(self, event: str, **fields: object) -> None:
        with contextlib.suppress(Exception):  # a log that raises must not end the thread
            _log.warning(event, **fields)
