"""Options of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(ge=0)]


class Options(BaseModel):
    """Options of an audit.

    Raises:
        pydantic.ValidationError: a value is invalid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    clock_error_s: Seconds = 0.5
    """Maximum difference between the wall clocks of two hosts (AU-5). Larger proven differences are added."""
    unowned_limit_s: Seconds = 60.0
    """Maximum seconds that a resource may be unowned between two owners without a finding (RB-2)."""
    since: float | None = None
    """Unix time: findings that ended earlier are left out, and metrics begin here."""
    until: float | None = None
    """Unix time: later records are ignored."""
    load_half_life_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds after which a reported load counts half (AU-7)."""
    crowded: Annotated[int, Field(ge=2)] | None = 50_000
    """Number of accesses from which those of one resource are spread over several tasks, None for never."""

    @model_validator(mode="after")
    def _since_is_before_until(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("since must be before until")
        return self


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Upper bounds of the report; all beyond them is counted and reported. No more than this leaves Spark."""

    findings: int = 200
    """Maximum findings shown, the worst first."""
    open_findings: int = 5
    """Findings whose details show without a click."""
    listed_findings: int = 25
    """Findings above the fold that holds the others."""
    parties: int = 6
    witnesses: int = 20
    timeline_resources: int = 60
    bars: int = 2_000
    """Maximum bars of the timeline, of all its resources together."""
    heat_columns: int = 60
    rebalances: int = 120
    worst: int = 30
    """Maximum resources, handlers and the like in a list of the worst."""
    groups: int = 6
    """Maximum groups with a balance of their own."""
    terms: int = 200
    clocks: int = 50
    gaps: int = 50
    reasons: int = 20
    """Maximum reasons of quarantine, and maximum examples of it."""
    colours: int = 21
    """Maximum nodes with a colour of their own."""
