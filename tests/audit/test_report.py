"""The report in a real browser: healthy, with findings, with ten thousand resources, with nothing (AU-8)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import sync_playwright
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType

from rebalanser.audit.metrics import balance, handlers, unavailability
from rebalanser.audit.report import ReportLimits, build, page, words
from rebalanser.audit.report.aggregates import gather
from rebalanser.audit.tables import (
    ACCESSES,
    BALANCE,
    CLOCKS,
    FINDINGS,
    GAPS,
    HANDLERS,
    LEADERS,
    LOADS,
    PARTY,
    PROCESSES,
    QUARANTINE,
    REBALANCES,
    UNAVAILABILITY,
    WITNESS,
    Tables,
)
from rebalanser.audit.weights import DECIMALS, LEAST_WEIGHT, MOST_WEIGHT
from rebalanser.testing.waiting import PATIENCE_S
from support.browser import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

pytestmark = [pytest.mark.slow, pytest.mark.rule("AU-8")]

NOON = 1_772_366_400.0
"""2026-03-01 12:00:00 UTC."""
EVIL = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
SCHEMAS: dict[str, StructType] = {
    "findings": FINDINGS,
    "gaps": GAPS,
    "quarantine": QUARANTINE,
    "clocks": CLOCKS,
    "processes": PROCESSES,
    "accesses": ACCESSES,
    "rebalances": REBALANCES,
    "unavailability": UNAVAILABILITY,
    "handlers": HANDLERS,
    "balance": BALANCE,
    "leaders": LEADERS,
    "loads": LOADS,
}


def frame(spark: SparkSession, schema: StructType, rows: list[dict[str, Any]]) -> DataFrame:
    """The rows as a frame, without a Python worker; what they don't say is null."""
    return spark.range(1).select(f.inline(f.from_json(f.lit(json.dumps(rows)), ArrayType(schema))))


def named(schema: StructType, values: tuple[Any, ...]) -> dict[str, Any]:
    """Values by the names of their columns."""
    return dict(zip(schema.names, values, strict=True))


def tables(spark: SparkSession, verdict: str, **given: DataFrame) -> tuple[Tables, str]:
    """The given tables, those that follow from the accesses where they aren't given, and empty ones."""
    whole = {name: given.get(name) or frame(spark, schema, []) for name, schema in SCHEMAS.items()}
    if "accesses" in given:
        whole["accesses"] = accesses = given["accesses"].cache()
        whole["unavailability"] = unavailability(accesses, 50_000).cache()
        whole["handlers"] = handlers(accesses).cache()
        whole["balance"] = balance(accesses, whole["processes"]).cache()
    return Tables(**whole), verdict


def release(report: tuple[Tables, str]) -> None:
    """Give back what ``tables`` keeps in memory."""
    for each in fields(report[0]):
        getattr(report[0], each.name).unpersist()


def some_accesses(
    spark: SparkSession, resources: int, turns: int, nodes: int, group: str = "orders"
) -> DataFrame:
    """Each resource is owned in turns of an hour or so by one node after the other, some seconds apart.

    The first ones have longer pauses, node 3 is slow.
    """
    turn, resource = f.col("id") % turns, f.floor(f.col("id") / turns)
    node = (resource * 7 + turn * 3) % nodes
    pause = f.when((resource < 5) & (turn == 3), 240.0 + resource * 90).otherwise(0.2 + f.rand(1) * 3)
    start = NOON + turn * 3_600 + (resource % 10) * 20 + pause
    stop_took = f.when(node == 3, 8.0).otherwise(0.05) + f.rand(2) * 0.4
    end = NOON + (turn + 1) * 3_600 + (resource % 10) * 20
    known: dict[str, Column] = {
        "protocol": f.lit("group"),
        "group": f.lit(group),
        "resource": f.format_string("orders/partition-%d", resource),
        "token": f.col("id") + 100,
        "process": f.format_string("process-%d", node),
        "node": f.format_string("worker-%d-0", node),
        "label": f.format_string("worker-%d", node),
        "host": f.format_string("host-%d", node),
        "boot": f.format_string("boot-%d", node),
        "start_entered_wall": start,
        "start_entered_monotonic": start - NOON,
        "start_returned_monotonic": start - NOON + 0.01 + f.rand(3) * 0.2,
        "stop_entered_monotonic": end - NOON - stop_took,
        "stop_returned_monotonic": end - NOON,
        "end_wall": end,
        "end_monotonic": end - NOON,
        "ended_by": f.lit("stop"),
    }
    columns = [
        known.get(each.name, f.lit(None)).cast(each.dataType).alias(each.name) for each in ACCESSES.fields
    ]
    return spark.range(resources * turns).select(*columns)


