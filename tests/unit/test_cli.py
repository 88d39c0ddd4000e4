"""The command line, called in this process: what each command answers, and what bad input gets."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, cast

import pytest
import typer

import rebalanser
from rebalanser.admin import Admin
from rebalanser.cli import application, check, main, output
from rebalanser.cli.commands import Commands
from rebalanser.cli.output import Face, default_url
from rebalanser.core.group import Member
from rebalanser.core.group.messages import Join, Joined, Leave
from rebalanser.errors import InternalError, OutcomeUnknown, RegistryUnavailable, UnknownGroup
from rebalanser.group import Group, open_coordinator
from rebalanser.registry import GroupStore, RegistryCoordinator, open_registry
from rebalanser.registry.contract import Delete, Grant, Granted, Put, Transaction
from rebalanser.registry.urls import parse_url
from rebalanser.runtime import dead_man, narration
from rebalanser.runtime.clock import SystemClock
from rebalanser.settings import Settings
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rebalanser.registry import Coordinator, RegistryUrl
    from rebalanser.registry.contract import Capabilities, Registry, Reply, Request


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)


class Cli(Protocol):
    def __call__(self, *arguments: str) -> Answer: ...


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Cli:
    """The command line over a memory registry of the test's own."""
    monkeypatch.setenv("REBALANSER_REGISTRY", f"memory://{request.node.nodeid}")

    def call(*arguments: str) -> Answer:
        code = main(arguments)
        return Answer(code, *capsys.readouterr())

    return call


def refused(answer: Answer, code: int, *fragments: str) -> None:
    """One line on standard error, none on standard output."""
    assert answer.code == code, answer
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    for fragment in fragments:
        assert fragment in answer.err


@pytest.mark.rule("RB-29")
def test_resources_are_added_listed_and_removed(cli: Cli) -> None:
    assert cli("resources", "add", "orders", "b", "a", "c").out == "added 3 resources\n"
    assert cli("resources", "add", "orders", "c", "d").out == "added 1 resource; 1 was there already\n"
    assert cli("resources", "list", "orders").out == "".join(f"{name}: no owner\n" for name in "abcd")
    assert cli("resources", "remove", "orders", "a", "x", "y").out == "removed 1 resource; 2 were not there\n"
    assert cli("resources", "remove", "orders", "b", "--json").document == {
        "group": "orders",
        "given": 1,
        "removed": 1,
    }
    listed = cli("resources", "list", "orders", "--json").document
    assert [resource["resource"] for resource in listed["resources"]] == ["c", "d"]


@pytest.mark.rule("RB-29")
def test_resources_are_weighed_pinned_and_described_at_any_time(cli: Cli) -> None:
    cli("resources", "add", "orders", "a")
    answer = cli(
        *("resources", "add", "orders", "a", "--weight", "2.5", "--pin", "worker 1"),
        *("--attribute", "zone=eu=1", "--attribute", "owner=", "--json"),
    )
    assert answer.document == {"group": "orders", "given": 1, "added": 0}
    (resource,) = cli("resources", "list", "orders", "--json").document["resources"]
    assert (resource["weight"], resource["pin"]) == (2.5, "worker 1")
    assert resource["attributes"] == {"zone": "eu=1", "owner": ""}
    line = "a: no owner, weight 2.5, pinned to worker 1, owner=, zone=eu=1\n"
    assert cli("resources", "list", "orders").out == line
    cli("resources", "add", "orders", "a")
    assert cli("resources", "list", "orders").out == line, "adding it again wipes nothing"
    cli("resources", "add", "orders", "a", "--unpin", "--weight", "1")
    assert cli("resources", "list", "orders").out == "a: no owner, owner=, zone=eu=1\n"
    refused(cli("resources", "add", "orders", "a", "--unpin", "--pin", "x"), 2, "exclude each other")


@pytest.mark.rule("RB-29")
def test_needs_and_spreads_are_set_and_cleared(cli: Cli) -> None:
    cli("resources", "add", "orders", "a", "--needs", "ssd", "--needs", "gpu", "--spread", "db")
    assert cli("resources", "list", "orders").out == "a: no owner, needs gpu,ssd, spread db\n"
    both = cli("resources", "add", "orders", "a", "--needs", "gpu,ssd")
    refused(both, 3, "tag 'gpu,ssd' has a comma or a semicolon: give each tag by itself")
    cli("resources", "add", "orders", "a", "--no-needs", "--weight", "2")
    assert cli("resources", "list", "orders").out == "a: no owner, weight 2, spread db\n"
    cli("resources", "add", "orders", "a", "--no-spread")
    assert cli("resources", "list", "orders").out == "a: no owner, weight 2\n"


CSV = '\nname, weight, needs,spread,pin\na, 2.5,gpu; ssd,db,\n"b,c",,,, w1\n\nd,,,,\n'
JSONL = (
    '{"name": "a", "weight": 2.5, "needs": ["gpu", "ssd"], "spread": "db"}\n\n'
    '{"name": "b,c", "pin": "w1"}\n{"name": "d"}\n'
)


@pytest.mark.rule("RB-29")
@pytest.mark.parametrize(("name", "content"), [("r.csv", "\ufeff" + CSV), ("r.jsonl", JSONL)])
def test_what_is_said_of_each_resource_comes_from_a_file(
    cli: Cli, tmp_path: Path, name: str, content: str
) -> None:
    cli("resources", "add", "orders", "a", "--pin", "stays")
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    answer = cli("resources", "add", "orders", "--from", str(file), "--weight", "3")
    assert answer.out == "added 2 resources; 1 was there already\n"
    assert cli("resources", "list", "orders").out == (
        "a: no owner, weight 2.5, pinned to stays, needs gpu,ssd, spread db\n"
        "b,c: no owner, weight 3, pinned to w1\nd: no owner, weight 3\n"
    )


