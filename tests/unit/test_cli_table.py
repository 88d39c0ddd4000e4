"""How the state of a group is shown to people."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from rebalanser.cli.lines import MOST_WAITS, plain, resource_line, waits
from rebalanser.cli.table import render, render_view
from rebalanser.cli.view import (
    MOST_ASKED,
    MOST_MOVES,
    HeartbeatAges,
    Moves,
    ObservedMove,
    Picture,
    View,
    WatchPage,
    changed_lines,
    changed_silence,
    keys_in,
)
from rebalanser.cli.watch import AgesRead, hear
from rebalanser.core.group import Mode
from rebalanser.errors import AccessDenied, RebalanserError, RegistryUnavailable
from rebalanser.registry import RegistryCoordinator
from rebalanser.registry.contract import LeaseAge
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
        load=1.0,
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


def shown(of: GroupState, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(of))
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
        "  drained, without a live node: three",
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


def test_what_nodes_offer_has_a_column_if_any_offers_anything() -> None:
    assert "offers" not in shown(MOVING)
    offering = node("one").model_copy(update={"capacity": 8.0, "load": 2.5, "tags": ("gpu",), "zone": "eu-1"})
    text = shown(MOVING.model_copy(update={"nodes": (offering, NODES[1])}))
    assert "offers" in text
    assert "load 2.5 of 8, tags gpu, zone…" in text


def test_a_balanced_group_waits_for_nothing() -> None:
    balanced = state(resource("kept", "one", "one"), nodes=NODES[:1], balanced=True, drained=())
    assert plain(balanced) == [
        "orders: balanced, version 3, term 2, leader one, 1 node, 1 of 1 resource owned",
        "  one: leader, ready, holds 1 of 1 assigned",
    ]


def test_the_table_shows_what_each_node_holds_gets_and_gives_up() -> None:
    text = shown(MOVING)
    (one,) = [line for line in text.splitlines() if "★ one" in line]
    (two,) = [line for line in text.splitlines() if "two" in line and "│" in line]
    assert "● kept 7  ◌ moving 7  ○ orphan" in one
    assert "○ free  ◌ gone 7  ○ moving" in two
    assert "drained, rebalancing" in two


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


def test_what_moves_is_shown_though_not_all_fits() -> None:
    held = [resource(f"part-{number}", "one", "one") for number in range(500)]
    coming = resource("part-zzz", "one", None)
    text = "\n".join(screen(seeing(state(*held, coming, nodes=NODES[:1])), height=20, width=80))
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


FRESH, SILENT = LeaseAge(1.0, 10.0), LeaseAge(7.0, 10.0)


def group(owners: dict[str, str | None], *labels: str) -> GroupState:
    """A balanced group whose resources have these owners."""
    resources = (resource(name, owner, owner) for name, owner in owners.items())
    nodes = tuple(map(node, labels or sorted({owner for owner in owners.values() if owner})))
    return state(*resources, nodes=nodes, balanced=True, drained=())


def large(nodes: int, resources: int) -> GroupState:
    labels = [f"worker-{number:04}" for number in range(nodes)]
    return group({f"part-{n:05}": labels[n % nodes] for n in range(resources)}, *labels)


def picture(of: GroupState, moves: Moves | None = None, seen_at: float = 0.0) -> Picture:
    return Picture.of(of, seen_at, moves.see(of, seen_at) if moves else [])


def seeing(*states: GroupState) -> View:
    """A view that has seen these states, one after the other."""
    view, moves = View(), Moves()
    for second, each in enumerate(states):
        view.update(picture(each, moves, float(second)))
    return view


def screen(view: View, height: int = 24, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render_view(view, height))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert len(lines) <= height
    return lines


def press(view: View, *keys: str) -> None:
    for key in keys:
        assert view.press(key)


class TestMoves:
    def test_a_move_is_told_with_both_owners_and_when_it_was_seen(self) -> None:
        moves = Moves()
        assert moves.see(group({"a": "one", "b": "two"}), 1.0) == []
        (move,) = moves.see(group({"a": "two", "b": "two"}), 2.0)
        assert move == ObservedMove("a", "one", "two", token=7, seen_at=2.0)
        assert moves.see(group({"a": "two", "b": "two"}), 3.0) == []

    def test_the_owner_before_is_remembered_while_there_is_none(self) -> None:
        moves = Moves()
        moves.see(group({"a": "one"}), 1.0)
        assert moves.see(group({"a": None}, "two"), 2.0) == []
        assert moves.see(state(resource("a", "two", "dead"), nodes=(node("two"),)), 2.5) == []
        (move,) = moves.see(group({"a": "two"}), 3.0)
        assert (move.source, move.target) == ("one", "two")

    def test_a_return_is_no_move_and_a_first_owner_is_one(self) -> None:
        moves = Moves()
        moves.see(group({"a": "one", "b": None}), 1.0)
        moves.see(group({"a": None, "b": None}, "one"), 2.0)
        (move,) = moves.see(group({"a": "one", "b": "one"}), 3.0)
        assert (move.resource, move.source) == ("b", None)

    def test_what_was_removed_is_forgotten(self) -> None:
        moves = Moves()
        moves.see(group({"a": "one"}), 1.0)
        moves.see(group({}, "one"), 2.0)
        (move,) = moves.see(group({"a": "two"}), 3.0)
        assert move.source is None


class TestHeartbeats:
    def test_all_nodes_of_a_small_group_are_asked_for(self) -> None:
        nodes = [str(number) for number in range(MOST_ASKED)]
        assert HeartbeatAges().to_ask(nodes, ()) == nodes
        assert HeartbeatAges().to_ask([], ()) == []

    def test_the_nodes_of_a_large_group_are_asked_for_in_turn_those_in_sight_always(self) -> None:
        heartbeats = HeartbeatAges()
        nodes = [str(number) for number in range(1_000)]
        sight = nodes[500:530]
        asked: set[str] = set()
        for _ in range(11):  # (1,000 - 30) / (128 - 30), and one more as the 30 stand in the way
            some = heartbeats.to_ask(nodes, sight)
            assert len(some) == len(set(some)) == MOST_ASKED
            assert set(sight) <= set(some)
            asked.update(some)
        assert asked == set(nodes)

    def test_others_have_their_turn_though_many_are_silent(self) -> None:
        heartbeats = HeartbeatAges()
        nodes = [str(number) for number in range(1_000)]
        heartbeats.take(nodes, nodes, dict.fromkeys(nodes[:900], SILENT))
        asked = {node for _ in range(16) for node in heartbeats.to_ask(nodes, nodes[:40])}
        assert asked == set(nodes)

    def test_a_node_is_silent_until_it_is_heard_again_or_gone(self) -> None:
        heartbeats = HeartbeatAges()
        heartbeats.take("abc", "ab", {"a": SILENT, "b": FRESH})
        heartbeats.take("abc", "c", {"c": SILENT})
        assert set(heartbeats.silent) == {"a", "c"}
        assert set(heartbeats.ages) == {"c"}, "an age is only shown as it was just told"
        heartbeats.take("ab", "b", {"b": FRESH})
        assert set(heartbeats.silent) == {"a"}
        heartbeats.take("ab", "a", {"a": FRESH})
        assert heartbeats.silent == {}

    def test_a_registry_that_tells_nothing_is_known_as_such(self) -> None:
        heartbeats = HeartbeatAges()
        heartbeats.take("", "", {})
        assert heartbeats.told is None
        heartbeats.take("a", "a", {})
        assert heartbeats.told is False
        heartbeats.take("a", "a", {"a": FRESH})
        heartbeats.take("a", "a", {})
        assert heartbeats.told is True

    def test_half_a_lease_without_a_heartbeat_is_silence(self) -> None:
        heartbeats = HeartbeatAges()
        heartbeats.take("ab", "ab", {"a": replace(SILENT, age_s=5.0), "b": replace(SILENT, age_s=5.1)})
        assert set(heartbeats.silent) == {"b"}


class TestHearing:
    class Deaf(RegistryCoordinator):
        """Can't tell, for the reason given."""

        def __init__(self, error: RebalanserError) -> None:
            self._error = error

        def heartbeats(self, nodes: Sequence[str]) -> Mapping[str, LeaseAge]:
            raise self._error

    def test_a_registry_that_is_away_says_nothing(self) -> None:
        assert hear(self.Deaf(RegistryUnavailable("away")), ["a"]) is None

    def test_who_may_not_look_at_leases_is_told_none(self) -> None:
        assert hear(self.Deaf(AccessDenied("no")), ["a"]) == AgesRead(["a"], {})


