"""Documents as a whole now and then, and as changes between: the same document for every reader (SH-24)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.allocation import Requests
from rebalanser.core.shiva.changes import DocumentChain, change_between, changed
from rebalanser.core.shiva.records import AssignmentDocument, DocumentChange
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Cordon,
    Epoch,
    Incarnation,
    Mode,
    SetAside,
    WorkerEntry,
)
from rebalanser.errors import InternalError

APPS = [ApplicationId("t", "c", name) for name in "abc"]
few = st.integers(0, 2)
documents = st.builds(
    AssignmentDocument,
    epoch=st.builds(Epoch, st.just(5), st.integers(1, 9)),
    leader=st.just("l"),
    consumed=few,
    deadline_s=st.sampled_from([30.0, 40.0]),
    workers=st.dictionaries(
        st.sampled_from(["w1", "w2", "w3"]), st.builds(WorkerEntry, st.builds(Incarnation, st.just("f"), few))
    ),
    applications=st.dictionaries(
        st.sampled_from(APPS),
        st.builds(
            ApplicationEntry,
            st.sampled_from(["c1", "c2"]),
            st.sampled_from([ApplicationState.WAITING, ApplicationState.RUNNING]),
            st.just(Mode.AVAILABLE),
            st.just(Archive("0" * 64, 1, 1)),
            worker=st.sampled_from([None, "w1", "w2"]),
            offset=few,
            requests=st.sampled_from([None, Requests(500)]),
            failed_on=st.dictionaries(st.sampled_from(["w1", "w2"]), st.just("r"), max_size=1),
            restarts=few,
        ),
    ),
    set_aside=st.lists(st.builds(SetAside, few, st.just("k"), st.just("r")), max_size=2).map(tuple),
    cordons=st.dictionaries(st.sampled_from(["w1", "w9"]), st.sampled_from(Cordon)),
    reads_changes=st.just(True),
)


def whole(number: int, term: int = 5, **fields: Any) -> AssignmentDocument:
    known: dict[str, Any] = {"leader": "l", "consumed": number, "deadline_s": 30.0, "reads_changes": True}
    return AssignmentDocument(Epoch(term, number), **{**known, **fields})


def change(number: int, base: int | None = None, term: int = 5) -> DocumentChange:
    base = number - 1 if base is None else base
    return change_between(whole(base, term), whole(number, term))


@pytest.mark.rule("SH-4", "SH-24")
@given(documents, documents)
def test_a_change_makes_the_very_document_of_the_one_before(
    base: AssignmentDocument, document: AssignmentDocument
) -> None:
    """What it was consumed up to included: a leader goes on from there (SH-9)."""
    made = change_between(base, document)
    assert changed(base, made) == document
    assert made.entries <= len(base.workers) + len(document.workers) + 8


@pytest.mark.rule("SH-24")
def test_a_change_holds_what_differs_and_no_more() -> None:
    entry = ApplicationEntry("c1", ApplicationState.WAITING, Mode.AVAILABLE, Archive("0" * 64, 1, 1))
    base = whole(1, applications=dict.fromkeys(APPS, entry))
    moved = replace(entry, worker="w1")
    document = replace(base, epoch=Epoch(5, 2), applications={APPS[0]: entry, APPS[1]: moved})
    made = change_between(base, document)
    assert made.applications == {APPS[2]: None}
    assert made.progress.keys() == {APPS[1]}
    assert made.progress[APPS[1]].worker == "w1"
    assert (made.entries, made.set_aside) == (2, None)
    anew = replace(document, epoch=Epoch(5, 3), applications={APPS[1]: replace(moved, command="c2")})
    assert change_between(document, anew).applications == {APPS[0]: None, APPS[1]: anew.applications[APPS[1]]}


@pytest.mark.rule("SH-24")
def test_a_change_is_never_applied_to_another_document() -> None:
    with pytest.raises(InternalError, match=r"a change of document 5.1 was applied to 5.3"):
        changed(whole(3), change(2))


@pytest.mark.rule("SH-24", "SH-7")
class TestChains:
    """A reader puts together what stands on the log, and knows when it cannot."""

    @staticmethod
    def of(*records: AssignmentDocument | DocumentChange) -> tuple[int | None, bool]:
        chain = DocumentChain()
        for record in records:
            chain.read(record)
        return chain.document.epoch.number if chain.document else None, chain.missed

    def test_changes_follow_a_whole_document(self) -> None:
        assert self.of(whole(1), change(2), change(3)) == (3, False)
        assert self.of(whole(1), change(2), whole(3), change(4)) == (4, False)

    def test_a_lost_change_leaves_the_document_until_a_whole_one_comes(self) -> None:
        assert self.of(whole(1), change(3)) == (1, True)
        assert self.of(whole(1), change(3), change(4)) == (1, True)
        assert self.of(whole(1), change(3), whole(4)) == (4, False)
        assert self.of(change(3)) == (None, True)

    def test_what_is_older_changes_nothing(self) -> None:
        assert self.of(whole(3), change(2), change(3), whole(1), whole(9, term=4)) == (3, False)
        assert self.of(whole(3), change(4), change(4), whole(4)) == (4, False)

    def test_leftovers_before_the_whole_document_mean_nothing(self) -> None:
        assert self.of(change(2), change(7), whole(9), change(10)) == (10, False)

    def test_a_leader_that_reads_no_changes_may_have_overlooked_some(self) -> None:
        """It goes on from the last whole document, though an application may run elsewhere by now."""
        older = whole(1, term=8, reads_changes=False)
        assert self.of(whole(1), older) == (1, False)
        chain = DocumentChain()
        for record in (whole(1), change(2), older, whole(2, term=8, reads_changes=False)):
            chain.read(record)
        assert chain.document is not None
        assert chain.document.epoch == Epoch(5, 2)
        assert chain.read(whole(1, term=9))
        assert chain.read(whole(1, term=10, reads_changes=False))

    @given(
        st.lists(st.integers(1, 12).flatmap(lambda n: st.sampled_from([whole(n), change(n)])), max_size=12)
    )
    def test_whatever_stands_there_a_document_is_one_that_was_published(
        self, records: list[AssignmentDocument | DocumentChange]
    ) -> None:
        chain = DocumentChain()
        for record in records:
            before = chain.document
            newer = chain.read(record)
            assert newer == (chain.document is not before)
            if chain.document is not None:
                assert chain.document == whole(chain.document.epoch.number)


def _any_base(chain: DocumentChain, made: DocumentChange) -> bool:
    return chain.document is not None


@pytest.mark.rule("SH-24")
def test_applying_a_change_to_whatever_is_there_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DocumentChain, "follows", _any_base)
    with pytest.raises(InternalError, match="was applied to"):
        TestChains.of(whole(1), change(3))