def some_processes(spark: SparkSession, nodes: int, turns: int, group: str = "orders") -> DataFrame:
    """Nodes that live for all of it."""
    rows = [
        {
            "protocol": "group",
            "group": group,
            "process": f"process-{node}",
            "node": f"worker-{node}-0",
            "label": f"worker-{node}",
            "host": f"host-{node}",
            "first_sequence": 0,
            "last_sequence": 999,
            "first_wall": NOON - 5,
            "last_wall": NOON + turns * 3_600 + 300,
        }
        for node in range(nodes)
    ]
    return frame(spark, PROCESSES, rows)


def some_rebalances(spark: SparkSession, count: int, every_s: float, group: str = "orders") -> DataFrame:
    """One every so many seconds; the fifth of each ten is slow to stop, the tenth is replaced."""
    rows = []
    for number in range(count):
        replaced = number % 10 == 9
        phases = {
            "plan_s": 0.02 + number % 3 * 0.01,
            "stop_s": 4.0 if number % 10 == 4 else 0.4 + number % 4 * 0.2,
            "barrier_s": 0.15 + number % 5 * 0.1,
            "start_s": 0.3,
        }
        took = None if replaced else sum(phases.values()) + 0.1
        rows.append(
            {
                "protocol": "group",
                "group": group,
                "version": number + 1,
                "term": 1 + number // 20,
                "leader": f"worker-{number // 20}",
                "published_wall": NOON + number * every_s,
                "completed_wall": None if took is None else NOON + number * every_s + took,
                "duration_s": took,
                "moves": 4 + number % 3,
                "least_moves": 4,
                "nodes": 4,
                "resources": 24,
                **phases,
            }
        )
    return frame(spark, REBALANCES, rows)


def some_leaders(spark: SparkSession, terms: int, every_s: float, group: str = "orders") -> DataFrame:
    """One term after the other."""
    rows = [
        {
            "protocol": "group",
            "group": group,
            "term": term + 1,
            "node": f"worker-{term}-0",
            "label": f"worker-{term}",
            "from_wall": NOON + term * every_s,
            "to_wall": NOON + (term + 1) * every_s - 2.0,
        }
        for term in range(terms)
    ]
    return frame(spark, LEADERS, rows)


def some_loads(spark: SparkSession, resources: int, group: str = "orders") -> DataFrame:
    """The first resources take most: the load of each next one is a little smaller."""
    load = 400.0 / (f.col("id") + 10)
    relative = load / f.lit(sum(400.0 / (number + 10) for number in range(resources)) / resources)
    known: dict[str, Column] = {
        "protocol": f.lit("group"),
        "group": f.lit(group),
        "resource": f.format_string("orders/partition-%d", "id"),
        "samples": f.lit(120),
        "load": load,
        "weight": f.round(f.greatest(f.lit(LEAST_WEIGHT), f.least(f.lit(MOST_WEIGHT), relative)), DECIMALS),
        "last_wall": f.lit(NOON + 3_600.0),
    }
    return spark.range(resources).select(
        *(known[each.name].cast(each.dataType).alias(each.name) for each in LOADS.fields)
    )


