"""How the state of a group is shown to people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rebalanser.cli.lines import MOST_WAITS, plain, resource_line, waits
from rebalanser.cli.table import render
from rebalanser.protocol import Mode
from rebalanser.state import GroupState, NodeState, ResourceState


def node(label: str, *, leader: bool = False, drained: bool = False, completed: bool = True) -> NodeState:
    return NodeState(
        node=f"{label}-id",
        label=label,
        host="host",
        pid=1,
        mode=Mode.COOPERATIVE,
        may_lead=True,
        leader=leader,
        drained=drained,
        attributes={},
        assigned=1,
        held=1,
        completed=completed,
    )


def resource(
    name: str,
    assigned: str | None,
    held: str | None,
    *,
    removed: bool = False,
    pin: str | None = None,
    reason: str | None = None,
) -> ResourceState:
    return ResourceState(
        resource=name,
        assigned_to=assigned and f"{assigned}-id",
        held_by=held and f"{held}-id",
        owner=held if held != "dead" else None,
        token=7 if held else None,
        reason=reason,
        weight=1.0,
        pin=pin,
        attributes={},
        removed=removed,
    )


def state(
    *resources: ResourceState,
    nodes: tuple[NodeState, ...],
    balanced: bool = False,
    drained: tuple[str, ...] = ("two",),
) -> GroupState:
    unowned = sum(each.reason is not None for each in resources)
    return GroupState(
        group="orders",
        revision=9,
        term=2,
        leader="one",
        version=3,
        completed=balanced,
        balanced=balanced,
        trouble=None,
        owned=sum(not each.removed for each in resources) - unowned,
        unowned=unowned,
        drained=drained,
        nodes=nodes,
        resources=resources,
    )


NODES = (node("one", leader=True), node("two", drained=True, completed=False))
MOVING = state(
    resource("kept", "one", "one"),
    resource("moving", "two", "one"),
    resource("free", "two", None, reason="two has yet to take it"),
    resource("orphan", "one", "dead", reason="one has yet to take it"),
    resource("gone", None, "two", removed=True),
    resource("homeless", None, None, pin="three", reason="pinned to three, which is not there"),
    nodes=NODES,
)


def shown(of: GroupState, width: int = 160, note: str | None = None, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(of, note, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.rule("RB-19")
def test_it_is_said_who_waits_for_what() -> None:
    assert list(waits(MOVING)) == [
        "two waits for moving, held by one",
        "one waits for orphan, held by dead-id (gone)",
        "gone is removed and still held by two",
        "nobody owns free: two has yet to take it",
        "nobody owns homeless: pinned to three, which is not there",
    ]


@pytest.mark.rule("RB-19")
def test_plain_lines_name_nodes_and_waits() -> None:
    first, *rest = plain(MOVING)
    assert first == "orders: rebalancing, version 3, term 2, leader one, 2 nodes, 2 of 5 resources owned"
    assert rest[:2] == [
        "  one: leader, ready, holds 1 of 1 assigned",
        "  two: drained, rebalancing, holds 1 of 1 assigned",
    ]
    assert len(rest) == 2 + 5


@pytest.mark.rule("RB-19")
def test_what_nobody_owns_is_named_once_for_each_reason() -> None:
    idle = state(
        *(resource(f"r{n}", None, None, reason="every node is drained") for n in range(7)),
        nodes=NODES[1:],
        balanced=True,
        drained=("three", "two"),
    )
    headline, _, *rest = plain(idle)
    assert "balanced" in headline
    assert "0 of 7 resources owned" in headline
    assert rest == [
        "  drained, and not there: three",
        "  nobody owns r0, r1, r2, r3, r4 and 2 more: every node is drained",
    ]


@pytest.mark.rule("RB-43")
def test_why_a_leader_resigned_comes_first() -> None:
    troubled = MOVING.model_copy(update={"trouble": "the leader of term 1 resigned: \x1b[2J"})
    assert plain(troubled)[3:5] == [
        r"  'the leader of term 1 resigned: \x1b[2J'",
        "  two waits for moving, held by one",
    ]
    assert r"resigned: \x1b[2J" in shown(troubled)


def test_a_balanced_group_waits_for_nothing() -> None:
    balanced = state(resource("kept", "one", "one"), nodes=NODES[:1], balanced=True, drained=())
    assert plain(balanced) == [
        "orders: balanced, version 3, term 2, leader one, 1 node, 1 of 1 resource owned",
        "  one: leader, ready, holds 1 of 1 assigned",
    ]


def test_the_table_shows_what_each_node_holds_gets_and_gives_up() -> None:
    text = shown(MOVING, note="the registry does not answer")
    (one,) = [line for line in text.splitlines() if "★ one" in line]
    (two,) = [line for line in text.splitlines() if "two" in line and "│" in line]
    assert "● kept 7  ◌ moving 7  ○ orphan" in one
    assert "○ free  ◌ gone 7  ○ moving" in two
    assert "drained, rebalancing" in two
    assert text.splitlines()[-1] == "the registry does not answer"


def test_names_are_never_taken_for_markup() -> None:
    names = (resource("[red]a[/red]", "one", "one"), resource("[x", None, None, reason="none"))
    odd = state(*names, nodes=(node("[b]"),))
    assert "nobody owns [x: none" in shown(odd)
    assert "[b]" in shown(odd)
    held = odd.model_copy(update={"nodes": (NODES[0],)})
    assert "[red]a[/red]" in shown(held)


@pytest.mark.parametrize("width", [20, 80, 300])
def test_thousands_of_resources_are_cut_short(width: int) -> None:
    held = [resource(f"held-{number}", "one", "one") for number in range(2_000)]
    waiting = [resource(f"waiting-{number}", None, "dead") for number in range(2_000)]
    text = shown(state(*held, *waiting, nodes=NODES[:1]), width)
    assert len(text.splitlines()) < 300
    assert f"and {2_000 - MOST_WAITS:,} more" in " ".join(text.split())


def test_resources_stand_in_even_columns_as_people_count() -> None:
    held = [resource(f"part-{number}", "one", "one") for number in range(12)]
    table = shown(state(*held, nodes=NODES[:1]), width=80)
    first, second, *_ = [line for line in table.splitlines() if "part-" in line]
    assert first.index("● part-0 7") == second.index("● part-4 7")
    assert first.index("● part-2 7") < first.index("● part-3 7") == second.index("● part-7 7")
    assert table.index("part-9 7") < table.index("part-10 7")


@pytest.mark.parametrize(("nodes", "resources"), [(1, 500), (3, 500), (30, 500), (200, 500), (200, 0)])
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_live_table_stays_within_the_terminal(nodes: int, resources: int, size: tuple[int, int]) -> None:
    width, height = size
    labels = [f"worker-{number}" for number in range(nodes)]
    held = [resource(f"part-{n}", labels[n % nodes], labels[n % nodes]) for n in range(resources)]
    text = shown(state(*held, nodes=tuple(map(node, labels))), width, height=height)
    lines = text.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    seen = [line for line in lines if "worker-" in line]
    assert len(seen) == nodes or f"and {nodes - len(seen)} more nodes" in text


def test_what_moves_is_shown_though_not_all_fits() -> None:
    held = [resource(f"part-{number}", "one", "one") for number in range(500)]
    coming = resource("part-zzz", "one", None)
    text = shown(state(*held, coming, nodes=NODES[:1]), width=80, height=20)
    assert "○ part-zzz" in text
    assert " more " in text


def test_many_nodes_are_cut_short_on_a_terminal_those_that_are_ready_last() -> None:
    labels = [f"worker-{number:04}" for number in range(1_000)]
    nodes = tuple(node(label, completed=label != "worker-0777") for label in labels)
    group = state(*(resource(f"part-{n}", labels[n % 1_000], None) for n in range(5_000)), nodes=nodes)
    console = Console(file=io.StringIO(), width=120)
    console.print(render(group, most_nodes=50))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len([line for line in lines if "worker-" in line and "waits" not in line]) == 50
    assert len(lines) < 250
    assert "worker-0777" in lines[4]
    assert "  … 950 more nodes, use --limit 1000" in [line.rstrip() for line in lines]
    text = plain(group, 50)
    assert text[1] == "  worker-0777: rebalancing, holds 1 of 1 assigned"
    assert text[51] == "  … 950 more nodes, use --limit 1000"
    assert len(plain(group)) > 1_000


def test_what_no_row_has_room_for_is_counted() -> None:
    held = [resource(f"partition-{number:05}", "one", "one") for number in range(20_000)]
    coming = resource("zzz", "one", None)
    text = shown(state(*held, coming, nodes=NODES[:1]), width=100)
    assert "○ zzz" in text
    seen = text.count("partition-") + 1
    assert f"and {20_001 - seen:,} more" in text


def test_a_value_gives_no_orders_to_the_terminal() -> None:
    odd = resource("a", None, None).model_copy(update={"attributes": {"k": "\x1b[2Jx", "l": "y"}})
    assert resource_line(odd) == "a: no owner, k='\\x1b[2Jx', l=y"


def test_the_picture_can_be_saved() -> None:
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(render(MOVING))
    assert "moving" in console.export_svg(title="rebalanser watch orders")