class TestLines:
    def test_the_first_look_tells_all_the_next_ones_what_changed(self) -> None:
        moves = Moves()
        first = picture(group({"a": "one", "b": "two"}), moves)
        assert list(changed_lines(None, first)) == [
            "orders: balanced, version 3, term 2, leader one, 2 nodes, 2 of 2 resources owned",
            "  one: ready, holds 1 of 1 assigned",
            "  two: ready, holds 1 of 1 assigned",
        ]
        assert list(changed_lines(first, picture(group({"a": "one", "b": "two"}), moves))) == []
        second = picture(group({"a": "one", "b": "one"}, "one", "three"), moves)
        assert list(changed_lines(first, second)) == [
            "  three: ready, holds 1 of 1 assigned",
            "  two: gone",
            "  b: two → one, token 7",
        ]

    def test_a_node_is_printed_only_if_its_line_differs(self) -> None:
        released = node("one").model_copy(update={"released": ("a",)})
        before, after = state(nodes=(released,), drained=()), state(nodes=(node("one"),), drained=())
        assert list(changed_lines(picture(after), picture(before))) == ["  one has released a"]
        assert list(changed_lines(picture(before), picture(after))) == []
        drained = state(nodes=(node("one", drained=True),), drained=())
        assert list(changed_lines(picture(after), picture(drained))) == [
            "  one: drained, ready, holds 1 of 1 assigned"
        ]

    def test_a_wait_is_told_once(self) -> None:
        waiting = state(resource("a", "two", "one"), nodes=(node("one"), node("two")), drained=())
        lines = list(changed_lines(picture(group({"a": "one"}, "one", "two")), picture(waiting)))
        assert lines[0].startswith("orders: rebalancing")
        assert lines[1:] == ["  two waits for a, held by one"]
        assert list(changed_lines(picture(waiting), picture(waiting))) == []

    def test_silence_is_told_when_it_begins_and_ends(self) -> None:
        labels = {"1": "one", "2": "two"}
        assert list(changed_silence(labels, {}, {"1": SILENT})) == [
            "  one: no heartbeat for 7 s, its lease ends after 10 s"
        ]
        assert list(changed_silence(labels, {"1": SILENT}, {"1": SILENT})) == []
        assert list(changed_silence(labels, {"1": SILENT, "3": SILENT}, {})) == ["  one: heartbeats again"]


