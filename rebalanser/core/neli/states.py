"""What a partition is to a member, as a table: the documentation's diagram is drawn from it.

The state says what the handlers were told. Whether a role is led is never read from it: that is worked out
from the evidence when somebody asks (NE-4), and the state follows at the next event or wake-up.
"""

from __future__ import annotations

from enum import StrEnum

from rebalanser.core.group.states import Table


class Standing(StrEnum):
    """What a partition is to this member."""

    FOREIGN = "foreign"
    """Not assigned to this process."""
    HELD = "held"
    """Assigned, and not led: the evidence is not there yet, or a predecessor must be waited out."""
    LED = "led"
    """Assigned and led; the handlers were told."""
    LAPSING = "lapsing"
    """Asked back: the handlers end their work while the revoke callback waits."""


class Turn(StrEnum):
    """What moves a partition from one standing to another."""

    ASSIGNED = "assigned"
    INDUCED = "evidence complete, token confirmed, predecessor waited out"
    FENCED = "evidence too old"
    REVOKED = "asked back, or a stop asked"
    LET_GO = "work ended, released"
    LOST = "lost, or failed"


_S, _T = Standing, Turn
STANDING: Table[Standing, Turn] = Table(
    "standing",
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