@pytest.mark.rule("RB-29")
@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("r.csv", b"name,wieght\na,2\n", "line 1: 'wieght' is not a column"),
        ("r.csv", b"name,name\na,2\n", "line 1: column 'name' is given twice"),
        ("r.csv", b"", "the line of columns is missing"),
        ("r.csv", b"\nnam\na\n", "line 2: 'nam' is not a column"),
        ("r.csv", b"weight\n2\n", "line 2: it has no name"),
        ("r.csv", b"name,weight\na,2\nb\n", "line 3: 1 cells for 2 columns"),
        ("r.csv", b"name,weight\na,heavy\n", "line 2: weight: 'heavy' is not a number"),
        ("r.csv", b"name,weight\nb,1\na,inf\n", "resource 'a': weight: Input should be a finite number"),
        ("r.csv", b"name,weight\nb,1\na,-1\n", "resource 'a': weight: Input should be greater than 0"),
        ("r.csv", b"name,needs\na,x;;y\n", "resource 'a': a tag name must not be empty"),
        ("r.csv", b"name\na\na\n", "line 3: 'a' is given twice, first as line 2"),
        ("r.csv", b'name\n"a\n', "unexpected end of data"),
        ("r.csv", b"name\n\xff\n", "is not UTF-8 text"),
        ("r.jsonl", b'{"name": "a"}\nb\n', "line 2: it is not JSON"),
        ("r.jsonl", b'["a"]\n', "line 1: it is not a JSON object"),
        ("r.jsonl", b'{"name": 5}\n', "line 1: a resource name is text, not int"),
        ("r.jsonl", b'{"name": "a", "weihgt": 1}\n', "'a': weihgt: no resource has such a field; is weight"),
        (
            "r.jsonl",
            b'{"name": "a", "weight": "1"}\n',
            "resource 'a': weight: Input should be a valid number",
        ),
    ],
)
def test_one_bad_line_of_a_file_changes_nothing(
    cli: Cli, tmp_path: Path, name: str, content: bytes, fragment: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    refused(cli("resources", "add", "orders", "--from", str(file)), 3, fragment)
    assert cli("resources", "list", "orders").out == ""


def test_the_policy_of_a_group_is_set_and_shown(cli: Cli) -> None:
    refused(cli("group", "show", "orders"), 3, "no such group: 'orders'")
    refused(cli("group", "set", "orders", "--max-moves", "3"), 3, "no such group: 'orders'")
    cli("resources", "add", "orders", "a")
    assert cli("group", "show", "orders").out == (
        "orders: resources with the same spread are on distinct nodes\n"
        "  imbalance band 0, any number of moves for a better balance in one rebalance\n"
        "  at least 0 s between such rebalances, and 0 s between such moves of one resource\n"
    )
    answer = cli("group", "set", "orders", "--spread-over", "zone", "--max-moves", "3", "--cooldown", "60")
    assert answer.out == (
        "orders: resources with the same spread are in distinct zones\n"
        "  imbalance band 0, at most 3 moves for a better balance in one rebalance\n"
        "  at least 0 s between such rebalances, and 60 s between such moves of one resource\n"
    )
    policy = {
        "spread_over": "zone",
        "imbalance_band": 0.1,
        "max_moves": None,
        "move_interval_s": 5.0,
        "cooldown_s": 60.0,
    }
    changes = ("--any-moves", "--imbalance-band", "0.1", "--move-interval", "5", "--json")
    assert cli("group", "set", "orders", *changes).document == {"group": "orders", "policy": policy}
    assert cli("group", "show", "orders", "--json").document == {"group": "orders", "policy": policy}
    refused(cli("group", "set", "orders", "--imbalance-band", "nan"), 3, "imbalance_band: ", "finite")
    assert cli("status", "orders", "--json").document["policy"] == policy


@pytest.mark.rule("RB-30")
def test_nodes_are_drained_by_what_they_are(cli: Cli) -> None:
    cli("resources", "add", "orders", "a")
    url = os.environ["REBALANSER_REGISTRY"]
    members = [
        Member("1", "w1", zone="eu-1", attributes={"version": "1.4"}),
        Member("2", "w2", zone="eu-1", attributes={"version": "1.5"}),
        Member("3", "w3", zone="eu-2", attributes={"version": "1.4"}, capacity=2.0, tags=frozenset({"gpu"})),
    ]
    with closing(open_coordinator("orders", url, Settings(), SystemClock())) as coordinator:
        for member in members:
            assert isinstance(coordinator.perform(Join(member, 60.0)), Joined)
        listed = cli("node", "list", "orders").out.splitlines()
        assert listed[2] == "w3: rebalancing, holds 0 of 0 assigned, load 0 of 2, tags gpu, zone eu-2"
        answer = cli("node", "drain", "orders", "--where", "zone=eu-1")
        assert answer.out == "2 labels (w1, w2) are drained; they hold 0 resources now\n"
        cli("node", "undrain", "orders", "--where", "zone=eu-1")
        one = cli("node", "undrain", "orders", "--where", "label=w1")
        assert one.out == "1 label (w1) is undrained; it holds 0 resources now\n"
        for empty in ("zone=", "version="):
            refused(cli("node", "drain", "orders", "--where", empty), 2, f"{empty} has no value")
        both = ("--where", "zone=eu-1", "--where", "version=1.4")
        assert cli("node", "drain", "orders", *both, "--json").document == {
            "group": "orders",
            "nodes": ["w1"],
            "drained": True,
            "live": True,
            "held": 0,
        }
        assert cli("status", "orders", "--json").document["drained"] == ["w1"]
        nobody = cli("node", "drain", "orders", "--where", "label=w9")
        refused(
            nobody, 3, "no live node of orders has label=w9 as its label, zone or attributes; nothing was"
        )
        coordinator.perform(Join(Member("4", "w2", zone="eu-2"), 60.0))
        mixed = cli("node", "drain", "orders", "--where", "zone=eu-1")
        refused(mixed, 3, "the label w2 not all have zone=eu-1", "nothing was changed")
        assert cli("status", "orders", "--json").document["drained"] == ["w1"]


@pytest.fixture
def three_nodes(cli: Cli) -> Iterator[Coordinator]:
    """Three members of the group "orders", which has no leader."""
    cli("resources", "add", "orders", "a", "b", "c")
    members = [
        Member("1", "w1", zone="eu-1"),
        Member("2", "w2", zone="eu-1"),
        Member("3", "w3", zone="eu-2", tags=frozenset({"gpu"})),
    ]
    url = os.environ["REBALANSER_REGISTRY"]
    with closing(open_coordinator("orders", url, Settings(), SystemClock())) as coordinator:
        for member in members:
            assert isinstance(coordinator.perform(Join(member, 60.0)), Joined)
        yield coordinator


@pytest.mark.rule("RB-35")
@pytest.mark.usefixtures("three_nodes")
def test_a_change_is_planned_and_not_made(cli: Cli, tmp_path: Path) -> None:
    before = cli("status", "orders", "--json").out
    pause = "the larger of settle_time_s 0 and min_rebalance_interval_s 0.1 of the leader, from the change on"
    to_come = "w4,capacity=2,tags=gpu;ssd,zone=eu-3"
    answer = cli("plan", "orders", "--add-node", to_come, "--remove-node", "w2")
    assert answer == Answer(0, answer.out, "")
    assert answer.out.splitlines() == [
        "orders: 3 resources would get a node, 0 would have none",
        "  largest load per capacity 0 now, 0.5 then; no allocation gets below 0.5",
        "moves:",
        "  3, no node -> w1 1, w3 1, w4 1 (it had no node): a, b, c",
        "unowned by this process's settings, without requests to the registry and OnStart:",
        f"  up to 0.1 s: 3 resources without an owner before ({pause})",
        "nodes:",
        "  w1: 0 -> 1 resource, load 0 -> 1",
        "  w2: removed, 0 -> 0 resources, load 0 -> 0",
        "  w3: 0 -> 1 resource, load 0 -> 1",
        "  w4: added, 0 -> 1 resource, load 0 -> 1 of 2",
        "note: the group is not balanced now: moves that are due without the change are among these",
        "note: the group has no leader now: nothing moves until one is elected",
        "note: ids decide between nodes that are equally good, and a node to come gets its id when it joins",
    ]
    rows = tmp_path / "rows.csv"
    rows.write_text("name,weight,needs\nd,2,gpu\ne,,tpu\n")
    options = ("--from", str(rows), "--weight", "4", "--set-weight", "a=3", "--set-pin", "b=w2", "--where")
    answer = cli("plan", "orders", *options, "zone=eu-1", "--undrain", "w3", "--remove", "c", "--json")
    assert answer.code == 2
    assert {each["resource"]: each["reason"] for each in answer.document["unplaced"]} == {
        "b": "pinned to w2, which is not there or is drained",
        "e": "no node has the tag tpu",
    }
    assert {each["resource"]: each["target"] for each in answer.document["moves"]} == {"a": "w3", "d": "w3"}
    assert [(each["label"], each["change"]) for each in answer.document["nodes"]] == [
        ("w1", "drained"),
        ("w2", "drained"),
        ("w3", None),
    ]
    assert answer.document["largest_after"] == 5.0
    assert cli("plan", "orders", "--drain", "w1", "--drain", "w2", "--drain", "w3").code == 2
    assert cli("status", "orders", "--json").out == before


@pytest.mark.rule("RB-35")
@pytest.mark.usefixtures("three_nodes")
def test_a_long_plan_is_shortened(cli: Cli) -> None:
    cli("resources", "add", "orders", *(f"r{number:02}" for number in range(60)))
    lines = cli("plan", "orders", "--limit", "2").out.splitlines()
    assert "  63, no node -> w1 21, w2 21, w3 21 (it had no node): a, b, c, r00, r01 and 58 more" in lines
    at = lines.index("nodes:")
    assert lines[at + 1 : at + 4] == [
        "  w1: 0 -> 21 resources, load 0 -> 21",
        "  w2: 0 -> 21 resources, load 0 -> 21",
        "  and 1 more",
    ]


@pytest.mark.rule("RB-35")
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--set-weight", "a=many"), 2, "the weight of 'a' is 'many': give a number"),
        (("--set-weight", "a"), 2, "'a' is not KEY=VALUE"),
        (("--set-weight", "a=0"), 3, "greater than 0"),
        (("--set-weight", "a=nan"), 3, "finite"),
        (("--set-weight", "z=1"), 3, "there is no resource 'z'; nothing was planned"),
        (("--weight", "2"), 2, "need --add or --from"),
        (("--add", "z", "--weight", "-1"), 3, "resource 'z': weight: "),
        (("--add", "z", "--add", "z"), 2, "--add has a resource twice"),
        (("--add", "a", "--remove", "a"), 3, "'a' can't be added and removed in one plan"),
        (("--set-pin", "a=w1", "--clear-pin", "a"), 2, "the pin of 'a' is given twice"),
        (("--max-moves", "1", "--any-moves"), 2, "exclude each other"),
        (("--undrain-where", "zone"), 2, "'--undrain-where': 'zone' is not KEY=VALUE"),
        (("--drain", "w9"), 3, "there is no live node with the label 'w9'; nothing was planned"),
        (("--remove-node", "w9"), 3, "there is no live node with the label 'w9'"),
        (("--where", "zone=eu-9"), 3, "no live node of orders has zone=eu-9"),
        (("--where", "zone=eu-1", "--undrain", "w1"), 3, "'w1' can't be drained and undrained in one plan"),
        (("--add-node", "w4,size=2"), 3, "node 'w4': size: give any of capacity, tags, zone, mode"),
        (("--add-node", "w4,capacity=none"), 3, "node 'w4': capacity: "),
        (("--add-node", "w4", "--add-node", "w4"), 2, "'w4' is given twice"),
    ],
)
@pytest.mark.usefixtures("three_nodes")
def test_a_bad_plan_is_refused(cli: Cli, options: tuple[str, ...], code: int, message: str) -> None:
    refused(cli("plan", "orders", *options), code, message)


