"""The report of an audit: one HTML file that opens anywhere, without a network, and stays readable (AU-8).

Spark reduces tables of any size to a ``ReportContent`` of bounded size (``report.aggregates``).
``report.figures`` draws its plots, and ``report.page`` makes a page of both. Omitted items are counted and
reported.
"""

from __future__ import annotations

from rebalanser.audit.options import ReportLimits
from rebalanser.audit.report.aggregates import gather
from rebalanser.audit.report.figures import draw
from rebalanser.audit.report.page import render
from rebalanser.audit.tables import Tables

__all__ = ["ReportLimits", "build"]


def build(tables: Tables, verdict: str, limits: ReportLimits | None = None) -> str:
    """Return the report of an audit's tables and its verdict in words, as HTML (AU-8).

    The tables are read several times: frames that are costly to compute should be cached or read from a file.
    No more than ``limits`` leaves Spark (AU-10). The text is readable without JavaScript; the plots need it.
    """
    content = gather(tables, verdict, limits or ReportLimits())
    return render(content, draw(content))
