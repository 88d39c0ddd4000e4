"""What an audit may be told."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(ge=0)]


class Options(BaseModel):
    """How to judge a history.

    Raises:
        pydantic.ValidationError: a value makes no sense.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    clock_error_s: Seconds = 0.5
    """How far wall clocks of two hosts may lie apart (AU-5). What is proven to be further apart adds up."""
    unowned_limit_s: Seconds = 60.0
    """For how long a resource may be unowned between two owners before that is a finding (RB-2)."""
    since: float | None = None
    """Seconds since 1970: findings that ended before are left out, and metrics begin there."""
    until: float | None = None
    """Seconds since 1970: records of later times are not looked at."""
    load_half_life_s: Annotated[float, Field(gt=0)] = 3600.0
    """After how long a reported load counts half (AU-7)."""
    crowded: Annotated[int, Field(ge=2)] | None = 50_000
    """From how many accesses on the accesses of one resource are spread over several tasks, None for any."""

    @model_validator(mode="after")
    def _since_is_before_until(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("since is not before until: there is no time between them to look at")
        return self
