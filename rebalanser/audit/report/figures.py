"""The plots of a report, drawn by plotly from its bounded content.

A plot has no colours of its own for text, grid and background: the page's script sets those of the reader's
light or dark scheme. Names are escaped, because plotly takes some HTML for markup.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped,unused-ignore]

from rebalanser.audit.report.aggregates import HEAT_LEVELS, NEVER
from rebalanser.audit.report.content import Bar
from rebalanser.audit.report.words import duration, elided, moment, natural, number, period, real
from rebalanser.audit.weights import DECIMALS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rebalanser.audit.report.content import Facts, Heat, ReportContent, Timeline

BLUE: Final = "#0072b2"
ORANGE: Final = "#e69f00"
GREEN: Final = "#009e73"
PURPLE: Final = "#cc79a7"
SKY: Final = "#56b4e9"
BROWN: Final = "#8c6d31"
INDIGO: Final = "#7b6fd0"
GREY: Final = "#8a9099"
ALARM: Final = "#d7263d"
"""Colour of findings alone. The others are Okabe and Ito's, which colour-blind people can distinguish."""

_OF_NODES: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, BROWN, INDIGO)
_PATTERNS: Final = ("", "/", ".")
_OTHERS: Final = "other nodes"
_NAME_LENGTH: Final = 26
_SHORT: Final = 16
"""Maximum characters of a name on a narrow screen, as of a phone."""
_NO_BOX: Final = {"t": 8, "r": 12, "b": 44, "l": 60}


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, the ``section`` of the page it belongs to, its height, and a sentence that describes it."""

    section: str
    title: str
    height: int
    plot: dict[str, Any]


def draw(content: ReportContent) -> list[Figure]:
    """All plots that have something to show."""
    drawn = []
    if content.timeline is not None and content.timeline.bars:
        drawn.append(_timeline(content.timeline, content.limits.colours))
    if content.heat is not None:
        drawn.append(_heat(content.heat))
    if any(row["duration_s"] is not None or _phases(row) for row in content.rebalances.longest):
        drawn.append(_rebalances(content.rebalances.longest))
    if content.unavailability.affected:
        drawn.append(_worst_resources(content.unavailability.worst))
        drawn.append(_histogram(content.unavailability.histogram))
    if content.rebalances.moving:
        drawn.append(_moves(content.rebalances.moving))
    drawn.extend(_balance(group, points) for group, points in content.balance.groups if len(points) > 1)
    if content.handlers:
        drawn.append(_handlers(content.handlers))
    if content.loads.heaviest:
        drawn.append(_heaviest(content.loads.heaviest))
    if content.loads.weights:
        drawn.append(_weights(content.loads.weights))
    if len(content.leaders.newest) > 1:
        drawn.append(_terms(content.leaders.newest, content.limits.colours))
    return drawn


def _safe(name: str, length: int = _NAME_LENGTH) -> str:
    return html.escape(elided(name, length), quote=False)


def _ms(wall: float) -> float:
    """Milliseconds since 1970, as plotly's dates."""
    return round(wall * 1e3, 3)


def _figure(section: str, title: str, height: int, traces: Iterable[Any], **layout: Any) -> Figure:
    figure = go.Figure(
        list(traces),
        layout={
            "margin": _NO_BOX,
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12},
            "legend": {
                "orientation": "h",
                "yanchor": "bottom",
                "y": 1.0,
                "xanchor": "left",
                "x": 0,
                "traceorder": "normal",
            },
            "hoverlabel": {"align": "left"},
            "hovermode": "closest",
            "bargap": 0.25,
            "template": None,
            "autosize": True,
            **layout,
        },
    )
    return Figure(section, title, height, figure.to_plotly_json())


def _axis(title: str | None = None, **settings: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8} if title else None,
        "automargin": True,
        "zeroline": False,
        "fixedrange": False,
        **settings,
    }


def _names_axis(names: Sequence[str], *, length: int = _NAME_LENGTH) -> dict[str, Any]:
    """An axis of numbered rows, the first on top, each with its name."""
    return _axis(
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=[_safe(name, length) for name in names],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        ticks="",
    )


