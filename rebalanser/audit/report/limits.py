"""How much a report shows at most, so that it stays readable and small whatever the history's size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; what is beyond them is counted and said. Nothing more than this leaves Spark."""

    findings: int = 200
    """Findings shown, the worst first."""
    open_findings: int = 5
    """Findings that show all that is known of them without a click."""
    listed_findings: int = 25
    """Findings above the fold that holds the others."""
    parties: int = 6
    witnesses: int = 20
    timeline_resources: int = 60
    bars: int = 2_000
    """Bars of the timeline, of all its resources together."""
    heat_columns: int = 60
    rebalances: int = 120
    worst: int = 30
    """Resources, handlers and the like in a list of the worst."""
    groups: int = 6
    """Groups with a balance of their own."""
    terms: int = 200
    clocks: int = 50
    gaps: int = 50
    reasons: int = 20
    """Reasons of quarantine, and examples of it."""
    colours: int = 21
    """Nodes with a colour of their own."""