def finding(number: int, **fields: Any) -> dict[str, Any]:
    """An overlap of two owners."""
    begins = NOON + 3_600 * (1 + number % 5)
    log = "file:///var/history/orders.w1.jsonl"
    stopped = ("process-1", 77, "stop_returned", begins + 2.25, None, log, 4711)
    started = ("process-4", 12, "start_entered", begins, 144, "ownership/0", 123_456)
    return {
        "id": f"overlap-{number:04x}",
        "kind": "overlap",
        "rule": "RB-1",
        "certainty": "certain",
        "protocol": "group",
        "group": "orders",
        "resource": f"orders/partition-{number}",
        "sentence": f"worker-1 still had access to orders/partition-{number} when worker-4 began.",
        "begins": begins,
        "ends": begins + 2.25,
        "lasts_s": 2.25,
        "uncertainty_s": 0.5,
        "fenced": False,
        "parties": [
            named(
                PARTY,
                (f"worker-{n}-0", f"worker-{n}", f"process-{n}", f"host-{n}", 140 + n, begins, begins + 2),
            )
            for n in (1, 4)
        ],
        "evidence": [named(WITNESS, stopped), named(WITNESS, started)],
        "gap": None,
        **fields,
    }


def several_findings() -> list[dict[str, Any]]:
    """Seven findings of four kinds, one of them of a resource with a vicious name."""
    return [
        finding(3, lasts_s=2.5),
        finding(1, fenced=True, lasts_s=40.0, ends=NOON + 7_240.0),
        finding(2, resource=EVIL, sentence=f"Two owners of {EVIL} at once."),
        finding(5, certainty="possible", lasts_s=0.2, gap="3 records of process-1 are missing in between."),
        finding(6, kind="token_order", rule="RB-12", lasts_s=None, uncertainty_s=None, fenced=None),
        finding(7, kind="unowned", rule="RB-2", lasts_s=600.0, ends=NOON + 11_400.0, certainty="possible"),
        finding(8, kind="two_leaders", rule="RB-5", resource=None, sentence="Term 3 had two leaders."),
    ]


def healthy(spark: SparkSession) -> tuple[Tables, str]:
    """Twenty-four resources on four nodes for eight hours."""
    return tables(
        spark,
        "Sound. No resource had two owners: 192 accesses of 24 resources by 4 nodes of 1 group over 8 h.",
        accesses=some_accesses(spark, 24, 8, 4),
        processes=some_processes(spark, 4, 8),
        rebalances=some_rebalances(spark, 24, 1_200.0),
        leaders=some_leaders(spark, 2, 14_400.0),
        loads=some_loads(spark, 24),
    )


def broken(spark: SparkSession) -> tuple[Tables, str]:
    """The same with findings, gaps, quarantine, clocks apart, and a resource and a node with evil names."""
    accesses = some_accesses(spark, 24, 8, 9)
    evil = f.when(f.col("resource") == "orders/partition-2", EVIL).otherwise(f.col("resource"))
    label = f.when(f.col("label") == "worker-0", EVIL).otherwise(f.col("label"))
    host_apart = ("orders", "host-4", "host-1", 1.3, NOON, "adopted before published")
    gap = ("group", "orders", "process-1", "worker-1", 31, 33, 3, NOON + 3_000.0, NOON + 3_900.0, "missing")
    torn = ("file:///var/history/orders.w1.jsonl", 9, "torn", "EOF while parsing", '{"schema_version":2,"pro')
    strange = ("file:///var/history/orders.w2.jsonl", 1, "not_json", EVIL, EVIL)
    return tables(
        spark,
        "Refuted. 5 certain findings break RB-1, RB-12, RB-5: 216 accesses of 24 resources.\n"
        "Doubt: 3 records of worker-1 are missing and could hide a finding.\n"
        "Clocks: host-4 is at least 1.3 s behind host-1.",
        findings=frame(spark, FINDINGS, several_findings()),
        gaps=frame(spark, GAPS, [named(GAPS, gap)]),
        quarantine=frame(spark, QUARANTINE, [named(QUARANTINE, torn), named(QUARANTINE, strange)]),
        clocks=frame(spark, CLOCKS, [named(CLOCKS, host_apart)]),
        accesses=accesses.withColumns({"resource": evil, "label": label}),
        processes=some_processes(spark, 9, 8),
        rebalances=some_rebalances(spark, 60, 480.0),
        leaders=some_leaders(spark, 3, 9_600.0),
    )