@pytest.mark.rule("RB-35")
def test_a_resource_is_explained(cli: Cli, three_nodes: Coordinator) -> None:
    refused(cli("explain", "nowhere", "a"), 3, "no such group: 'nowhere'")
    refused(cli("explain", "orders", "z"), 3, "there is no resource 'z'")
    cli("resources", "add", "orders", "g", "--needs", "gpu")
    for number in range(6):
        three_nodes.perform(Join(Member(f"x{number}", f"x{number}"), 60.0))
    answer = cli("explain", "orders", "g")
    assert answer.out.splitlines() == [
        "g: no owner",
        "  why: the group has no leader",
        "  waits: the group has no leader",
        "  not on w1, w2, x0, x1, x2 and 3 more: it lacks the tag gpu",
    ]
    document = cli("explain", "orders", "g", "--json").document
    assert (document["owner"], document["next"], len(document["nodes"])) == (None, "w3", 8)


@pytest.mark.rule("RB-29")
def test_names_come_from_a_file_and_from_standard_input(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "names"
    names.write_bytes("a b\r\nä\n# c".encode())
    assert cli("resources", "add", "orders", "z", "--file", str(names)).out == "added 4 resources\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"y\nx\n")))
    assert cli("resources", "add", "orders", "--file", "-").out == "added 2 resources\n"
    listed = cli("resources", "list", "orders", "--json").document["resources"]
    assert {resource["resource"] for resource in listed} == {"a b", "ä", "# c", "x", "y", "z"}


@pytest.mark.full_size
@pytest.mark.rule("RB-29", "RB-33")
@pytest.mark.parametrize("command", ["add", "remove"])
def test_a_million_names_with_one_bad_line_change_nothing(cli: Cli, tmp_path: Path, command: str) -> None:
    cli("resources", "add", "orders", "name-1")
    names = [f"name-{number}" for number in range(1, 1_000_001)]
    names[999_998] = "tab\tinside"
    file = tmp_path / "names"
    file.write_text("\n".join(names))
    answer = cli("resources", command, "orders", "--file", str(file))
    refused(answer, 3, "line 999999:", "'tab\\tinside'", "unprintable", "nothing was changed")
    assert cli("resources", "list", "orders").out == "name-1: no owner\n"


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"a\nb\na\n", "line 3: 'a' is given twice, first as line 1"),
        (b"a\n\nb\n", "line 2: a resource name must not be empty"),
        (b"a\n" + b"x" * 513, "line 2: resource name 'xxxx"),
        (b"a\n\xff\n", "line 2: it is not UTF-8 text"),
        (b"given\n", "line 1: 'given' is given twice, first as name 1"),
    ],
)
def test_a_bad_line_is_named(cli: Cli, tmp_path: Path, content: bytes, fragment: str) -> None:
    file = tmp_path / "names"
    file.write_bytes(content)
    answer = cli("resources", "add", "orders", "given", "--file", str(file))
    refused(answer, 3, fragment, "nothing was changed")
    assert cli("resources", "list", "orders").out == ""


