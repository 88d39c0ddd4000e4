"""Proof that the oracle of Shiva sees: it notices each mutant.

The switches exist here only: a mutant replaces small methods of the product, or of the modelled broker and
supervisor, while the seeds of a profile are scanned, from seed 0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rebalanser.core.allocation import RememberedSearch, weighted
from rebalanser.core.shiva.assignments import AssignmentTable
from rebalanser.core.shiva.changes import DocumentChain, changed
from rebalanser.core.shiva.publishing import Publisher
from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange
from rebalanser.core.shiva.republish import Republisher
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.types import ApplicationId, Incarnation, Leaving
from rebalanser.core.shiva.worker import Worker
from rebalanser.core.shiva.worker_files import StagedStart, WorkerFiles
from simulation.kernel.mutants import Caught, Mutant, Switch, always, edited, instead, scan
from simulation.shiva import PROFILES, Broker, World, run_seed
from simulation.shiva.running import ApplicationProcess

pytestmark = pytest.mark.full_size

LIMIT = 300
"""How many seeds may be needed at most."""


def _any_process(_: Worker, known: Any) -> bool:
    return known is not None


def _by_any_document(_: Safeguards, leaving: Leaving, application: ApplicationId, pong: Any) -> bool:
    report = pong.applications.get(application)
    return not (report and report.state.may_run)


def _a_round_too_soon(_: Safeguards, missed: int, allowed: int) -> bool:
    return missed >= allowed - 1


def _when_answered(_: Worker, sent_at: float, now: float) -> float:
    return now


def _any_later_process(_: Safeguards, behind: Incarnation, leaving: Leaving) -> bool:
    return behind != leaving.incarnation


def _forgotten_in_vain(board: AssignmentTable) -> None:
    board._retries.due()


_SETTLED = WorkerFiles._settled


def _whatever_runs(files: WorkerFiles, started: StagedStart, _in_use: Any, now: float) -> Any:
    return _SETTLED(files, started, None, now)


def _on_whatever(chain: DocumentChain, change: DocumentChange) -> AssignmentDocument | None:
    if chain.document is not None:
        chain.document = changed(replace(chain.document, epoch=change.base), change)
    return chain.document


_STOP_FROM = AssignmentTable._stop_from


def _only_all(table: AssignmentTable, application: ApplicationId, first: int) -> None:
    if first == 0:
        _STOP_FROM(table, application, first)


_EXCLUSIVE = frozenset({"SH-13", "SH-14"})

MUTANTS = (
    Mutant(
        "broker's fence",
        "the broker takes nothing of a deposed leader, and its leader stops",
        (
            Switch(Broker, "is_fenced", always(False)),
            Switch(World, "group_allows", always(True)),
            Switch(Safeguards, "is_overtaken", always(False)),
        ),
        frozenset({"SH-7"}),
        "leaders",
    ),
    Mutant(
        "announced term",
        "a worker refuses a document from before the last announcement, even past the fence",
        (Switch(Worker, "_is_of_present_leader", always(True)),),
        frozenset({"SH-7"}),
        "zombies",
    ),
    Mutant(
        "growing epochs",
        "a worker acts on no document that is older than the one before",
        (Switch(Worker, "_is_of_present_leader", always(True)), Switch(Worker, "_is_newer", always(True))),
        frozenset({"SH-7"}),
        "zombies",
    ),
    Mutant(
        "incarnation of the worker",
        "a document means one process, not every one that bears its name",
        (Switch(Worker, "_is_this_incarnation", instead(_any_process)),),
        _EXCLUSIVE,
        "twins",
    ),
    Mutant(
        "impostors refused",
        "of two data folders under one worker id one is refused",
        (Switch(Safeguards, "is_impostor", always(False)),),
        _EXCLUSIVE | {"SH-8", "SH-4", "SH-11"},
        "twins",
    ),
    Mutant(
        "lineage proves the end",
        "only a later process of the same folder proves that the one before has ended",
        (Switch(Safeguards, "proves_ended", instead(_any_later_process)),),
        _EXCLUSIVE,
        "twins",
    ),
    Mutant(
        "stop before start elsewhere",
        "a worker that may still run an application is waited for",
        (Switch(Safeguards, "stops_first", always(None)),),
        _EXCLUSIVE,
        "moves",
    ),
    Mutant(
        "leaving confirmed by epoch",
        "only a pong by the document that took it away shows that it has stopped",
        (Switch(Safeguards, "proves_stopped", instead(_by_any_document)),),
        _EXCLUSIVE,
        "moves",
    ),
    Mutant(
        "exclusive wait",
        "a worker that was removed is waited for until its deadline has passed",
        (Switch(Safeguards, "is_gone", always(True)),),
        frozenset({"SH-14"}),
        "cut off",
    ),
    Mutant(
        "permission to run",
        "a worker starts nothing exclusive, and stops it, without a leader's answer",
        (Switch(Worker, "_is_permitted", always(True)),),
        frozenset({"SH-14"}),
        "cut off",
    ),
    Mutant(
        "permission's epoch",
        "a worker that comes back starts nothing exclusive by an old document",
        (Switch(Worker, "_is_recent_enough", always(True)),),
        frozenset({"SH-14"}),
        "come back",
    ),
    Mutant(
        "deadline from the sending",
        "a permission counts from when the pong was sent, not from when it was answered",
        (Switch(Worker, "_counted_from", instead(_when_answered)),),
        frozenset({"SH-14"}),
        "cut off",
    ),
    Mutant(
        "deadline enforced beside the worker",
        "the processes of a worker that is stopped end at its deadline",
        (Switch(ApplicationProcess, "_deadline_came", always(None)),),
        frozenset({"SH-14"}),
        "cut off",
    ),
    Mutant(
        "heard before removed",
        "a new leader removes nobody before its second round",
        (Switch(Safeguards, "is_silent", instead(_a_round_too_soon)),),
        frozenset({"SH-4", "SH-8", "SH-9"}),
        "leaders",
    ),
    Mutant(
        "leader catches up first",
        "a leader publishes nothing before it has read COMMAND",
        (Switch(Safeguards, "may_publish", always(True)),),
        frozenset({"SH-2", "SH-4", "SH-5", "SH-9"}),
        "commands",
    ),
    Mutant(
        "files before start",
        "a worker starts what it has the files of",
        (Switch(Worker, "_are_files_stored", always(True)),),
        frozenset({"SH-6"}),
        "commands",
    ),
    Mutant(
        "files when named",
        "a worker stores what a document names it for, and nothing else",
        (Switch(WorkerFiles, "_is_mine", always(True)),),
        frozenset({"SH-4"}),
        "commands",
    ),
    Mutant(
        "files in use",
        "files that a process uses stay, whichever worker is assigned",
        (Switch(WorkerFiles, "_settled", instead(_whatever_runs)),),
        frozenset({"SH-5"}),
        "commands",
    ),
    Mutant(
        "kept commands",
        "a start command of what is to run is written again before COMMAND forgets it",
        (Switch(Republisher, "look", always(None)),),
        frozenset({"SH-15"}),
        "retention",
    ),
    Mutant(
        "place of a kept copy",
        "a copy counts where the client's record stood, so that it overrides no stop",
        (Switch(Safeguards, "comes_after", always(True)),),
        frozenset({"SH-2", "SH-5"}),
        "kept copies",
    ),
    Mutant(
        "failures forgotten",
        "what failed everywhere is tried again",
        (Switch(AssignmentTable, "retry_failed", instead(_forgotten_in_vain)),),
        frozenset({"SH-4", "SH-17"}),
        "failures",
    ),
    Mutant(
        "cordons",
        "a cordoned worker gets nothing further, and a drained one has nothing",
        (Switch(AssignmentTable, "_cordoned", always(frozenset())),),
        frozenset({"SH-26"}),
        "absences",
    ),
    Mutant(
        "capacities",
        "a worker is given no more than its capacity",
        (Switch(weighted, "has_room", always(True)), Switch(Safeguards, "has_room", always(True))),
        frozenset({"SH-27"}),
        "weights",
    ),
    Mutant(
        "search remembered",
        "a placement is searched anew once what an application requests has changed",
        (
            Switch(
                RememberedSearch,
                "__call__",
                edited("asked != self._asked", "asked[:2] != (self._asked or ())[:2]"),
            ),
        ),
        frozenset({"SH-27", "SH-4"}),
        "weights",
    ),
    Mutant(
        "room made first",
        "an application starts once what leaves its worker has made room for it",
        (Switch(Safeguards, "has_room", always(True)),),
        frozenset({"SH-27"}),
        "weights",
    ),
    Mutant(
        "room of the last process",
        "what an application took counts until its process has ended, though it is started anew with less",
        (Switch(Safeguards, "keeps_room", always(True)),),
        frozenset({"SH-27"}),
        "weights",
        first=300,
    ),
    Mutant(
        "replicas apart",
        "replicas of an application are placed on different workers",
        (
            Switch(AssignmentTable, "_group_replicas", always({})),
            Switch(Safeguards, "waits_for", always(False)),
        ),
        frozenset({"SH-28"}),
        "replicas",
    ),
    Mutant(
        "replica that leaves",
        "a worker is given a replica once another one has left it",
        (Switch(Safeguards, "waits_for", always(False)),),
        frozenset({"SH-28"}),
        "replicas",
    ),
    Mutant(
        "replica that still runs",
        "a worker starts a replica once its process of another one has ended",
        (Switch(Worker, "_waits_for", always(False)),),
        frozenset({"SH-28"}),
        "replicas cut off",
    ),
    Mutant(
        "replicas scaled away",
        "the replicas beyond the number that was commanded last end",
        (Switch(AssignmentTable, "_stop_from", instead(_only_all)),),
        frozenset({"SH-28"}),
        "replicas",
    ),
    Mutant(
        "number of a later start",
        "a number that was commanded before a start does not count after it",
        (Switch(Safeguards, "follows_start", always(True)),),
        frozenset({"SH-28"}),
        "replicas",
    ),
    Mutant(
        "commands answered",
        "a command that changes nothing is taken into account by a document all the same",
        (Switch(Publisher, "commanded", always(None)),),
        frozenset({"SH-18"}),
        "absences",
    ),
    Mutant(
        "base of a change",
        "a change is applied to the very document that it was made of, and to no other",
        (Switch(DocumentChain, "take_change", instead(_on_whatever)),),
        _EXCLUSIVE | {"SH-4", "SH-5"},
        "lost changes",
    ),
    Mutant(
        "lost change",
        "a worker that lacks a change gets a whole document",
        (Switch(Publisher, "want_whole", always(None)),),
        frozenset({"SH-4", "SH-5", "SH-8", "SH-13"}),
        "lost changes",
    ),
    Mutant(
        "size budget",
        "what does not fit into COMMAND's retention is refused",
        (Switch(Safeguards, "fits", always(True)),),
        frozenset({"SH-15", "SH-2"}),
        "anything",
    ),
)


@pytest.mark.lesson(12)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_oracle_sees_every_mutant(mutant: Mutant, caught: Callable[[Caught], None]) -> None:
    found = scan(mutant, run_seed, PROFILES, LIMIT)
    assert found is not None, f"{LIMIT} seeds, and no check of these rules saw it: {sorted(mutant.rules)}"
    caught(found)
