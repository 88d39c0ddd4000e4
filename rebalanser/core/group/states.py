"""States of a node, and the tables of its transitions, from which the documentation's diagrams are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from rebalanser.core.transitions import Table


class Membership(StrEnum):
    """The stages of a node's life."""

    OUT = "out"
    JOINING = "joining"
    WITHDRAWING = "withdrawing"
    MEMBER = "member"
    LEAVING = "leaving"
    LAPSING = "lapsing"
    LOST = "lost"
    BACKOFF = "backoff"
    STOPPED = "stopped"


class Life(StrEnum):
    """The triggers that move a node through its life."""

    START = "start asked"
    STOP = "stop asked"
    JOINED = "registered"
    JOIN_FAILED = "registration failed"
    HANDLER_FAILED = "a handler raised"
    SESSION_LOST = "lease lost"
    LEFT = "left, to join again"
    LEFT_FOR_GOOD = "left for good"
    STUCK = "OnStop raised: barriers must stay until the lease ends"
    ELAPSED = "delay over"


class Role(StrEnum):
    """The roles of a node in its group."""

    NONE = "none"
    FOLLOWER = "follower"
    LEADER = "leader"


class Vote(StrEnum):
    """The triggers that move a node between roles."""

    ELECTED = "term incremented"
    FOLLOWS = "another leads"
    DEPOSED = "another term seen"
    SESSION_ENDED = "no longer a member"


class Step(StrEnum):
    """The four steps of a rebalance on one node (RB-11), and the rest between two rebalances."""

    SETTLED = "settled"
    STOPPING = "1 stopping"
    REMOVING = "2 removing barriers"
    ADDING = "3 adding barriers"
    STARTING = "4 starting"


_M, _L = Membership, Life
MEMBERSHIP: Table[Membership, Life] = Table(
    "membership",
    _M.OUT,
    {
        (_M.OUT, _L.START): _M.JOINING,
        (_M.OUT, _L.STOP): _M.STOPPED,
        (_M.JOINING, _L.JOINED): _M.MEMBER,
        (_M.JOINING, _L.JOIN_FAILED): _M.BACKOFF,
        (_M.JOINING, _L.STOP): _M.WITHDRAWING,
        (_M.WITHDRAWING, _L.JOINED): _M.LEAVING,
        (_M.WITHDRAWING, _L.JOIN_FAILED): _M.STOPPED,
        (_M.MEMBER, _L.STOP): _M.LEAVING,
        (_M.MEMBER, _L.HANDLER_FAILED): _M.LEAVING,
        (_M.MEMBER, _L.SESSION_LOST): _M.LOST,
        (_M.LEAVING, _L.LEFT): _M.BACKOFF,
        (_M.LEAVING, _L.LEFT_FOR_GOOD): _M.STOPPED,
        (_M.LEAVING, _L.STUCK): _M.LAPSING,
        (_M.LEAVING, _L.SESSION_LOST): _M.LOST,
        (_M.LAPSING, _L.SESSION_LOST): _M.LOST,
        (_M.LAPSING, _L.LEFT): _M.BACKOFF,
        (_M.LAPSING, _L.LEFT_FOR_GOOD): _M.STOPPED,
        (_M.LOST, _L.LEFT): _M.BACKOFF,
        (_M.LOST, _L.LEFT_FOR_GOOD): _M.STOPPED,
        (_M.BACKOFF, _L.ELAPSED): _M.JOINING,
        (_M.BACKOFF, _L.STOP): _M.STOPPED,
    },
)

_R, _V = Role, Vote
ROLE: Table[Role, Vote] = Table(
    "role",
    _R.NONE,
    {
        (_R.NONE, _V.ELECTED): _R.LEADER,
        (_R.NONE, _V.FOLLOWS): _R.FOLLOWER,
        (_R.FOLLOWER, _V.ELECTED): _R.LEADER,
        (_R.FOLLOWER, _V.FOLLOWS): _R.FOLLOWER,
        (_R.LEADER, _V.DEPOSED): _R.FOLLOWER,
        (_R.NONE, _V.SESSION_ENDED): _R.NONE,
        (_R.FOLLOWER, _V.SESSION_ENDED): _R.NONE,
        (_R.LEADER, _V.SESSION_ENDED): _R.NONE,
    },
)

STEPS: Mapping[Step, Mapping[Step, str]] = MappingProxyType(
    {
        Step.SETTLED: {
            Step.STOPPING: "something must be given up",
            Step.REMOVING: "a barrier is left over",
            Step.ADDING: "something arrives",
            Step.STARTING: "back in touch, barriers still held",
        },
        Step.STOPPING: {
            Step.REMOVING: "OnStop returned",
            Step.ADDING: "OnStop returned, back in touch, something still arrives",
            Step.STARTING: "OnStop returned, barriers still held",
            Step.SETTLED: "OnStop returned, nothing more to do",
        },
        Step.REMOVING: {
            Step.STOPPING: "aborted by a newer allocation",
            Step.ADDING: "removed",
            Step.STARTING: "removed, nothing to add",
            Step.SETTLED: "removed, nothing arrives",
        },
        Step.ADDING: {
            Step.STOPPING: "aborted by a newer allocation",
            Step.REMOVING: "aborted by a newer allocation",
            Step.STARTING: "added",
            Step.SETTLED: "aborted by a newer allocation",
        },
        Step.STARTING: {
            Step.STOPPING: "OnStart returned, a newer allocation waits",
            Step.REMOVING: "OnStart returned, a newer allocation waits",
            Step.ADDING: "OnStart returned for one batch",
            Step.SETTLED: "OnStart returned",
        },
    }
)
"""The steps that may follow each step, and why. 2 and 3 can be aborted; 1 and 4 run application code."""