class TestTable:
    def test_ages_of_heartbeats_are_shown_and_silence_with_its_lease(self) -> None:
        view = seeing(group({"a": "one", "b": "two", "c": "three"}, "one", "two", "three"))
        view.hear(["one-id", "two-id"], {"one-id": FRESH, "two-id": SILENT})
        text = screen(view)
        assert "1 s ago" in next(line for line in text if "● a" in line)
        assert "7 of 10 s" in next(line for line in text if "● b" in line)
        assert "—" in next(line for line in text if "● c" in line)
        assert "  nodes 1 to 3 of 3; 1 silent" in text

    def test_a_registry_that_can_not_tell_is_named(self) -> None:
        view = seeing(group({"a": "one"}))
        view.hear(["one-id"], {})
        assert "  nodes 1 to 1 of 1; this registry reports no heartbeats" in screen(view)

    def test_waits_and_moves_stand_below_and_what_is_left_out_is_counted(self) -> None:
        names = [f"r{number}" for number in range(9)]
        before = group(dict.fromkeys(names, "one"), "one", "two")
        moved = dict.fromkeys(names, "two")
        now = state(
            *(resource(name, owner, owner) for name, owner in moved.items()),
            *(resource(f"free{n}", "one", None, reason=f"reason {n}") for n in range(6)),
            nodes=(node("one"), node("two")),
            drained=(),
        )
        text = screen(seeing(before, now), height=30)
        assert len([line for line in text if line.startswith("  nobody owns")]) == 3
        assert "  and 3 more" in text
        assert len([line for line in text if "one → two" in line]) == 3
        assert "  and 6 more" in text

    def test_before_the_first_look_only_the_reason_is_shown(self) -> None:
        view = View()
        view.error = "no answer"
        assert screen(view) == ["no answer", "reading the group"]
        assert view.press("page down")

    def test_an_error_stays_until_the_next_look(self) -> None:
        view = seeing(group({"a": "one"}))
        view.error = "this may be out of date: no answer"
        assert "this may be out of date: no answer" in screen(view)
        view.update(picture(group({"a": "one"})))
        assert not any("out of date" in line for line in screen(view))

    @pytest.mark.parametrize(("nodes", "resources"), [(0, 5), (1, 500), (30, 500), (1_000, 5_000)])
    @pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12)])
    @pytest.mark.parametrize("page", list(WatchPage))
    def test_every_page_stays_within_the_terminal(
        self, nodes: int, resources: int, size: tuple[int, int], page: WatchPage
    ) -> None:
        free = state(*(resource(f"r{n}", None, None, reason=f"{n}") for n in range(resources)), nodes=())
        view = seeing(large(nodes, resources) if nodes else free)
        view.page = page
        width, height = size
        for key in ("page down", "end", "home", "/", "1"):
            press(view, key)
            screen(view, height, width)