def _short(names: Sequence[str]) -> dict[str, list[str]]:
    """The names of ``_names_axis`` for a narrow screen, for the page's script."""
    return {"short": [_safe(name, _SHORT) for name in names]}


def _time_axis() -> dict[str, Any]:
    return _axis("time (UTC)", type="date", nticks=7)


def _axis_from_zero(title: str, **settings: Any) -> dict[str, Any]:
    return _axis(title, rangemode="tozero", **settings)


def _colours(names: Iterable[str], most: int) -> dict[str, dict[str, Any]]:
    """A colour, and from the eighth on a pattern too, for the ``most`` frequent names; grey for the rest."""
    frequent = [name for name, _ in Counter(names).most_common(most)]
    looks: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(sorted(frequent, key=natural)):
        look: dict[str, Any] = {"color": _OF_NODES[place % len(_OF_NODES)]}
        if shape := _PATTERNS[place // len(_OF_NODES) % len(_PATTERNS)]:
            look["pattern"] = {
                "shape": shape,
                "fgcolor": "rgba(255,255,255,0.75)",
                "size": 6,
                "solidity": 0.35,
            }
        looks[name] = look
    return looks


def _spans(bars: Sequence[Bar], most_colours: int, rows: Sequence[str]) -> list[Any]:
    """Horizontal bars in time, one trace for each node that has a colour and one for the others."""
    looks = _colours((bar.node for bar in bars), most_colours)
    by_trace: dict[str, list[Bar]] = {name: [] for name in looks}
    for bar in bars:
        by_trace.setdefault(bar.node if bar.node in looks else _OTHERS, []).append(bar)
    return [
        go.Bar(
            orientation="h",
            name=_safe(name, _SHORT),
            y=[bar.row for bar in own],
            base=[_ms(bar.begins) for bar in own],
            x=[max(0.0, round((bar.ends - bar.begins) * 1e3, 3)) for bar in own],
            width=0.72,
            marker={
                **looks.get(name, {"color": GREY}),
                "line": {"color": "rgba(255,255,255,0.8)", "width": 0.6},
            },
            opacity=0.9,
            customdata=[
                [
                    _safe(rows[bar.row], 80),
                    _safe(bar.node, 80),
                    period(bar.begins, bar.ends),
                    _safe(bar.tooltip, 160),
                ]
                for bar in own
            ],
            hovertemplate=_hover("%{customdata[1]}", "%{customdata[2]}", "%{customdata[3]}"),
        )
        for name, own in by_trace.items()
    ]


def _hover(*lines: str) -> str:
    """Text at the pointer: the first of a point's texts in bold, then these lines."""
    return "<br>".join(("<b>%{customdata[0]}</b>", *lines)) + "<extra></extra>"


def _timeline(timeline: Timeline, colours: int) -> Figure:
    traces = _spans(timeline.bars, colours, timeline.resources)
    if timeline.marks:
        traces.append(_marks(timeline))
    return _figure(
        "timeline",
        "Owners over time: each row is a resource, each colour a node.",
        110 + max(4, len(timeline.resources)) * 22,
        traces,
        barmode="overlay",
        xaxis=_time_axis(),
        yaxis=_names_axis(timeline.resources),
        meta=_short(timeline.resources),
    )


def _marks(timeline: Timeline) -> Any:
    """Findings as outlined marks at their beginning, with a line to their end."""
    x: list[float | None] = []
    y: list[int | None] = []
    tooltips: list[list[str]] = []
    for mark in timeline.marks:
        tooltip = [_safe(mark.tooltip, 80), period(mark.begins, mark.ends), duration(mark.ends - mark.begins)]
        x += [_ms(mark.begins), _ms(mark.ends), None]
        y += [mark.row, mark.row, None]
        tooltips += [tooltip, tooltip, ["", "", ""]]
    return go.Scatter(
        name="finding",
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": ALARM, "width": 4},
        marker={"color": ALARM, "size": 9, "symbol": "diamond", "line": {"color": "#ffffff", "width": 1.5}},
        customdata=tooltips,
        hovertemplate=_hover("%{customdata[1]}", "%{customdata[2]}"),
    )


def _heat(heat: Heat) -> Figure:
    names = [words for _, words in HEAT_LEVELS] + [NEVER]
    x = [_ms(heat.begins + (column + 0.5) * heat.width_s) for column in range(len(heat.counts[0]))]
    most = max(max(row) for row in heat.counts)
    steps = [10**power for power in range(len(str(max(1, most))))]
    log = go.Heatmap(
        x=x,
        y=list(range(len(names))),
        z=[[_log10(count) for count in row] for row in heat.counts],
        text=[[number(count) for count in row] for row in heat.counts],
        customdata=[
            [
                period(heat.begins + column * heat.width_s, heat.begins + (column + 1) * heat.width_s)
                for column in range(len(x))
            ]
            for _ in names
        ],
        colorscale=[[0.0, "#4f7fb8"], [0.5, "#8fa38a"], [1.0, "#f2c94c"]],
        zmin=0,
        zmax=max(1.0, _log10(most) or 0.0),
        ygap=2,
        colorbar={
            "title": {"text": "resources", "side": "right"},
            "tickvals": [_log10(step) for step in steps],
            "ticktext": [number(step) for step in steps],
            "thickness": 12,
        },
        hoverongaps=False,
        hovertemplate="%{text} resources<br>%{customdata}<extra></extra>",
    )
    return _figure(
        "timeline",
        "All resources: number of resources by the share of each period that they were owned.",
        300,
        [log],
        xaxis=_time_axis(),
        yaxis={**_names_axis(names), "title": {"text": "owned"}},
    )


def _log10(count: int) -> float | None:

    return math.log10(count) if count > 0 else None


_PHASE_LOOKS: Final = {
    "plan_s": ("plan", GREY),
    "stop_s": ("stop", ORANGE),
    "barrier_s": ("barriers", BLUE),
    "start_s": ("start", GREEN),
}


def _phases(row: Facts) -> float:
    return sum(row[phase] or 0.0 for phase in _PHASE_LOOKS)


def _version_axis(rebalances: Sequence[Facts]) -> dict[str, Any]:
    groups = {row["group"] for row in rebalances}
    every = max(1, len(rebalances) // 12)
    shown = range(0, len(rebalances), every)
    named = [
        f"v{rebalances[at]['version']}"
        if len(groups) == 1
        else f"{elided(rebalances[at]['group'], 12)} v{rebalances[at]['version']}"
        for at in shown
    ]
    return _axis(
        "allocation, in order of time",
        tickmode="array",
        tickvals=list(shown),
        ticktext=[_safe(name) for name in named],
        range=[-0.6, max(len(rebalances), 6) - 0.4],
        showgrid=False,
    )


def _about(row: Facts) -> list[str]:
    return [
        f"{_safe(row['group'], 60)}, version {row['version']}",
        f"published {moment(row['published_wall'])} by {_safe(row['leader'] or 'unknown', 60)}",
    ]


def _rebalances(rebalances: Sequence[Facts]) -> Figure:
    at = list(range(len(rebalances)))
    traces: list[Any] = [
        go.Bar(
            name=name,
            x=at,
            y=[row[phase] or 0.0 for row in rebalances],
            marker={"color": colour, "line": {"width": 0}},
            customdata=[[*_about(row), duration(row[phase])] for row in rebalances],
            hovertemplate=_hover(f"{name}: %{{customdata[2]}}", "%{customdata[1]}"),
        )
        for phase, (name, colour) in _PHASE_LOOKS.items()
    ]
    traces.append(
        go.Scatter(
            name="whole rebalance",
            x=at,
            y=[row["duration_s"] for row in rebalances],
            mode="markers",
            marker={"symbol": "line-ew", "size": 9, "line": {"width": 2.5, "color": INDIGO}, "color": INDIGO},
            customdata=[[*_about(row), duration(row["duration_s"])] for row in rebalances],
            hovertemplate=_hover("whole rebalance: %{customdata[2]}", "%{customdata[1]}"),
        )
    )
    return _figure(
        "rebalances",
        "Phases of each rebalance, with the time of the slowest node in each phase.",
        340,
        traces,
        barmode="stack",
        xaxis=_version_axis(rebalances),
        yaxis=_axis_from_zero("seconds"),
    )


def _resources(rows: Sequence[Facts]) -> list[str]:
    """The names of their resources, with the group where there are several."""
    groups = {row["group"] for row in rows}
    return [row["resource"] if len(groups) == 1 else f"{row['group']} / {row['resource']}" for row in rows]


def _worst_resources(worst: Sequence[Facts]) -> Figure:
    names = _resources(worst)
    longest = [row["longest_s"] for row in worst]
    rest = [max(0.0, row["unowned_s"] - row["longest_s"]) for row in worst]
    return _figure(
        "unavailability",
        "Resources with the most unowned time between their first and last owner.",
        100 + max(3, len(worst)) * 22,
        [
            go.Bar(
                orientation="h",
                name=name,
                y=list(range(len(worst))),
                x=seconds,
                marker={"color": colour, "line": {"width": 0}},
                customdata=[
                    [_safe(full, 80), duration(each)] for full, each in zip(names, seconds, strict=True)
                ],
                hovertemplate=_hover(f"{name}: %{{customdata[1]}}"),
            )
            for name, colour, seconds in (("longest period", BLUE, longest), ("the rest", SKY, rest))
        ],
        barmode="stack",
        xaxis=_axis_from_zero("seconds unowned"),
        yaxis=_names_axis(names),
        meta=_short(names),
    )


def _histogram(histogram: Sequence[tuple[int, int]]) -> Figure:
    known = dict(histogram)
    thirds = range(min(known), max(known) + 1)
    bounds = [(10 ** (third / 3), 10 ** ((third + 1) / 3)) for third in thirds]
    return _figure(
        "unavailability",
        "Number of resources by total unowned time.",
        260,
        [
            go.Bar(
                x=[duration(low) for low, _ in bounds],
                y=[known.get(third, 0) for third in thirds],
                marker={"color": BLUE, "line": {"width": 0}},
                customdata=[f"{duration(low)} to {duration(high)}" for low, high in bounds],
                hovertemplate="%{y} resources<br>%{customdata}<extra></extra>",
            )
        ],
        bargap=0.05,
        showlegend=False,
        xaxis=_axis("total unowned time, from", type="category", showgrid=False),
        yaxis=_axis_from_zero("resources"),
    )


def _moves(rebalances: Sequence[Facts]) -> Figure:
    at = list(range(len(rebalances)))
    return _figure(
        "moves",
        "Resources that each allocation moved, and the minimum that balance required.",
        300,
        [
            go.Bar(
                name=name,
                x=at,
                y=[row[column] for row in rebalances],
                marker={"color": colour, "line": {"width": 0}},
                customdata=[_about(row) for row in rebalances],
                hovertemplate=_hover(f"{name}: %{{y}}", "%{customdata[1]}"),
            )
            for name, column, colour in (("moved", "moves", BLUE), ("minimum", "least_moves", ORANGE))
        ],
        barmode="group",
        xaxis=_version_axis(rebalances),
        yaxis=_axis_from_zero("resources"),
    )


def _balance(group: str, points: Sequence[Facts]) -> Figure:
    x = [_ms(row["at_wall"]) for row in points]
    tooltips = [
        f"{number(row['least'])} to {number(row['most'])} on {number(row['nodes'])} nodes, "
        f"{number(row['owned'])} in all"
        for row in points
    ]

    def line(name: str, column: str, colour: str, **settings: Any) -> Any:
        return go.Scatter(
            name=name,
            x=x,
            y=[row[column] for row in points],
            mode="lines",
            line={"color": colour, "width": 2, "shape": "hv"},
            customdata=tooltips,
            hovertemplate="<b>%{x|%Y-%m-%d %H:%M:%S}</b><br>%{customdata}<extra></extra>",
            **settings,
        )

    return _figure(
        "balance",
        f"Group {elided(group, 60)}: maximum and minimum number of resources of a node.",
        280,
        [
            line("most on one node", "most", BLUE),
            line("fewest on one node", "least", ORANGE, fill="tonexty", fillcolor="rgba(0,114,178,0.14)"),
        ],
        xaxis=_time_axis(),
        yaxis=_axis_from_zero("resources"),
    )


def _handlers(handlers: Sequence[Facts]) -> Figure:
    names = [f"{row['label']} {row['handler']}" for row in handlers]
    at = list(range(len(handlers)))
    line_x: list[float | None] = []
    line_y: list[int | None] = []
    for place, row in enumerate(handlers):
        line_x += [_positive(row["p50_s"]), _positive(row["max_s"]), None]
        line_y += [place, place, None]
    traces: list[Any] = [
        go.Scatter(
            x=line_x,
            y=line_y,
            mode="lines",
            line={"color": GREY, "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    ]
    traces += [
        go.Scatter(
            name=name,
            x=[_positive(row[column]) for row in handlers],
            y=at,
            mode="markers",
            marker={"color": colour, "size": 10, "symbol": symbol},
            customdata=[
                [_safe(full, 80), duration(row[column]), number(row["calls"])]
                for full, row in zip(names, handlers, strict=True)
            ],
            hovertemplate=_hover(f"{name}: %{{customdata[1]}}", "%{customdata[2]} calls"),
        )
        for name, column, colour, symbol in (
            ("median", "p50_s", BLUE, "circle"),
            ("99th percentile", "p99_s", ORANGE, "diamond"),
            ("longest", "max_s", INDIGO, "x"),
        )
    ]
    return _figure(
        "handlers",
        "Duration of OnStart and OnStop for a resource, on the slowest nodes.",
        100 + max(3, len(handlers)) * 22,
        traces,
        xaxis=_axis("seconds", type="log", dtick="D2"),
        yaxis=_names_axis(names, length=34),
        meta=_short(names),
    )


def _heaviest(loads: Sequence[Facts]) -> Figure:
    names = _resources(loads)
    return _figure(
        "loads",
        "Resources with the greatest weights: bars show smoothed loads, labels show weights.",
        100 + max(3, len(loads)) * 22,
        [
            go.Bar(
                orientation="h",
                y=list(range(len(loads))),
                x=[row["load"] for row in loads],
                text=[real(row["weight"]) for row in loads],
                textposition="auto",
                textangle=0,
                marker={"color": BLUE, "line": {"width": 0}},
                customdata=[
                    [_safe(full, 80), real(row["load"]), number(row["samples"])]
                    for full, row in zip(names, loads, strict=True)
                ],
                hovertemplate=_hover("weight %{text}", "load %{customdata[1]}, of %{customdata[2]} samples"),
            )
        ],
        showlegend=False,
        xaxis=_axis_from_zero("smoothed load, in the application's unit"),
        yaxis=_names_axis(names),
        meta=_short(names),
    )


def _weights(weights: Sequence[tuple[float, int]]) -> Figure:
    return _figure(
        "loads",
        "Number of resources by weight.",
        260,
        [
            go.Bar(
                x=[weight for weight, _ in weights],
                y=[count for _, count in weights],
                width=0.8 / 10**DECIMALS,
                marker={"color": BLUE, "line": {"width": 0}},
                customdata=[number(count) for _, count in weights],
                hovertemplate="weight %{x}: %{customdata} resources<extra></extra>",
            )
        ],
        showlegend=False,
        xaxis=_axis_from_zero("weight", showgrid=False),
        yaxis=_axis_from_zero("resources"),
    )


def _positive(seconds: float | None) -> float | None:
    """A value that a logarithmic axis can show: at least a microsecond."""
    return None if seconds is None else max(seconds, 1e-6)


def _terms(terms: Sequence[Facts], colours: int) -> Figure:

    groups = list(dict.fromkeys(row["group"] for row in terms))
    bars = [
        Bar(
            groups.index(row["group"]),
            row["label"] or row["node"],
            row["from_wall"],
            row["to_wall"],
            f"term {row['term']}, for {duration(row['to_wall'] - row['from_wall'])}",
        )
        for row in terms
    ]
    return _figure(
        "leaders",
        "Leaders over time: each row is a group, each colour a node.",
        130 + len(groups) * 40,
        _spans(bars, colours, groups),
        barmode="overlay",
        xaxis=_time_axis(),
        yaxis=_names_axis(groups),
        meta=_short(groups),
    )
