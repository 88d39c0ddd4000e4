"""The report of an audit: one HTML file that opens anywhere, without a network, and stays readable (AU-8).

Tables of any size become a ``Content`` of bounded size in Spark
(``report.aggregates``), that becomes plots (``report.figures``),
and both become a page (``report.page``). What is left out is counted and said.
"""

from __future__ import annotations

from rebalanser.audit.options import Limits
from rebalanser.audit.report.aggregates import gather
from rebalanser.audit.report.content import ReportInput
from rebalanser.audit.report.figures import draw
from rebalanser.audit.report.page import render

__all__ = ["Limits", "ReportInput", "build"]


def build(tables: ReportInput, limits: Limits | None = None) -> str:
    """The report as HTML (AU-8).

    No more leaves Spark than ``limits`` say (AU-10). The text is readable without JavaScript, the plots are
    drawn by it.
    """
    content = gather(tables, limits or Limits())
    return render(content, draw(content))