@pytest.mark.rule("RB-33")
@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (("resources", "add", "orders", ""), 3, "must not be empty"),
        (("resources", "add", "orders", "a\x07"), 3, "unprintable"),
        (("resources", "add", "orders", "\udcff"), 3, "unprintable"),
        (("resources", "add", "orders", "ü" * 257), 3, "514 bytes; the limit is 512"),
        (("resources", "add", "orders", "a", "a"), 3, "given twice"),
        (("resources", "add", "", "a"), 3, "a group name must not be empty"),
        (("resources", "add", "orders", "a", "--pin", ""), 3, "a node name must not be empty"),
        (("resources", "add", "orders", "a", "--weight", "0"), 3, "weight"),
        (("resources", "add", "orders", "a", "--weight", "nan"), 3, "weight"),
        (("resources", "add", "orders", "a", "--weight", "many"), 2, "--weight"),
        (("resources", "add", "orders", "a", "--attribute", "zone"), 2, "'zone' is not KEY=VALUE"),
        (("resources", "add", "orders", "a", "--attribute", "=x"), 3, "attribute name must not be empty"),
        (("resources", "add", "orders", "a", "--attribute", f"k={'v' * 4097}"), 3, "the limit is 4096"),
        (("resources", "add", "orders", "a", "--attribute", "k=1", "--attribute", "k=2"), 3, "given twice"),
        (("resources", "add", "orders"), 2, "no resources: give names"),
        (("resources", "add", "orders", "--file", "/nowhere/names"), 2, "No such file"),
        (("node", "drain", "orders", "\n"), 3, "unprintable"),
        (("node", "drain", "orders"), 2, "name a NODE, or describe nodes with --where"),
        (("node", "drain", "orders", "n", "--where", "zone=z"), 2, "name a NODE, or describe nodes with"),
        (("node", "drain", "orders", "--where", "zone"), 2, "'zone' is not KEY=VALUE"),
        (("node", "drain", "orders", "--where", "a=1", "--where", "a=2"), 2, "'a=2' is given twice"),
        (("resources", "add", "orders", "a", "--needs", ""), 3, "a tag name must not be empty"),
        (("resources", "add", "orders", "a", "--needs", "x", "--needs", "x"), 3, "tag 'x' is given twice"),
        (("resources", "add", "orders", "a", "--needs", "x", "--no-needs"), 2, "exclude each other"),
        (("resources", "add", "orders", "a", "--spread", "x", "--no-spread"), 2, "exclude each other"),
        (("resources", "add", "orders", "a", "--from", "x.csv"), 2, "--from excludes names and --file"),
        (("resources", "add", "orders", "--from", "x.csv"), 2, "x.csv can't be read: No such file"),
        (("resources", "add", "orders", "--from", "x.txt"), 2, "x.txt ends neither in .csv nor in .jsonl"),
        (("group", "set", "orders"), 2, "nothing to change; give an option"),
        (("group", "set", "orders", "--max-moves", "1", "--any-moves"), 2, "exclude each other"),
        (("group", "set", "orders", "--max-moves", "x"), 2, "max-moves"),
        (("group", "set", "orders", "--spread-over", "rack"), 2, "'node', 'zone'"),
        (("status",), 2, "Missing argument 'GROUP'"),
        (("status", "orders", "--jsn"), 2, "--jsn"),
        (("status", "orders", "payments"), 2, "payments"),
        (("statu", "orders"), 2, "statu"),
        (("watch", "orders", "--interval", "0"), 2, "--interval"),
        (("run", "orders"), 2, "COMMAND"),
        (("run", "orders", "--", "no-such-command-anywhere"), 2, "no-such-command-anywhere"),
        (("run", "orders", "--restart", "maybe", "--", "true"), 2, "maybe"),
        (("run", "orders", "--add", "a", "--add", "a", "--", "true"), 3, "given twice"),
        (("run", "orders", "--add", "a", "--node", "", "--", "true"), 3, "a node name must not be empty"),
    ],
)
def test_bad_input_gets_one_line(cli: Cli, arguments: tuple[str, ...], code: int, fragment: str) -> None:
    refused(cli(*arguments), code, fragment)
    assert cli("resources", "list", "orders").out == ""


@pytest.mark.parametrize(
    ("url", "fragments"),
    [
        (
            "zookeeper://127.0.0.1:1/x",
            ["no backend for zookeeper://", "etcd, etcd+srv, etcd+tls, etcd+tls+srv, kafka, memory, sqlite"],
        ),
        ("kafka://127.0.0.1:1/a*b", ["'a*b' in kafka://127.0.0.1:1/a*b cannot name a cluster"]),
        ("groups.db", ["is not a registry URL such as sqlite:///groups.db"]),
        ("etcd://127.0.0.1", ["is not HOST:PORT"]),
        ("etcd+tls://127.0.0.1:1?ca=", ["option 'ca' has no value"]),
        ("sqlite:///groups.db?file_mode=", ["option 'file_mode' has no value in the URL sqlite://…"]),
        *(
            (
                f"etcd+srv://{there}/x",
                [f"domain name without a port, such as etcd+srv://example.org, not '{shown}'; for addresses"],
            )
            for there, shown in [
                ("a.test:2379", "a.test:***"),
                ("a.test,b.test", "a.test,b.test"),
                ("127.0.0.1", "127.0.0.1"),
                ("127.0.0.1:2379", "127.0.0.1:***"),
                ("[::1]", "[::1]"),
                ("[::1]:2379", "[::1]:***"),
                ("", ""),
            ]
        ),
        (
            "etcd+tls+srv://127.0.0.1/x",
            ["such as etcd+tls+srv://example.org", "for addresses use etcd+tls://"],
        ),
        ("sqlite://", ["names no file"]),
        ("sqlite:////nowhere/at/all/groups.db", ["there is no folder /nowhere/at/all"]),
        ("memory://", ["memory://test"]),
    ],
)
def test_a_bad_registry_gets_one_line(cli: Cli, url: str, fragments: list[str]) -> None:
    refused(cli("status", "orders", "--registry", url), 3, *fragments)
    document = cli("status", "orders", "--registry", url, "--json").document
    assert document["exit_code"] == 3
    assert fragments[0] in document["error"]


def test_a_registry_that_is_given_as_nothing_is_not_the_default_one(cli: Cli) -> None:
    refused(cli("resources", "add", "orders", "a", "--registry", ""), 3, "'' is not a registry URL")


@pytest.mark.parametrize(
    ("arguments", "help_of"),
    [(("statu",), "rebalanser"), (("resources", "add"), "rebalanser resources add"), (("run", "g"), "run")],
)
def test_a_wrong_use_names_the_help_to_read(cli: Cli, arguments: tuple[str, ...], help_of: str) -> None:
    refused(cli(*arguments), 2, f"{help_of} --help")


