"""One self-contained HTML page: the content in words and tables, the plots, and plotly's script once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped,unused-ignore]
from plotly.utils import PlotlyJSONEncoder  # type: ignore[import-untyped,unused-ignore]

from rebalanser.audit.report import words
from rebalanser.audit.weights import LEAST_WEIGHT, MOST_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rebalanser.audit.report.content import ReportContent
    from rebalanser.audit.report.figures import Figure

SECTIONS: Final = (
    ("findings", "Findings"),
    ("unread", "Unreadable and missing records"),
    ("timeline", "Owners over time"),
    ("rebalances", "Rebalances"),
    ("unavailability", "Unowned time"),
    ("moves", "Moves"),
    ("balance", "Balance"),
    ("handlers", "Handlers"),
    ("loads", "Loads and weights"),
    ("leaders", "Leaders"),
    ("clocks", "Clocks"),
)
"""The sections in their order, each with its anchor and title."""


def render(content: ReportContent, figures: Sequence[Figure]) -> str:
    """The report as HTML. Every name is escaped; nothing is loaded when it is opened."""
    environment = Environment(
        loader=PackageLoader("rebalanser.audit.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=words.number,
        real=words.real,
        duration=words.duration,
        moment=words.moment,
        kind=lambda kind: words.KIND_NAMES.get(kind, kind),
        place=_place,
        shown=_shown,
    )
    numbered = list(enumerate(figures))
    return environment.get_template("report.html.j2").render(
        content=content,
        summary=content.summary,
        sections=SECTIONS,
        state=_state(content),
        verdict=[line.strip() for line in content.verdict.splitlines() if line.strip()],
        figures={
            section: [each for each in numbered if each[1].section == section] for section, _ in SECTIONS
        },
        plots=_json([figure.plot for figure in figures]),
        plotly=Markup(get_plotlyjs()),  # noqa: S704 - plotly's own script
        bounds=(LEAST_WEIGHT, MOST_WEIGHT),
        plural=words.plural,
        percent=words.percent,
        period=words.period,
    )


def _state(content: ReportContent) -> str:
    """Style of the verdict: something is refuted, something is unsure, or neither."""
    if content.findings.certain_unfenced:
        return "certain"
    unsure = content.findings.possible or content.unread.doubtful or content.unread.missing
    return "possible" if unsure or not content.summary.records else "clean"


def _place(witness: dict[str, Any]) -> str:
    """Location of a record: ``file:line`` or ``topic/partition@offset``."""
    source, position = witness["source"], witness["position"]
    if source is None:
        return words.NONE
    if position is None:
        return str(source)
    is_file = "://" in source or source.startswith(("/", "file:")) or "." in source.rpartition("/")[2]
    return f"{source}{':' if is_file else '@'}{position}"


def _shown(value: Any) -> str:
    """A value of a table's cell."""
    return words.NONE if value is None or value == "" else str(value)


def _json(value: Any) -> Markup:
    """JSON that is safe in a script element, whatever the names in it."""
    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"), allow_nan=False)
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(character, code)
    return Markup(text)  # noqa: S704 - escaped just above