class TestKeys:
    def test_sequences_of_the_terminal_are_named(self) -> None:
        sent = "\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1b[4~\x1b[Z\tq/é\r\x7f\x1b[15~\x1b[1;5C\x1b"
        assert keys_in(sent) == [
            *("up", "down", "page up", "page down", "home", "end", "back tab", "tab"),
            *("q", "/", "é", "enter", "backspace", "escape"),
        ]

    def test_q_leaves_unless_a_filter_is_typed(self) -> None:
        view = seeing(group({"a": "one"}))
        assert not view.press("q")
        press(view, "/", "q")
        assert view.pattern == "q"
        press(view, "enter")
        assert not view.press("q")

    def test_keys_scroll_through_all_nodes(self) -> None:
        view = seeing(large(100, 1_000))
        seen: set[str] = set()
        first = screen(view)
        assert "  nodes 1 to 15 of 100" in first
        for _ in range(100):
            seen.update(line.split()[1] for line in screen(view) if "worker" in line)
            press(view, "page down")
        assert len(seen) == 100
        assert "  nodes 86 to 100 of 100" in screen(view)
        press(view, "up")
        assert "  nodes 85 to 99 of 100" in screen(view)
        press(view, "down", "down", "page up")
        assert "  nodes 72 to 86 of 100" in screen(view)
        press(view, "home")
        assert screen(view) == first
        press(view, "end")
        assert "  nodes 86 to 100 of 100" in screen(view)

    def test_nodes_that_are_not_well_come_first_when_not_all_fit(self) -> None:
        group = large(100, 100)
        late = tuple(
            each.model_copy(update={"completed": each.label != "worker-0077"}) for each in group.nodes
        )
        view = seeing(group.model_copy(update={"nodes": late}))
        screen(view)
        view.hear(["worker-0055-id"], {"worker-0055-id": SILENT})
        labels = [line.split()[1] for line in screen(view) if "worker" in line]
        assert labels[:3] == ["worker-0055", "worker-0077", "worker-0000"]
        assert "worker-0055-id" in view.shown_nodes()

    def test_tab_goes_through_the_pages_each_with_its_own_position(self) -> None:
        view = seeing(large(100, 1_000), group({f"part-{n:05}": "one" for n in range(1_000)}))
        screen(view)
        for page, line in [
            (WatchPage.RESOURCES, "  resources 1 to 20 of 1,000"),
            (WatchPage.MOVES, "  moves 1 to 20 of 1,000"),
            (WatchPage.WAITS, "  nothing"),
            (WatchPage.NODES, "  nodes 1 to 1 of 1"),
        ]:
            press(view, "tab")
            assert view.page is page
            assert line in screen(view)
        press(view, "tab")
        screen(view)
        press(view, "page down")
        assert "  resources 20 to 39 of 1,000" in screen(view)
        press(view, "back tab", "tab")
        assert "  resources 20 to 39 of 1,000" in screen(view)

    def test_a_filter_finds_nodes_by_label_and_by_resource(self) -> None:
        view = seeing(large(100, 1_000))
        press(view, "/", *"ER-0042")
        text = screen(view)
        assert "  nodes 1 to 1 of 1 with 'ER-0042'" in text
        assert text[-1].startswith("/ER-0042")
        press(view, "escape", "/", *"part-00777", "enter")
        text = screen(view)
        assert any("● part-00777 7" in line for line in text)
        assert any("and 9 more" in line for line in text)
        assert not any("part-00077" in line for line in text)
        press(view, "escape")
        assert view.pattern == ""
        press(view, "/", "x", "y", "backspace", "up")
        assert view.pattern == "x"

    def test_a_filter_holds_on_every_page(self) -> None:
        owners = {f"part-{n}": "one" for n in range(30)}
        view = seeing(group(owners), group({**owners, "part-7": "two", "part-8": "two"}))
        view.page = WatchPage.RESOURCES
        press(view, "/", *"two")
        assert "  resources 1 to 2 of 2 with 'two'" in screen(view)
        press(view, "enter", "tab")
        assert "  moves 1 to 2 of 2 with 'two'" in screen(view)

    def test_a_position_stays_within_what_is_left(self) -> None:
        view = seeing(large(100, 100))
        screen(view)
        press(view, "end")
        view.update(picture(large(20, 100)))
        assert "  nodes 6 to 20 of 20" in screen(view)
        press(view, "/", "z")
        assert "  nothing with 'z'" in screen(view)

    def test_moves_that_are_forgotten_are_counted(self) -> None:
        names = [f"r{n}" for n in range(MOST_MOVES + 5)]
        view = seeing(group(dict.fromkeys(names, "one")), group(dict.fromkeys(names, "two")))
        view.page = WatchPage.MOVES
        assert "  moves 1 to 20 of 10,000; 5 earlier ones are forgotten" in screen(view)
