"""The witness: what it sees, and that it is not to be deceived by crashes and by many writers at once."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
from pathlib import Path

import pytest

from rebalanser.testing.clock import FakeClock
from rebalanser.testing.witness import Witness


class Scene:
    """A witness on a fake clock, with a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = FakeClock()
        self.witness = Witness(path, self.clock)

    def access(self, resource: str, node: str, token: int, lasts_s: float) -> None:
        with self.witness.watching(resource, node, token):
            self.clock.advance(lasts_s)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "witness.jsonl")


def test_a_witness_that_saw_nothing_says_so(scene: Scene) -> None:
    verdict = scene.witness.check()
    assert (verdict.accesses, verdict.overlaps, verdict.disorders) == ((), (), ())


def test_one_owner_after_the_other_is_fine(scene: Scene) -> None:
    scene.access("r", "a", 1, lasts_s=2)
    scene.access("r", "b", 2, lasts_s=2)
    verdict = scene.witness.check()
    assert [(access.node, access.ended - access.began) for access in verdict.accesses] == [("a", 2), ("b", 2)]
    assert (verdict.overlaps, verdict.disorders) == ((), ())


def test_access_lasts_until_the_handler_has_returned_also_when_it_raises(scene: Scene) -> None:
    with contextlib.suppress(RuntimeError), scene.witness.watching("r", "a", 1):
        scene.clock.advance(1)
        raise RuntimeError
    (access,) = scene.witness.check().accesses
    assert access.ended - access.began == 1


def test_two_owners_at_once_are_seen_with_who_and_how_long(scene: Scene) -> None:
    scene.witness.entered("r", "a", 1)
    scene.clock.advance(1)
    scene.witness.entered("r", "b", 2)
    scene.clock.advance(0.5)
    scene.witness.returned("r", "a", 1)
    scene.witness.returned("r", "b", 2)
    verdict = scene.witness.check()
    (overlap,) = verdict.overlaps
    assert (overlap.first.node, overlap.second.node, overlap.duration_s) == ("a", "b", 0.5)
    assert overlap.fenced
    assert verdict.unfenced_overlaps == ()
    assert "r: a" in str(overlap)
    assert "0.500 s" in str(overlap)


def test_tokens_that_do_not_grow_fence_nothing(scene: Scene) -> None:
    scene.witness.entered("r", "a", 2)
    scene.clock.advance(1)
    scene.witness.entered("r", "b", 2)
    scene.clock.advance(1)
    verdict = scene.witness.check()
    assert len(verdict.unfenced_overlaps) == 1
    assert [(before.node, after.node) for before, after in verdict.disorders] == [("a", "b")]


def test_a_smaller_token_later_is_a_disorder_without_any_overlap(scene: Scene) -> None:
    scene.access("r", "a", 5, lasts_s=1)
    scene.access("r", "b", 4, lasts_s=1)
    verdict = scene.witness.check()
    assert verdict.overlaps == ()
    assert [(before.token, after.token) for before, after in verdict.disorders] == [(5, 4)]


@pytest.mark.rule("RB-12", "RB-41")
@pytest.mark.parametrize(("nodes", "disorders"), [("aa", []), ("ab", [("a", "b")])])
def test_only_the_same_node_starts_anew_with_its_token(
    scene: Scene, nodes: str, disorders: list[tuple[str, str]]
) -> None:
    for node in nodes:
        scene.access("r", node, 5, lasts_s=1)
    assert [(before.node, after.node) for before, after in scene.witness.check().disorders] == disorders


def test_all_pairs_of_three_at_once_are_seen_and_other_resources_do_not_count(scene: Scene) -> None:
    for token, node in enumerate("abc", 1):
        scene.witness.entered("r", node, token)
        scene.witness.entered(f"of-{node}", node, 1)
        scene.clock.advance(1)
    pairs = {(overlap.first.node, overlap.second.node) for overlap in scene.witness.check().overlaps}
    assert pairs == {("a", "b"), ("a", "c"), ("b", "c")}


def test_a_process_that_died_has_no_access_any_more(scene: Scene) -> None:
    scene.witness.entered("r", "a", 1)
    scene.clock.advance(1)
    scene.witness.died(os.getpid(), at=scene.clock.now())
    scene.witness.entered("r", "b", 2)
    verdict = scene.witness.check()
    assert verdict.overlaps == ()
    assert [access.ended for access in verdict.accesses] == [verdict.accesses[1].began, math.inf]


def test_the_death_of_another_process_ends_nothing(scene: Scene) -> None:
    scene.witness.entered("r", "a", 1)
    scene.witness.died(os.getpid() + 1)
    assert scene.witness.check().accesses[0].ended == math.inf


def test_death_is_told_by_when_it_was_and_not_by_when_it_was_written_down(scene: Scene) -> None:
    scene.witness.entered("r", "a", 1)
    scene.clock.advance(1)
    killed_at = scene.clock.now()
    scene.clock.advance(1)
    scene.witness.entered("r", "b", 2)
    scene.clock.advance(1)
    own = [json.loads(line) for line in scene.path.read_text().splitlines()]
    own[1]["pid"] += 1
    scene.path.write_text("".join(json.dumps(line) + "\n" for line in own))
    assert len(scene.witness.check().overlaps) == 1
    scene.witness.died(os.getpid(), at=killed_at)
    assert scene.witness.check().overlaps == ()


@pytest.mark.parametrize("line", ["{", "[]", '{"sight": "entered"}', '{"sight": "slept", "at": 1, "pid": 1}'])
def test_a_line_that_cannot_be_read_is_told_with_its_number(scene: Scene, line: str) -> None:
    scene.witness.entered("r", "a", 1)
    with scene.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        scene.witness.check()


def test_ends_without_a_beginning_and_beginnings_without_an_end_between_are_refused(scene: Scene) -> None:
    scene.witness.returned("r", "a", 1)
    with pytest.raises(ValueError, match="never began"):
        scene.witness.check()
    scene.path.unlink()
    scene.witness.entered("r", "a", 1)
    scene.witness.entered("r", "a", 1)
    with pytest.raises(ValueError, match="begun already"):
        scene.witness.check()


def _write_many(path: Path, node: int) -> None:
    witness = Witness(path)
    for token in range(200):
        with witness.watching(f"of-{node}", f"n{node}", token + 1):
            pass


def test_lines_of_many_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "witness.jsonl"
    spawning = multiprocessing.get_context("spawn")
    writers = [spawning.Process(target=_write_many, args=(path, node)) for node in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    verdict = Witness(path).check()
    assert len(verdict.accesses) == 600
    assert {access.pid for access in verdict.accesses} == {writer.pid for writer in writers}
    assert (verdict.overlaps, verdict.disorders) == ((), ())