@pytest.mark.parametrize("arguments", [(), ("resources",), ("node",)])
def test_a_command_group_alone_shows_its_help_and_no_error(cli: Cli, arguments: tuple[str, ...]) -> None:
    answer = cli(*arguments)
    assert (answer.code, answer.err) == (2, "")
    assert "Usage: rebalanser" in answer.out


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_answer_that_can_not_be_written_is_no_fault_of_ours(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, as_json: list[str]
) -> None:
    def refuse(_text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    cli("resources", "add", "orders", "a")
    monkeypatch.setattr(sys.stdout, "write", refuse)
    answer = cli("status", "orders", *as_json)
    refused(answer, 3, "can't be written: No space left on device")


def test_a_file_that_is_no_database_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "groups.db"
    path.write_text("important notes\n" * 100)
    refused(cli("resources", "add", "orders", "a", "--registry", f"sqlite:///{path}"), 3, str(path))
    assert path.read_text() == "important notes\n" * 100


@pytest.mark.rule("RB-21")
@pytest.mark.parametrize(
    ("variable", "value", "fragments"),
    [
        ("STOP_TIMEOUT_S", "20", ["OnStop could not return before the lease ends", "= 25.", "is 10"]),
        ("LEASE_TTL_S", "0.01", ["lease_ttl_s 0.01 is below the 0.1 s"]),
        ("LEASE_TTL_S", "-1", ["lease_ttl_s", "greater than 0", "-1"]),
        ("LEASE_TTL_S", "ten", ["lease_ttl_s", "'ten'"]),
        ("MODE", "greedy", ["mode", "'greedy'"]),
    ],
)
def test_settings_that_cannot_hold_are_refused_with_the_numbers(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fragments: list[str]
) -> None:
    monkeypatch.setenv(f"REBALANSER_{variable}", value)
    refused(cli("run", "orders", "--add", "a", "--", "true"), 3, *fragments)
    report = cli("check", "orders", "--json")
    assert report.code == 1
    (failed,) = [each for each in report.document["findings"] if each["verdict"] == "failed"]
    assert fragments[0] in failed["detail"] or value in failed["detail"]


@pytest.mark.rule("RB-19")
def test_the_state_of_a_group_can_be_asked_for(cli: Cli) -> None:
    cli("resources", "add", "orders", "a", "b")
    cli("resources", "add", "orders", "c", "--pin", "worker-9")
    answer = cli("status", "orders")
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "orders: nobody takes part, version 0, term 0, leader none, 0 nodes, 0 of 3 resources owned",
        "  nobody owns a, b, c: no node takes part",
    ]
    assert cli("status", "orders", "--exit-code").code == 1
    state = cli("status", "orders", "--json", "--exit-code")
    assert state.code == 1
    assert state.document["balanced"] is False
    assert len(state.document["resources"]) == 3


def test_a_large_group_is_shown_in_pages(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"a {number:03}" for number in range(250)]
    cli("resources", "add", "orders", *names)
    whole = cli("resources", "list", "orders")
    assert whole.out.count("\n") == 250, "a script gets all, unless it asks for less"
    with monkeypatch.context() as patched:
        patched.setattr(Face, "on_terminal", True)
        first = cli("resources", "list", "orders").out.splitlines()
        last = cli("resources", "list", "orders", "--after", "a 199").out
    assert first[:100] == whole.out.splitlines()[:100]
    assert first[100:] == ["… 150 more, use --after 'a 099'"]
    assert last.splitlines() == whole.out.splitlines()[200:]
    page = cli("resources", "list", "orders", "--after", "a 099", "--limit", "2", "--json").document
    assert [each["resource"] for each in page["resources"]] == ["a 100", "a 101"]
    assert page["next"] == {"after": "a 101"}
    assert cli("resources", "list", "orders", "--after", "a 248", "--json").document["next"] is None
    state = cli("status", "orders", "--limit", "2", "--json").document
    assert len(state["resources"]) == 2
    assert state["owned"] + state["unowned"] == 250


