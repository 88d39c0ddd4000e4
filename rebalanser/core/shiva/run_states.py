"""The transition table of one application on one worker, from which the documentation's diagram is drawn."""

from __future__ import annotations

from enum import StrEnum

from rebalanser.core.shiva.types import RunState
from rebalanser.core.transitions import Table


class RunTrigger(StrEnum):
    """Triggers of an application's steps on a worker."""

    START = "it may start"
    REFUSED = "its files were refused"
    STARTED = "its process runs, and passed its health check if it has one"
    UNHEALTHY = "its health check failed too often"
    STOP = "it may run no longer"
    ENDED = "its process ended as told"
    CRASHED = "its process ended by itself or was unhealthy, to be started again"
    DONE = "it has run to its end"
    GIVEN_UP = "its process ended by itself or was unhealthy once too often"
    ELAPSED = "delay over"


_S, _T = RunState, RunTrigger
RUN: Table[RunState, RunTrigger] = Table(
    "run",
    _S.PENDING,
    {
        (_S.PENDING, _T.START): _S.STARTING,
        (_S.PENDING, _T.REFUSED): _S.FAILED,
        (_S.STARTING, _T.STARTED): _S.RUNNING,
        (_S.STARTING, _T.STOP): _S.STOPPING,
        (_S.STARTING, _T.UNHEALTHY): _S.STOPPING,
        (_S.STARTING, _T.CRASHED): _S.BACKING_OFF,
        (_S.STARTING, _T.DONE): _S.FINISHED,
        (_S.STARTING, _T.GIVEN_UP): _S.FAILED,
        (_S.RUNNING, _T.STOP): _S.STOPPING,
        (_S.RUNNING, _T.UNHEALTHY): _S.STOPPING,
        (_S.RUNNING, _T.CRASHED): _S.BACKING_OFF,
        (_S.RUNNING, _T.DONE): _S.FINISHED,
        (_S.RUNNING, _T.GIVEN_UP): _S.FAILED,
        (_S.STOPPING, _T.STARTED): _S.STOPPING,
        (_S.STOPPING, _T.ENDED): _S.PENDING,
        (_S.STOPPING, _T.CRASHED): _S.BACKING_OFF,
        (_S.STOPPING, _T.GIVEN_UP): _S.FAILED,
        (_S.BACKING_OFF, _T.ELAPSED): _S.PENDING,
    },
)
"""A run that is FINISHED or FAILED, or has no process and is not assigned any more, is removed."""
