"""Weights from the loads that a real group reported, written to real registries (AU-7)."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser import Admin, Group, Settings
from rebalanser.cli import main
from rebalanser.history import HistoryStep, Record, read_records
from rebalanser.history.kinds import KINDS
from rebalanser.testing.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from rebalanser import Owned

LOADS = {"busy": 30.0, "pinned": 10.0, "calm": 10.0, "idle": 1.0}
"""Their mean is 12.75, so that the weights are 2.4, 0.8, 0.8 and 0.1."""
WEIGHTS = {"busy": 2.4, "pinned": 0.8, "calm": 0.8, "idle": 0.1}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.rule("AU-7", "RB-29"),
    pytest.mark.usefixtures("spark"),
]


def played(group: str, url: str, history: Path) -> None:
    """One node owns everything and reports its load until the history has it."""

    def report(owned: list[Owned]) -> None:
        for each in owned:
            each.report_load(LOADS[each.resource])

    node = Group(group, url, node="worker-1", settings=Settings(history_dir=history))
    node.on_start(report)
    node.on_stop(lambda _owned: None)
    with node:
        wait_until(lambda: loads_in(history) == set(LOADS), "the history has all loads")


def loads_in(history: Path) -> set[str | None]:
    records = [each for each in read_records(history) if isinstance(each, Record)] if history.exists() else []
    return {each.resource for each in records if KINDS[each.protocol][each.kind].step is HistoryStep.LOAD}


def said(admin: Admin) -> dict[str, tuple[float, str | None, dict[str, str]]]:
    return {each.resource: (each.weight, each.pin, dict(each.attributes)) for each in admin.resources()}


def weighing(capsys: pytest.CaptureFixture[str], history: Path, *options: str) -> dict[str, Any]:
    """What ``rebalanser audit --json`` says of the weights of the only group."""
    assert main(["audit", str(history), "--json", *options]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    [weights] = json.loads(told.out)["weights"]
    return dict(weights)


@pytest.mark.parametrize("registry", ["sqlite", "etcd"])
def test_weights_are_shown_and_with_apply_written(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path, registry: str
) -> None:
    url = (
        f"sqlite:///{tmp_path / 'group.db'}" if registry == "sqlite" else request.getfixturevalue("etcd_url")
    )
    group, history = f"weights-{uuid.uuid4().hex}", tmp_path / "history"
    with Admin(group, url, timeout_s=PATIENCE_S) as admin:
        admin.add("busy", "calm", "idle", attributes={"zone": "a"})
        admin.add("pinned", pin="worker-1")
        before = said(admin)
        played(group, url, history)

        dry = weighing(capsys, history, "--registry", url)
        assert dry == {"group": group, "weights": WEIGHTS, "applied": False}
        assert said(admin) == before, "nothing is written without --apply"

        # 0.8 is as far from 1 as a weight has to be; another operator has said more of it meanwhile.
        admin.add("calm", attributes={"zone": "b"}, weight=0.9)
        admin.remove("idle")
        done = weighing(capsys, history, "--registry", url, "--apply")
        assert done == {"group": group, "weights": {"busy": 2.4, "pinned": 0.8}, "applied": True}
        assert said(admin) == {
            "busy": (2.4, None, {"zone": "a"}),
            "calm": (0.9, None, {"zone": "b"}),
            "pinned": (0.8, "worker-1", {}),
        }