def large(spark: SparkSession) -> tuple[Tables, str]:
    """Ten thousand resources on fifty nodes, a thousand findings, two thousand rebalances."""
    template = frame(spark, FINDINGS, [finding(0)])
    resource = f.format_string("orders/partition-%d", f.col("number") * 7)
    findings = (
        template.crossJoin(spark.range(1_000).withColumnRenamed("id", "number"))
        .withColumns(
            {
                "id": f.format_string("overlap-%04x", "number"),
                "resource": resource,
                "begins": f.col("begins") + f.col("number") * 17,
                "ends": f.col("ends") + f.col("number") * 17,
                "lasts_s": f.col("lasts_s") + f.col("number") * 0.01,
                "certainty": f.when(f.col("number") % 4 == 0, "certain").otherwise("possible"),
            }
        )
        .select(*FINDINGS.names)
    )
    return tables(
        spark,
        "Refuted. 250 certain findings break RB-1: 120,000 accesses of 10,000 resources by 50 nodes.",
        findings=findings.cache(),
        accesses=some_accesses(spark, 10_000, 12, 50),
        processes=some_processes(spark, 50, 12),
        rebalances=some_rebalances(spark, 2_000, 21.6),
        leaders=some_leaders(spark, 40, 1_080.0),
        loads=some_loads(spark, 10_000),
    )


@dataclass(frozen=True)
class Opened:
    """A report that was opened, and what the browser asked for and complained about meanwhile."""

    page: Page
    requests: list[str]
    complaints: list[str]


def empty(spark: SparkSession) -> tuple[Tables, str]:
    """Nothing at all."""
    return tables(spark, "No record was found.")


