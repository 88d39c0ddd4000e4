"""States of a partition on a member, as a table from which the documentation's diagram is drawn.

The state is what was reported to the handlers. It never decides if a role is led: that is computed from the
evidence at each request (NE-4), and the state follows at the next event or wake-up.
"""

from __future__ import annotations

from enum import StrEnum

from rebalanser.core.transitions import Table


class PartitionState(StrEnum):
    """State of a partition on this member."""

    FOREIGN = "foreign"
    """Not assigned to this process."""
    HELD = "held"
    """Assigned, and not led: the evidence is not there yet, or a predecessor must be waited out."""
    LED = "led"
    """Assigned and led; the handlers were called."""
    LAPSING = "lapsing"
    """Asked back: the handlers end their work while the revoke callback waits."""


class Turn(StrEnum):
    """Cause of a change from one state to another."""

    ASSIGNED = "assigned"
    INDUCED = "evidence complete, token confirmed, predecessor waited out"
    FENCED = "evidence too old"
    REVOKED = "asked back, or a stop asked"
    LET_GO = "work ended, released"
    LOST = "lost, or failed"


_S, _T = PartitionState, Turn
PARTITION: Table[PartitionState, Turn] = Table(
    "partition",
    _S.FOREIGN,
    {
        (_S.FOREIGN, _T.ASSIGNED): _S.HELD,
        (_S.HELD, _T.INDUCED): _S.LED,
        (_S.LED, _T.FENCED): _S.HELD,
        (_S.HELD, _T.REVOKED): _S.LAPSING,
        (_S.LED, _T.REVOKED): _S.LAPSING,
        (_S.LAPSING, _T.LET_GO): _S.FOREIGN,
        (_S.HELD, _T.LOST): _S.FOREIGN,
        (_S.LED, _T.LOST): _S.FOREIGN,
        (_S.LAPSING, _T.LOST): _S.FOREIGN,
    },
)
