"""What can go wrong, by name."""

from __future__ import annotations

from enum import StrEnum


class FaultKind(StrEnum):
    """A kind of fault; the value is how a trace and a soak's summary call it."""

    REQUEST_LOST = "request lost"
    REPLY_LOST = "reply lost"
    REQUEST_LATE = "request late"
    """It takes effect after its sender has given up."""
    REQUEST_DOUBLED = "request doubled"
    """Its reply is lost, and it takes effect a second time later."""
    REQUEST_REFUSED = "request refused"
    REPLY_SLOW = "reply slow"
    RENEWED_IN_VAIN = "renewed in vain"
    """A leader of the registry that was deposed answers a keep-alive, which renews nothing."""
    NOT_RENEWED = "not renewed"
    """A keep-alive of a living lease is answered with "no such lease"."""
    WATCH_LOST = "watch lost"
    """The stream breaks; it comes back with ``HistoryLost``."""
    WATCH_SLOW = "watch slow"
    WATCH_SILENT = "watch silent"
    """Events are dropped without a word, which no registry may do: heartbeats must make it good."""
    LEADING_REFUSED = "leading refused"
    """For a while the registry refuses what a leader reads and publishes, and nothing else."""
    PLAN_OVERTAKEN = "plan overtaken"
    """A leader's plan takes effect late, when the leader is already at work on the next one."""
    PARTITION = "partition"
    OUTAGE = "outage"
    CRASH = "crash"
    KILLED_BY_GUARD = "killed by guard"
    """Not injected: the dead man's switch did its work."""
    PAUSE_SHORT = "short pause"
    """Within the safety margin: nothing may go wrong, not even without fencing."""
    PAUSE_LONG = "long pause"
    """Longer than the lease."""
    PAUSE_AT_ENTRY = "pause at entry"
    """Between the check of the clock and the entering of OnStart."""
    DRIFT_WITHIN = "drift within bound"
    DRIFT_BEYOND = "drift beyond bound"
    REGISTRY_RESTART = "registry restart"
    COMPACTION = "compaction"
    LEASES_LATE = "leases end late"
    LEASE_REVOKED = "lease revoked"
    """By an operator, soon after its node has joined, and while that holds nothing."""
    RESOURCES_ADDED = "resources added"
    RESOURCES_REMOVED = "resources removed"
    RESOURCES_READDED = "resources removed and added"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESOURCES_WEIGHED = "resources weighed"
    RESOURCES_DESCRIBED = "resources described"
    """Their weights, needs or spreads change."""
    POLICY = "policy"
    PIN = "pin"
    RELEASE = "release"
    """An application gives up what it owns, or takes back what it gave up."""
    GRACEFUL_STOP = "graceful stop"
    STOPPED_UNBEGUN = "stopped before it took part"
    HANDLER_SLOW = "handler slow"
    HANDLER_OVERRUN = "handler overran"
    HANDLER_HUNG = "handler never returned"
    START_RAISES = "OnStart raised"
    STOP_RAISES = "OnStop raised"


RENEWAL_FAULTS = (FaultKind.RENEWED_IN_VAIN, FaultKind.NOT_RENEWED)
"""The faults that concern one keep-alive."""

REQUEST_FAULTS = (
    FaultKind.REQUEST_LOST,
    FaultKind.REPLY_LOST,
    FaultKind.REQUEST_LATE,
    FaultKind.REQUEST_DOUBLED,
    FaultKind.REQUEST_REFUSED,
    FaultKind.REPLY_SLOW,
    *RENEWAL_FAULTS,
)
"""The faults that concern one request."""

HANDLER_FAULTS = (
    FaultKind.HANDLER_SLOW,
    FaultKind.HANDLER_OVERRUN,
    FaultKind.HANDLER_HUNG,
    FaultKind.START_RAISES,
    FaultKind.STOP_RAISES,
)
"""The faults that concern one call of a handler."""