def test_many_nodes_are_listed_in_pages(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    url = os.environ["REBALANSER_REGISTRY"]
    cli("resources", "add", "orders", "a")
    cli("node", "drain", "orders", "absent")
    coordinator = open_coordinator("orders", url, Settings(), SystemClock())
    with closing(coordinator):
        for number in range(120):
            label = "w same" if 40 <= number < 50 else f"w {number:03}"
            coordinator.perform(Join(Member(f"id-{number:03}", label), 60.0))
        whole = cli("node", "list", "orders").out.splitlines()
        assert len(whole) == 121, "a script gets all, unless it asks for less"
        assert whole[-1] == "absent: drained, no live node"
        pages, more = [], ""
        while True:
            *page, last = cli("node", "list", "orders", "--limit", "23", *shlex.split(more)).out.splitlines()
            pages += page
            if not last.startswith("…"):
                break
            more = last.partition("use ")[2]
        assert [*pages, last] == whole
        with monkeypatch.context() as patched:
            patched.setattr(Face, "on_terminal", True)
            assert len(cli("node", "list", "orders").out.splitlines()) == 101
        document = cli("node", "list", "orders", "--after", "w 117", "--limit", "1", "--json").document
        assert [each["label"] for each in document["nodes"]] == ["w 118"]
        assert document["drained_and_absent"] == ["absent"]
        assert document["next"] == {"after": "w 118"}
        assert cli("node", "list", "orders", "--after", "w 118", "--json").document["next"] is None


def test_pages_of_nodes_go_on_though_the_last_one_of_a_page_has_left(cli: Cli) -> None:
    """Labels may be shared; ids are random, so that an id alone has no place in the order of labels."""
    cli("resources", "add", "orders", "a")
    url = os.environ["REBALANSER_REGISTRY"]
    sessions = {}
    with closing(open_coordinator("orders", url, Settings(), SystemClock())) as coordinator:
        for node, label in [("5", "one"), ("1", "same"), ("3", "same"), ("4", "same"), ("0", "two")]:
            joined = coordinator.perform(Join(Member(node, label), 60.0))
            assert isinstance(joined, Joined)
            sessions[node] = joined.session

        def page(after: Mapping[str, str]) -> tuple[list[str], dict[str, str] | None]:
            options = [f"--{name.replace('_', '-')}={value}" for name, value in after.items()]
            answer = cli("node", "list", "orders", "--limit", "2", "--json", *options).document
            return [each["node"] for each in answer["nodes"]], answer["next"]

        first, place = page({})
        assert (first, place) == (["5", "1"], {"after": "same", "after_id": "1"})
        assert page({"after": "same"}) == (["0"], None)
        coordinator.perform(Leave(sessions["1"]))
        assert place is not None
        assert page(place) == (["3", "4"], {"after": "same"})
        for node in ("3", "4"):
            coordinator.perform(Leave(sessions[node]))
        assert page({"after": "same"}) == (["0"], None)
    refused(cli("node", "list", "orders", "--after-id", "1"), 2, "--after-id needs --after")


def test_the_resources_of_one_node_are_listed(cli: Cli) -> None:
    url = os.environ["REBALANSER_REGISTRY"]
    groups = [Group("orders", url, node=label) for label in ("one", "two")]
    with Admin("orders", url) as admin, ExitStack() as running:
        admin.add("a", pin="one")
        admin.add("b", pin="two")
        for group in groups:
            group.on_start(lambda _: None)
            group.on_stop(lambda _: None)
            running.enter_context(group)
        admin.wait_balanced(PATIENCE_S)
        listed = cli("resources", "list", "orders", "--node", "two", "--json").document["resources"]
        assert [each["resource"] for each in listed] == ["b"]
        absent = cli("resources", "list", "orders", "--node", "three")
        assert absent == Answer(0, "", "no live node has the label 'three'\n")
        absent = cli("resources", "list", "orders", "--node", "three", "--json")
        assert (absent.document["resources"], absent.err) == ([], "")
        assert cli("resources", "list", "orders", "--node", "one").err == ""


@pytest.mark.rule("RB-30")
def test_a_node_is_drained_and_undrained(cli: Cli) -> None:
    cli("resources", "add", "orders", "a")
    answer = cli("node", "drain", "orders", "worker-1")
    assert answer == Answer(0, "worker-1 is drained; no live node has that label now\n", "")
    assert cli("node", "undrain", "orders", "worker-1", "--json").document == {
        "group": "orders",
        "node": "worker-1",
        "drained": False,
        "live": False,
        "held": 0,
    }
    waiting = cli("node", "drain", "orders", "worker-1", "--wait", "--timeout", "0")
    refused(waiting, 4, "not balanced after 0 s", "it has no nodes")


@pytest.mark.rule("RB-30")
def test_draining_the_last_node_says_that_resources_have_no_owner(cli: Cli) -> None:
    url = os.environ["REBALANSER_REGISTRY"]
    group = Group("orders", url, node="one", resources=["a", "b"])
    group.on_start(lambda _: None)
    group.on_stop(lambda _: None)
    with group:
        drained = cli("node", "drain", "orders", "one", "--wait")
        assert drained.out == (
            "one is drained; it holds 0 resources now; "
            "resources of the group without an owner: 2, see rebalanser status\n"
        )
        assert cli("node", "undrain", "orders", "one", "--wait").out == (
            "one is undrained; it holds 2 resources now\n"
        )


def test_check_finds_all_well_and_leaves_nothing_behind(cli: Cli) -> None:
    report = cli("check", "orders", "--json")
    assert (report.code, report.document["ok"]) == (0, True)
    assert [each["check"] for each in report.document["findings"]] == [
        "settings",
        "dead man's switch",
        "registry",
        "abilities",
        "lease",
        "group",
    ]
    plain = cli("check")
    assert plain.code == 0
    assert "granted for 10 s, as requested" in plain.out


@pytest.mark.rule("RB-46")
def test_check_warns_of_keys_that_can_not_be_read(cli: Cli) -> None:
    cli("resources", "add", "orders", "a")
    with closing(open_registry(os.environ["REBALANSER_REGISTRY"])) as registry:
        root = parse_url(os.environ["REBALANSER_REGISTRY"]).root
        keys = [f"{root}/orders/{name}" for name in ("drains/a/b", "nodes/a/b", "notes/x")]
        registry.execute(Transaction(then=tuple(Put(key, b"") for key in keys)), PATIENCE_S)
        answer = cli("check", "orders")
        assert answer.code == 0
        (warned,) = [line for line in answer.out.splitlines() if line.startswith("warning keys:")]
        assert warned.startswith("warning keys: left alone: 2 keys that can't be read, the first: ")
        assert f"'{root}/orders/drains/a/b' is a key that no Rebalanser wrote: delete it" in warned
        registry.execute(Transaction(then=tuple(map(Delete, keys))), PATIENCE_S)
    assert "keys:" not in cli("check", "orders").out


def test_check_warns_of_a_group_that_is_not_there(cli: Cli) -> None:
    answer = cli("check", "ordres")
    assert answer.code == 0
    assert "warning group: there is no group 'ordres' yet\n" in answer.out
    cli("resources", "add", "orders", "a")
    assert "ok      group: orders: " in cli("check", "orders").out


class Stingy:
    """A registry that grants no lease below five seconds and has a known fault."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._registry.capabilities, unsafe_reasons=("this server loses watches",))

    def execute(self, request: Request, timeout_s: float) -> Reply:
        reply = self._registry.execute(request, timeout_s)
        if isinstance(request, Grant):
            assert isinstance(reply, Granted)
            return Granted(reply.lease, max(5.0, reply.ttl_s))
        return reply


def test_check_warns_of_variables_that_nothing_reads(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REBALANSER_LEASE_TTL", "5")
    monkeypatch.setenv("REBALANSER_XYZZY", "")
    monkeypatch.setenv("rebalanser_fenced", "1")
    answer = cli("check")
    assert answer.code == 0
    warned = [line for line in answer.out.splitlines() if "environment:" in line]
    assert warned == [
        f"warning environment: {name} is set, but there is no such setting{rest}"
        for name, rest in (
            ("REBALANSER_LEASE_TTL", "; is REBALANSER_LEASE_TTL_S meant?"),
            ("REBALANSER_XYZZY", ""),
        )
    ]


def test_check_knows_every_variable_that_the_package_reads() -> None:
    roots = Path(rebalanser.__file__).parent, Path(rebalanser.__file__).parents[1] / "backends"
    sources = [path.read_text() for root in roots for path in root.rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"[\"`](REBALANSER_[A-Z_]*[A-Z])\b", source)}
    known = {f"REBALANSER_{name}".upper() for name in Settings.model_fields} | check.OTHER_VARIABLES
    assert read - known == set()


@pytest.mark.rule("RB-21")
def test_check_refuses_a_lease_below_what_the_server_grants(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REBALANSER_LEASE_TTL_S", "2")
    monkeypatch.setattr(check, "open_backend", lambda url, timeout_s: Stingy(open_registry(url, timeout_s)))
    answer = cli("check")
    assert answer.code == 1
    assert "failed  lease: lease_ttl_s 2 is below what the registry allows, 5 s" in answer.out
    assert "warning server: this server loses watches" in answer.out


class Logs(GroupStore):
    """Keeps groups in a registry, and knows what weakens one once it is open."""

    made: ClassVar[list[str]] = []
    """The groups whose logs were made if they were missing."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def capabilities(self) -> Capabilities:
        return self._registry.capabilities

    def look(self, timeout_s: float) -> None:
        """It answers."""

    def open_group(
        self,
        group: str,
        now: Callable[[], float],
        timeout_s: float,
        connect_timeout_s: float,
        *,
        create: bool = True,
    ) -> Coordinator:
        if not create and group == "unmade":
            raise UnknownGroup("it has no log")
        if create:
            self.made.append(group)
        return RegistryCoordinator(cast("Registry", Stingy(self._registry)), "root", group, now, timeout_s)

    def close(self) -> None:
        self._registry.close()


def test_check_names_what_weakens_a_group_that_has_a_log_of_its_own(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "open_backend", lambda url, timeout_s: Logs(open_registry(url, timeout_s)))
    answer = cli("check", "orders")
    assert answer.code == 0
    assert answer.out.count("warning server: this server loses watches") == 1
    assert "this server loses watches" not in cli("check").out


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("watch",),
        ("resources", "list"),
        ("resources", "remove", "r1"),
        ("node", "drain", "n1"),
        ("check",),
    ],
)
def test_a_command_that_only_looks_makes_no_log_of_a_group(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Logs, "made", [])
    for module in ("rebalanser.group.open_backend", "rebalanser.cli.check.open_backend"):
        monkeypatch.setattr(module, lambda url, timeout_s: Logs(open_registry(url, timeout_s)))
    where = 2 if command[0] in {"resources", "node"} else 1
    answer = cli(*command[:where], "unmade", *command[where:])
    if command == ("check",):
        assert "there is no group 'unmade' yet" in answer.out
    else:
        refused(answer, 3, "no such group: 'unmade'")
    assert Logs.made == []