class Reports:
    """Reports as files, each made when it is first asked for by the name of what it is of."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder

    def __getitem__(self, name: str) -> Path:
        path = self._folder / f"{name}.html"
        if not path.exists():
            report = {"healthy": healthy, "broken": broken, "large": large, "empty": empty}[name](self._spark)
            path.write_text(build(*report), encoding="utf-8")
            release(report)
        return path


@pytest.fixture(scope="module")
def reports(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The reports that the tests look at."""
    return Reports(spark, tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield browser
        browser.close()


def opened(browser: Browser, path: Path, *, width: int = 1280, height: int = 900, **settings: Any) -> Opened:
    """The report in a window of this size, once its plots are drawn."""
    context = browser.new_context(viewport={"width": width, "height": height}, **settings)
    page = context.new_page()
    seen = Opened(page, [], [])
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on(
        "console",
        lambda said: seen.complaints.append(said.text) if said.type in {"error", "warning"} else None,
    )
    page.goto(path.as_uri())
    if settings.get("java_script_enabled", True):
        page.wait_for_selector("html[data-drawn=yes]", timeout=1000 * PATIENCE_S)
    return seen


SECTIONS = [anchor for anchor, _ in page.SECTIONS]


@pytest.mark.parametrize("name", ["healthy", "broken", "large", "empty"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_report_opens_without_errors_and_without_a_network(
    browser: Browser, reports: Reports, name: str, width: int, scheme: str, tmp_path: Path
) -> None:
    seen = opened(browser, reports[name], width=width, color_scheme=scheme)
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert sum(url.startswith("file:") for url in seen.requests) == 1, "one file is all there is"
    assert seen.page.locator("section").evaluate_all("all => all.map(one => one.id)") == SECTIONS
    assert seen.page.title() != "pwned"
    figures = seen.page.locator(".plot")
    assert seen.page.locator(".plot svg.main-svg .xaxislayer-above").count() == figures.count()
    assert figures.count() >= {"healthy": 7, "broken": 7, "large": 8, "empty": 0}[name]
    overflow = seen.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0, "nothing sticks out at the side"
    assert len(seen.page.screenshot(path=tmp_path / "report.png")) > 10_000
    seen.page.context.close()


def test_findings_come_first_the_worst_on_top_with_all_that_is_known(
    browser: Browser, reports: Reports
) -> None:
    seen = opened(browser, reports["broken"])
    cards = seen.page.locator("details.finding")
    assert cards.count() == 7
    assert seen.page.locator("#summary .certain dd").inner_text() == "5"
    first = cards.first
    assert "orders/partition-3" in first.inner_text()
    text = first.inner_text()
    for expected in ("Two owners at once", "certain", "not fenced", "RB-1", "2.5 s ± 500 ms"):
        assert expected in text
    for expected in ("worker-1-0", "worker-4-0", "host-4", "141", "144", "2026-03-01 16:00:00.000"):
        assert expected in text
    assert "file:///var/history/orders.w1.jsonl:4711" in text
    assert "ownership/0@123456" in text
    assert "3 records of process-1 are missing" in cards.filter(has_text="partition-5").text_content()
    assert EVIL in cards.filter(has_text="pwned").first.text_content()
    assert seen.page.locator("#verdict.certain").count() == 1
    seen.page.context.close()


def test_bars_of_the_timeline_are_drawn_and_findings_marked(browser: Browser, reports: Reports) -> None:
    seen = opened(browser, reports["broken"])
    plot = seen.page.locator("#timeline .plot").first
    assert plot.locator(".barlayer .point").count() == 24 * 8
    assert plot.locator(".scatterlayer .point").count() == 2 * 6
    ticks = plot.locator(".yaxislayer-above .ytick").all_text_contents()
    assert len(ticks) == 24
    assert ticks[0] == "orders/partition-3"
    assert any("</script>" in tick for tick in ticks), "a vicious name is shown as it is"
    seen.page.context.close()


@pytest.mark.rule("AU-10")
def test_ten_thousand_resources_stay_readable(browser: Browser, reports: Reports) -> None:
    assert reports["large"].stat().st_size < 9_000_000
    seen = opened(browser, reports["large"])
    assert seen.page.locator("details.finding").count() == 200
    assert "The table findings has 800 more." in seen.page.locator("#findings").inner_text()
    assert (
        "The second plot counts all resources, also the other 9\u202f940."
        in seen.page.locator("#timeline").inner_text()
    )
    assert seen.page.locator("#timeline .plot").count() == 2
    assert seen.page.locator("#timeline .barlayer .point").count() <= ReportLimits().bars
    assert "120 longest" in seen.page.locator("#rebalances").inner_text()
    assert seen.page.locator("#unavailability tbody tr").count() == 1 + ReportLimits().worst
    seen.page.context.close()


@pytest.mark.rule("AU-7")
def test_loads_and_the_weights_that_follow_are_told(browser: Browser, reports: Reports) -> None:
    seen = opened(browser, reports["healthy"])
    loads = seen.page.locator("#loads")
    assert "24 resources reported their load, in 2\u202f880 samples" in loads.inner_text()
    loads.locator("details").evaluate("one => one.open = true")
    heaviest = loads.locator("tbody tr").nth(1).locator("td").all_inner_texts()
    assert heaviest == ["orders/partition-0", "orders", "40", "1.9", "120", "2026-03-01 13:00:00.000"]
    assert loads.locator(".plot").count() == 1
    ticks = loads.locator(".yaxislayer-above .ytick").all_text_contents()
    assert ticks == [f"orders/partition-{number}" for number in range(24)]
    assert "--apply" in loads.inner_text()
    seen.page.context.close()
    large = opened(browser, reports["large"])
    assert large.page.locator("#loads tbody tr").count() == 1 + ReportLimits().worst
    assert large.page.locator("#loads .plot").count() == 2, "and how many get which weight"
    large.page.context.close()


def test_the_text_needs_no_javascript(browser: Browser, reports: Reports) -> None:
    seen = opened(browser, reports["broken"], java_script_enabled=False)
    assert seen.page.locator("details.finding").count() == 7
    assert "The plots need JavaScript" in seen.page.locator("noscript").inner_text()
    assert "99th percentile" in seen.page.locator("#rebalances").inner_text()
    seen.page.context.close()


def test_what_is_not_there_is_said_in_words(browser: Browser, reports: Reports) -> None:
    seen = opened(browser, reports["empty"])
    assert seen.page.locator("#verdict.possible").inner_text() == "No record was found."
    assert seen.page.locator(".plot").count() == 0
    said = {anchor: seen.page.locator(f"#{anchor} p").first.inner_text() for anchor in SECTIONS}
    assert said["findings"] == "No records, so nothing is proven."
    assert said["rebalances"] == "No allocation was published."
    assert said["leaders"] == "No election was recorded."
    assert all(said.values())
    seen.page.context.close()
    healthy = opened(browser, reports["healthy"])
    assert "no record breaks a rule" in healthy.page.locator("#findings").inner_text()
    assert healthy.page.locator("#verdict.clean").count() == 1
    healthy.page.context.close()


def test_the_page_forbids_everything_that_is_not_in_it(reports: Reports) -> None:
    text = reports["broken"].read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'unsafe-inline'")
    assert "http" not in policy[1]
    assert text.count("plotly.js v") == 1, "plotly is there once"
    assert EVIL not in text


@pytest.mark.rule("AU-10")
def test_many_accesses_of_few_resources_are_drawn_in_slots(spark: SparkSession) -> None:
    report = tables(spark, "", accesses=some_accesses(spark, 4, 100, 3))
    timeline = gather(*report, ReportLimits(bars=40)).timeline
    release(report)
    assert timeline is not None
    assert timeline.slot_s is not None
    assert 4 <= len(timeline.bars) <= 40
    assert {bar.row for bar in timeline.bars} == {0, 1, 2, 3}


@pytest.mark.rule("AU-10")
def test_the_heat_map_counts_every_resource_at_every_time(spark: SparkSession) -> None:
    report = tables(spark, "", accesses=some_accesses(spark, 70, 6, 3))
    heat = gather(*report, ReportLimits(heat_columns=12)).heat
    release(report)
    assert heat is not None
    by_column = [sum(level[column] for level in heat.counts) for column in range(12)]
    assert by_column[1:-1] == [70] * 10
    assert sum(heat.counts[0]) > 0
    assert sum(map(sum, heat.counts[2:])) > 0, "the five with long pauses"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "\u2013"),
        (0.0, "0 s"),
        (0.00125, "1.25 ms"),
        (3.0, "3 s"),
        (59.99, "1 min"),
        (3_725.0, "1 h 2 min"),
        (90_000.0, "1 d 1 h"),
        (-2.0, "-2 s"),
    ],
)
def test_durations_are_said_in_fitting_units(seconds: float | None, said: str) -> None:
    assert words.duration(seconds) == said


def test_names_and_shares_are_said_shortly_and_never_wrongly() -> None:
    assert words.elided("a" * 100, 11) == "aaaaaa…aaaa"
    assert words.percent(9_999, 10_000) == "over 99.9 %"
    assert words.percent(1, 100_000) == "under 0.1 %"
    assert words.period(NOON, NOON + 1.5) == "2026-03-01 12:00:00.000 to 12:00:01.500"
    assert words.moment(1e300) == "1e+300 s since 1970"
    assert sorted(["s-10", "s-9", "a"], key=words.natural) == ["a", "s-9", "s-10"]
