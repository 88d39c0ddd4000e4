"""Forks: what must happen before a process is forked, and what a child may not use of its parent's.

A child of ``os.fork`` (``multiprocessing``, gunicorn with ``--preload``) has copies of its parent's objects,
and none of its threads. A lock that another thread held is never released there. So everything that has
threads, locks or connections registers a hook with ``in_child``, which makes it new or refuses it.

SQLite keeps the locks of all connections to a file in one table of the process, which a child inherits while
the locks themselves stay with the parent: a connection that the child opens would work without locks. So
connections are closed by a hook of ``before_fork``, and opened again at their next use. Whoever uses them
does so within ``postponed``: a fork waits ``WAIT_S`` seconds for that. If it was in vain the
connections stay open, and the child refuses the files (``refuse_inherited``).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, Final

from rebalanser.errors import Forked

WAIT_S: Final = 2.0
"""Maximum seconds that a fork waits for other threads."""


class _Depth(threading.local):
    """Depth of a thread's nested uses of ``postponed``."""

    depth = 0


class _Postponed:
    """A context manager within which no thread forks this process. Reentrant."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the threads of the parent."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._own = _Depth()
        self._inside = 0
        self._forking = 0

    def __enter__(self) -> None:
        own = self._own
        if own.depth:
            own.depth += 1
            return
        try:
            with self._lock:
                while self._forking:
                    self._changed.wait()
                self._inside += 1
                own.depth = 1
        except BaseException:  # it was interrupted, perhaps once it was in
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        own = self._own
        if not own.depth:  # a child that was forked within
            return
        own.depth -= 1
        if not own.depth:
            with self._lock:
                self._inside -= 1
                if self._forking:
                    self._changed.notify_all()

    def close(self) -> bool:
        """Let no thread in, and wait for those inside; True if there are none."""
        own = 1 if self._own.depth else 0
        with self._lock:
            self._forking += 1
            self._changed.wait_for(lambda: self._inside <= own, WAIT_S)
            return not self._inside

    def open(self) -> None:
        """Let threads in, once no other thread forks."""
        with self._lock:
            self._forking -= 1
            self._changed.notify_all()


class _Hooks:
    """Methods to call, each as long as its object lives."""

    def __init__(self) -> None:
        self._methods: dict[weakref.ref[object], Callable[[Any], None]] = {}

    def add(self, method: Callable[[], None]) -> None:
        """Add a bound method, one for each object."""
        assert isinstance(method, MethodType)
        self._methods[weakref.ref(method.__self__, self._forget)] = method.__func__

    def call(self) -> None:
        """Call all; one that raises keeps no other from being called."""
        failed: Exception | None = None
        for reference, method in list(self._methods.items()):
            owner = reference()
            try:
                if owner is not None:
                    method(owner)
            except Exception as error:  # the first is reported by the interpreter
                failed = failed or error
        if failed is not None:
            raise failed

    def _forget(self, reference: weakref.ref[object]) -> None:
        self._methods.pop(reference, None)


postponed: Final = _Postponed()
"""Context manager: no thread forks this process meanwhile, or its child refuses the files that are in use."""
_before: Final = _Hooks()
_in_child: Final = _Hooks()
_inherited: Final[dict[Path, list[object]]] = {}
"""Files that were open when this process was forked, and what must not be closed as long as it lives."""


def before_fork(method: Callable[[], None]) -> None:
    """Call a bound method before each fork, while no thread is within ``postponed``."""
    _before.add(method)


def in_child(method: Callable[[], None]) -> None:
    """Call a bound method in each forked child, in its one thread. It must not take inherited locks."""
    _in_child.add(method)


def keep_inherited(path: Path, *kept: object) -> None:
    """Refuse a file from now on, and never close what the parent has opened of it."""
    _inherited.setdefault(path.resolve(), []).extend(kept)


def refuse_inherited(path: Path) -> None:
    """Refuse a file whose locks this process would share with its parent.

    Raises:
        Forked: the parent was using the file when it was forked.
    """
    if path.resolve() in _inherited:
        raise Forked(
            f"the parent of this process had {path} open when it was forked, as a thread was busy with it "
            f"for {WAIT_S:g} s, or as the fork was not made by Python: open the file after the fork only"
        )


def _close_before() -> None:
    if postponed.close():
        _before.call()


def _begin_in_child() -> None:
    postponed.begin_anew()
    _in_child.call()


os.register_at_fork(before=_close_before, after_in_parent=postponed.open, after_in_child=_begin_in_child)