@pytest.mark.rule("RB-34")
@pytest.mark.parametrize(("on_overrun", "verdict"), [("report", "warning"), ("kill", "failed")])
def test_check_says_whether_the_dead_mans_switch_can_be_had(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, on_overrun: str, verdict: str
) -> None:
    monkeypatch.setenv("REBALANSER_ON_OVERRUN", on_overrun)
    monkeypatch.setattr(dead_man.sys, "platform", "plan9")
    report = cli("check", "--json")
    (finding,) = [each for each in report.document["findings"] if each["check"] == "dead man's switch"]
    assert finding["verdict"] == verdict
    assert "plan9 is not Linux" in finding["detail"]
    assert report.code == (verdict == "failed")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RegistryUnavailable("127.0.0.1:2379 does not answer"), 4),
        (OutcomeUnknown("no answer within 1 s"), 4),
        (InternalError("a barrier has two holders"), 70),
    ],
)
def test_exit_codes_say_what_to_do(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(_admin: Admin) -> None:
        raise error

    monkeypatch.setattr(Admin, "state", fail)
    refused(cli("status", "orders"), code, str(error))
    answer = cli("status", "orders", "--json")
    assert answer.document == {"error": str(error), "kind": type(error).__name__, "exit_code": code}
    assert answer.err == ""


def test_only_a_fault_of_its_own_shows_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_admin: Admin) -> None:
        raise ZeroDivisionError("of etcd://me:hunter2@127.0.0.1:1/x")

    monkeypatch.setattr(Admin, "state", fail)
    answer = cli("status", "orders")
    assert answer.code == 70
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: ZeroDivisionError")
    assert "hunter2" not in answer.err
    assert cli("status", "orders", "--json").document["kind"] == "InternalError"


def test_ctrl_c_is_quiet(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_coordinator: RegistryCoordinator) -> None:
        raise KeyboardInterrupt

    cli("resources", "add", "orders", "a")
    monkeypatch.setattr(RegistryCoordinator, "read", interrupt)
    assert cli("status", "orders") == Answer(130, "", "")
    assert cli("watch", "orders") == Answer(130, "", "")


def test_no_secret_is_shown(cli: Cli) -> None:
    for arguments in (("status", "orders"), ("check",), ("status", "orders", "--json")):
        answer = cli(*arguments, "--registry", "etcd://me:hunter2@nowhere/x")
        assert "nowhere" in answer.out + answer.err
        assert "hunter2" not in answer.out + answer.err


def test_help_and_version(cli: Cli) -> None:
    assert cli("--version").out.count(".") == 2
    for command in ("resources", "status", "watch", "node", "run", "check"):
        assert command in cli("--help").out
    assert cli("run", "--help").code == 0
    watch = " ".join(cli("watch", "--help").out.split())
    for word in ("silent", '"3 s ago"', '"6 of 10 s"', '"—"', "Seconds between two reads"):
        assert word in watch
    assert cli().code == 2
    assert application().info.name == "rebalanser"


