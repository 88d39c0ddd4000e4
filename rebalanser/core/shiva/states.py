"""States of an application in an assignment document, and the steps between them.

The leader checks its steps against these tables, and the documentation's diagram is drawn from them. Any
other step is a broken invariant.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rebalanser.core.shiva.types import ApplicationState
from rebalanser.errors import InternalError

_S = ApplicationState

APPLICATION_BEGINS: Final[Mapping[ApplicationState, str]] = MappingProxyType(
    {
        _S.WAITING: "start commanded",
        _S.REFUSED: "start commanded, and refused",
    }
)
"""States in which an application enters the document."""

APPLICATION_ENDS: Final[Mapping[ApplicationState, str]] = MappingProxyType(
    {_S.STOPPING: "nothing of it runs any more"}
)
"""States from which an application is removed from the document."""

APPLICATION_STEPS: Final[Mapping[ApplicationState, Mapping[ApplicationState, str]]] = MappingProxyType(
    {
        _S.WAITING: {
            _S.ASSIGNED: "a worker can take it",
            _S.MOVING: "a worker can take it, once its last one has stopped it, or others have left",
            _S.FAILED: "only workers where it failed are left",
            _S.FINISHED: "its last worker says that it finished",
            _S.STOPPING: "stop commanded",
        },
        _S.MOVING: {
            _S.ASSIGNED: "its last worker stopped it, is gone, or gets it back",
            _S.WAITING: "no worker can take it any more, or started anew",
            _S.FAILED: "only workers where it failed are left",
            _S.FINISHED: "its last worker says that it finished",
            _S.STOPPING: "stop commanded",
        },
        _S.ASSIGNED: {
            _S.RUNNING: "its worker says that it runs",
            _S.MOVING: "another worker is to take it",
            _S.WAITING: "failed there, its worker is gone, or none can take it",
            _S.FAILED: "only workers where it failed are left",
            _S.FINISHED: "its worker says that it finished",
            _S.STOPPING: "stop commanded",
        },
        _S.RUNNING: {
            _S.ASSIGNED: "its worker starts again or may not run it now, or started anew",
            _S.MOVING: "another worker is to take it",
            _S.WAITING: "failed there, its worker is gone, or none can take it",
            _S.FAILED: "only workers where it failed are left",
            _S.FINISHED: "its worker says that it finished",
            _S.STOPPING: "stop commanded",
        },
        _S.FINISHED: {
            _S.WAITING: "started anew",
            _S.STOPPING: "stop commanded",
        },
        _S.STOPPING: {
            _S.WAITING: "started anew",
            _S.REFUSED: "started anew, and refused",
        },
        _S.FAILED: {
            _S.ASSIGNED: "a worker that can take it joined",
            _S.MOVING: "a worker can take it, once its last one has stopped it, or others have left",
            _S.WAITING: "tried again, started anew, or the workers where it failed are gone",
            _S.FINISHED: "its last worker says that it finished",
            _S.STOPPING: "stop commanded",
        },
        _S.REFUSED: {
            _S.WAITING: "started anew",
            _S.STOPPING: "stop commanded",
        },
    }
)
"""The states that may follow each state, and why."""

TO_RUN: Final = frozenset({_S.WAITING, _S.MOVING, _S.ASSIGNED, _S.RUNNING, _S.FAILED})
"""States of applications that are to run: they are placed, and their files are needed."""


def check_step(before: ApplicationState | None, after: ApplicationState | None) -> None:
    """Refuse a step that the tables do not have; None stands for not being in the document.

    Raises:
        InternalError: an application cannot go from ``before`` to ``after``.
    """
    if before is after:
        return
    if before is None:
        allowed = after in APPLICATION_BEGINS
    elif after is None:
        allowed = before in APPLICATION_ENDS
    else:
        allowed = after in APPLICATION_STEPS[before]
    if not allowed:
        raise InternalError(f"application: {after!r} cannot follow {before!r}")
