"""Pauses of a queue and of its schedules, kept in the store (SK-23).

A paused queue hands out no claims: once the pause is stored, the store refuses every claim. Everything else
goes on: bodies run, renew and complete, tasks are enqueued and cancelled. An earlier claim whose body has not
begun is given back, and its try is not counted.

A paused schedule has no ticks. An ended pause is kept with both times: a tick between them is missed, on
every worker and however late it looks. A new pause keeps the times of earlier ones as long as a tick between
them could still be enqueued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rebalanser.core.tasks.ticking import CATCH_UP_S
from rebalanser.errors import InvalidArgument
from rebalanser.registry.keys import check_name
from rebalanser.tasks.context import Context
from rebalanser.tasks.functions import problems_of

MAX_CHARACTERS: Final = 1000
"""Maximum length of a reason, and of the name of the user who pauses."""
MAX_EARLIER: Final = 100
"""Maximum number of pauses of a schedule whose times a later one keeps."""
QUEUE: Final = ""
"""Name of the queue's own pause, among those of its schedules."""

PauseText = Annotated[str, Field(max_length=MAX_CHARACTERS)]


class Pause(BaseModel):
    """A pause of a queue or a schedule, with its time, author and reason."""

    model_config = ConfigDict(frozen=True)

    since: float = Field(description="Seconds since 1970, by the clock of the host that paused it.")
    by: PauseText = Field(description="Author of the pause.")
    reason: PauseText = ""
    ended: float | None = Field(
        default=None, description="Time at which it was resumed; null while it is paused."
    )
    earlier: tuple[tuple[float, float], ...] = Field(
        default=(),
        description="Begins and ends of earlier pauses of a schedule that ended in the minute before.",
    )

    @classmethod
    def of(cls, content: bytes) -> Pause:
        """Return the stored pause; one that this version can't read is in force too."""
        try:
            return cls.model_validate_json(content)
        except ValidationError:
            return cls(since=0.0, by="another version")

    def covers(self, tick: float) -> bool:
        """True if a tick at this time is missed."""
        return any(since <= tick <= ended for since, ended in self.times)

    @property
    def times(self) -> tuple[tuple[float, float], ...]:
        """Begins and ends of this one and those before it; one that is in force has no end."""
        return (*self.earlier, (self.since, math.inf if self.ended is None else self.ended))

    def describe(self, wall: float) -> str:
        """Describe the pause for people: its age, author and reason."""
        ago_s = max(0.0, wall - self.since)
        return f"paused for {ago_s:.0f} s by {self.by}" + (f": {self.reason}" if self.reason else "")


class Pauses(BaseModel):
    """The pauses of a queue and its schedules that are in force."""

    model_config = ConfigDict(frozen=True)

    queue: Pause | None = Field(
        default=None, description="The pause of the queue itself; null if it is not paused."
    )
    schedules: dict[str, Pause] = Field(default_factory=dict, description="Paused schedules by function.")

    @classmethod
    def of(cls, found: Mapping[str, Pause]) -> Pauses:
        """Select the pauses that have not ended."""
        present = {name: each for name, each in found.items() if each.ended is None}
        return cls(queue=present.pop(QUEUE, None), schedules=present)


def read_pauses(context: Context, timeout_s: float | None = None) -> Mapping[str, Pause]:
    """Read the pauses of a queue and its schedules, with the ended ones of schedules.

    It takes ``timeout_s`` seconds at most, or the queue's timeout.
    """
    found = context.engine.pauses(context.queue, context.timeout_s if timeout_s is None else timeout_s)
    return {name: Pause.of(content) for name, content in found.items()}


def pause(context: Context, schedule: str | None, by: str, reason: str) -> Pause:
    """Pause a schedule, or the queue if it is None; an existing pause stays as it is.

    Raises:
        InvalidArgument: the user's name or the reason is too long or not a text.
        InvalidName: the schedule's name can't be stored.
    """
    name = _name_of(schedule)
    present = read_pauses(context).get(name)
    if present is not None and present.ended is None:
        return present
    wall = context.clock.wall()
    before = () if present is None else present.times
    earlier = tuple((since, ended) for since, ended in before if ended >= wall - CATCH_UP_S)[-MAX_EARLIER:]
    try:
        made = Pause(since=wall, by=by, reason=reason, earlier=earlier)
    except ValidationError as error:
        raise InvalidArgument(problems_of(error)) from error
    context.engine.put_pause(context.queue, name, made.model_dump_json().encode(), context.timeout_s)
    return made


def resume(context: Context, schedule: str | None) -> Pause | None:
    """End the pause of a schedule, or of the queue if it is None; return it, or None if there is none."""
    name = _name_of(schedule)
    present = read_pauses(context).get(name)
    if present is None or present.ended is not None:
        return None
    ended = present.model_copy(update={"ended": max(present.since, context.clock.wall())})
    content = ended.model_dump_json().encode() if name else None
    context.engine.put_pause(context.queue, name, content, context.timeout_s)
    return ended


def _name_of(schedule: str | None) -> str:
    return QUEUE if schedule is None else check_name(schedule, "schedule")