class TestDefaultRegistry:
    def test_is_a_file_in_the_state_folder(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("REBALANSER_REGISTRY")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        assert cli("resources", "add", "orders", "a").code == 0
        assert (tmp_path / "state" / "rebalanser" / "groups.db").is_file()
        monkeypatch.setenv("REBALANSER_REGISTRY", "")
        assert cli("resources", "list", "orders").out == "a: no owner\n"

    @pytest.mark.parametrize("state", ["", "relative/folder"])
    def test_is_below_the_home_folder_otherwise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert default_url() == f"sqlite:///{tmp_path}/.local/state/rebalanser/groups.db"

    def test_a_folder_that_cannot_be_made_is_one_line(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("REBALANSER_REGISTRY")
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        refused(cli("status", "orders"), 3, "can't be made", "--registry")

    def test_the_option_is_stronger_than_the_environment(self, cli: Cli, tmp_path: Path) -> None:
        cli("resources", "add", "orders", "a")
        other = f"sqlite:///{tmp_path / 'groups.db'}"
        assert cli("resources", "list", "orders", "--registry", other).out == ""
        assert cli("resources", "list", "orders").out == "a: no owner\n"


class Terminal(io.StringIO):
    """Text that a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.rule("RB-29")
def test_long_work_shows_its_progress_on_a_terminal(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    names = tmp_path / "names"
    names.write_text("\n".join(map(str, range(10_000))))
    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    assert cli("resources", "add", "big", "--file", str(names)).out == "added 10,000 resources\n"
    assert "10000/10000" in seen.getvalue()
    quiet = Terminal()
    monkeypatch.setattr(sys, "stderr", quiet)
    assert cli("resources", "remove", "big", "--file", str(names), "--json").document["removed"] == 10_000
    assert cli("resources", "add", "big", "a", "b").code == 0
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(
    "command",
    [
        *(("status", "orders"), ("watch", "orders"), ("resources", "list", "orders")),
        *(("node", "list", "orders"), ("check", "orders"), ("resources", "remove", "orders", "a")),
        *(("node", "drain", "orders", "n"), ("node", "undrain", "orders", "n")),
    ],
)
def test_only_adding_makes_a_group(cli: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "gropus.db"
    answer = cli(*command, "--registry", f"sqlite:///{file}")
    refused(answer, 3, f"no such group: 'orders', as there is no file {file}")
    assert list(tmp_path.iterdir()) == []


def test_adding_nothing_makes_no_group(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "names").touch()
    added = cli("resources", "add", "orders", "--file", str(tmp_path / "names"))
    assert added == Answer(0, "added 0 resources\n", "")
    assert cli("groups").out == ""


def test_a_relative_file_that_is_not_there_is_named_with_its_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli("status", "orders", "--registry", "sqlite:///orders.db")
    refused(answer, 3, f"as there is no file {tmp_path / 'orders.db'}")


@pytest.mark.parametrize("command", [("status", "orders"), ("groups",), ("check",)])
def test_a_url_with_a_slash_too_few_names_no_other_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders.db").touch()
    answer = cli(*command, "--registry", "sqlite://orders.db")
    assert answer.code in {1, 3}
    assert "'sqlite://orders.db' names no file; write sqlite:///" in answer.out + answer.err
    assert not (tmp_path / "rders.db").exists()


def test_a_group_in_memory_of_another_process_is_said_to_be_out_of_reach(cli: Cli) -> None:
    refused(cli("status", "orders"), 3, "it has no groups, as memory:// exists in one process only")


def test_a_registry_that_is_not_there_has_no_groups_and_can_be_checked(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'groups.db'}"
    refused(cli("groups", "--registry", url), 3, f"there is no file {tmp_path / 'groups.db'}")
    report = cli("check", "--registry", url, "--json")
    assert (report.code, report.document["ok"]) == (0, True)
    assert "lease" in [each["check"] for each in report.document["findings"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "more"),
    [
        *((("status",), ()), (("watch",), ()), (("resources", "list"), ()), (("node", "list"), ())),
        *((("resources", "remove"), ("a",)), (("node", "drain"), ("n",)), (("node", "undrain"), ("n",))),
    ],
)
def test_a_mistyped_group_is_named_beside_those_that_are_there(
    cli: Cli, command: tuple[str, ...], more: tuple[str, ...]
) -> None:
    for _ in range(2):
        refused(cli(*command, "ordres", *more), 3, "no such group: 'ordres' in memory://", "it has no groups")
    for name in ("orders", "a/b", "orders-2", "orders2"):
        cli("resources", "add", name, "a")
    for _ in range(2):
        refused(cli(*command, "ordres", *more), 3, "there are: a/b, orders, orders-2, orders2")


def test_groups_and_nodes_are_listed(cli: Cli) -> None:
    assert cli("groups").out == ""
    for name in ("orders", "mail"):
        cli("resources", "add", name, "a")
    cli("node", "drain", "mail", "w-7")
    with closing(open_registry(os.environ["REBALANSER_REGISTRY"])) as registry:
        foreign = ("alien/thing", "mai", "mai-l", "a{b/term", "orders-/x/y")
        registry.execute(Transaction(then=tuple(Put(f"rebalanser/{key}", b"") for key in foreign)), 1.0)
    assert cli("groups").out == "mail\norders\n"
    assert cli("groups", "--json").document == {"groups": ["mail", "orders"]}
    assert cli("node", "list", "mail").out == "w-7: drained, no live node\n"
    assert cli("node", "list", "mail", "--json").document == {
        "group": "mail",
        "nodes": [],
        "drained_and_absent": ["w-7"],
        "kept": [],
        "next": None,
    }
    refused(cli("groups", "--registry", "sqlite:///"), 3, "names no file")


def completions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    """Return what a shell is told that a command line may go on with."""
    with monkeypatch.context() as environment:
        environment.setenv("_REBALANSER_COMPLETE", "complete_bash")
        environment.setenv("COMP_WORDS", line)
        environment.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit):
            main([])
    return capsys.readouterr().out.split()


def test_a_shell_completes_groups_nodes_and_resources(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli("resources", "add", "orders", "part-1", "part-2", "other")
    cli("resources", "add", "mail", "x")
    cli("node", "drain", "orders", "w-7")
    complete = partial(completions, monkeypatch, capsys)
    assert complete("rebalanser status ") == ["mail", "orders"]
    assert complete("rebalanser status or") == ["orders"]
    assert complete("rebalanser node undrain orders ") == ["w-7"]
    assert complete("rebalanser resources remove orders par") == ["part-1", "part-2"]
    assert complete("rebalanser resources list orders --node ") == ["w-7"]
    assert complete("rebalanser resources list orders --node w") == ["w-7"]
    assert complete("rebalanser resources add orders x --pin ") == ["w-7"]
    assert complete("rebalanser resources list --node ") == [], "no group is named"
    assert complete("rebalanser resources remove ordres par") == [], "and no word on the terminal"


def test_completion_makes_no_file(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("REBALANSER_REGISTRY", f"sqlite:///{tmp_path / 'groups.db'}")
    assert completions(monkeypatch, capsys, "rebalanser status ") == []
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_quiet_while_the_command_line_is_imported() -> None:
    program = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "rebalanser.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from rebalanser.__main__ import entry
sys.argv = ["rebalanser", "status", "orders"]
sys.exit(entry())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_who_waits_for_the_registry_is_told_for_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narration, "SILENCE_S", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said, told = threading.Event(), []

    def echo(line: str, *, err: bool) -> None:
        told.append((line, err))
        said.set()

    monkeypatch.setattr(typer, "echo", echo)
    with output.Face("etcd://me:hunter2@h:1", json=False).patience(Settings()):
        assert said.wait(PATIENCE_S)
    ((line, err),) = told
    assert err
    assert line.startswith("connecting to etcd://")
    assert "hunter2" not in line


def test_a_command_that_may_not_be_executed_is_no_missing_one(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "work.sh"
    script.write_text("#!/bin/sh\n")
    refused(cli("run", "orders", "--", str(script)), 2, "may not execute; chmod +x it")
    refused(cli("run", "orders", "--", str(tmp_path / "none")), 2, "there is no command")


@pytest.mark.rule("RB-21")
def test_a_lease_that_leaves_no_time_to_stop_is_refused_on_the_command_line(cli: Cli) -> None:
    answer = cli("run", "orders", "--lease", "4", "--stop-timeout", "3.5", "--", "true")
    refused(answer, 3, "--stop-timeout 3.5", "--lease is 4")
    answer = cli("run", "orders", "--lease", "-1", "--", "true")
    refused(answer, 3, "--lease: Input should be greater than 0")


@pytest.mark.rule("RB-21")
def test_a_lease_below_what_the_registry_grants_is_named_as_the_option(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(url: RegistryUrl, timeout_s: float) -> Any:
        opened = open_registry(url, timeout_s)
        monkeypatch.setattr(type(opened), "capabilities", replace(opened.capabilities, min_lease_ttl_s=5.0))
        return opened

    monkeypatch.setattr("rebalanser.group.open_backend", slow)
    answer = cli("run", "orders", "--lease", "2", "--", "true")
    assert answer.code == 3
    assert "\nerror: --lease 2 is below the 5 s that memory://" in answer.err


def test_a_mistyped_placeholder_is_refused(cli: Cli) -> None:
    for command in (("echo", "part-{resorce}"), ("./{resources}",), ("echo", "{tokne}")):
        meant = "token" if "tokne" in command[-1] else "resource"
        refused(cli("run", "orders", "--", *command), 2, f"is {{{meant}}} meant?")
    shell = ("sh", "-c", "tokens=1; echo ${tokens} {a,b} {print}; exit 1")
    assert "meant" not in cli("run", "orders", "--lease", "-1", "--", *shell).err


def test_an_unknown_scheme_is_named_though_no_port_is(cli: Cli) -> None:
    refused(
        cli("status", "orders", "--registry", "redis://localhost"), 3, "no backend for redis://; known: etcd"
    )
    refused(
        cli("status", "orders", "--registry", "etcd://localhost"), 3, "'localhost' in", "is not HOST:PORT"
    )


@dataclass(frozen=True)
class Together:
    """Options of a test."""

    needed: Annotated[str, typer.Option("--needed")]
    several: Annotated[list[str] | None, typer.Option("--several")] = None


def test_the_fields_of_a_dataclass_are_options_after_the_commands_own() -> None:
    commands, seen = Commands("Test."), []

    @commands.command()
    def call(together: Together, name: str, count: int = 1) -> None:
        """Test."""
        seen.append((together, name, count))

    command: Any = typer.main.get_command(commands)
    assert [each.name for each in command.params[:4]] == ["name", "count", "needed", "several"]
    command(["a", "--needed", "b", "--several", "c", "--several", "d"], standalone_mode=False)
    assert seen == [(Together("b", ["c", "d"]), "a", 1)]
    with pytest.raises(typer.TyperException, match="needed"):
        command(["a"], standalone_mode=False)
