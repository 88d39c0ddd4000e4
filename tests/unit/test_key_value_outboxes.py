"""Entries of outboxes on keys and values, whatever forwarder dies or comes between two steps of another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from rebalanser.core.tasks.store import Applied, Enqueue, Exists, Forwarded, Skip, Taken
from rebalanser.errors import OutcomeUnknown, QuotaExceeded, RegistryUnavailable
from rebalanser.registry.contract import Transaction
from rebalanser.testing import FakeClock, MemoryRegistry, MemoryStore
from tests.unit.test_key_value_engine import (
    MANY,
    QUEUE,
    Meddler,
    apply,
    collect,
    everything,
    make,
    opened,
)

OUTBOX = "an outbox"
STEPS = 40
PROBES = 1000
"""The first number of the tasks that others depend on."""


def entries(*tasks: Enqueue) -> list[Enqueue]:
    return [replace(task, forwarded=Forwarded(OUTBOX, number)) for number, task in enumerate(tasks, start=1)]


BATCHES = {
    "one": entries(make(1)),
    "a run of entries": entries(*(make(number) for number in range(1, 6))),
    "a chain": entries(make(1), make(2, after=[1]), make(3, after=[2]), make(4)),
    "a large one": entries(make(1, payload=bytes(20_000)), make(2)),
    "after many": entries(make(1), make(2, after=range(PROBES, PROBES + MANY)), make(3)),
}


def stage() -> tuple[MemoryStore, Meddler]:
    """A store with the tasks that others depend on."""
    store = MemoryStore(FakeClock())
    other = opened(MemoryRegistry(store))
    apply(other, *(make(PROBES + number) for number in range(MANY)))
    return store, Meddler(store)


def made(store: MemoryStore) -> set[str]:
    """The tasks of entries that are there."""
    probes = {make(PROBES + number).task.head.id for number in range(MANY)}
    return {item.head.id for item in everything(opened(MemoryRegistry(store)))} - probes


def ids(batch: Sequence[Enqueue]) -> set[str]:
    return {entry.task.head.id for entry in batch}


@pytest.mark.rule("SK-4")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("lost", [False, True])
def test_a_forwarder_may_die_at_any_step_and_its_tasks_be_collected_before_the_next(
    lost: bool, batch: list[Enqueue]
) -> None:
    for step in range(STEPS):
        store, meddler = stage()
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        meddler.die(step, lost=lost)
        died = True
        with suppress(OutcomeUnknown, RegistryUnavailable):
            apply(engine, *batch)
            died = False
        before = made(store)
        gone = [item for item in everything(other) if item.head.id in before]
        # What an entry to come depends on must stay.
        needed = {each for entry in batch for each in entry.task.head.after}
        gone = [item for item in gone if item.head.id not in needed]
        if gone:
            assert isinstance(apply(other, collect(*gone))[0], Applied)
        answers = apply(other, *batch)
        assert all(isinstance(answer, Applied | Taken) for answer in answers), (step, answers)
        assert sum(isinstance(answer, Taken) for answer in answers) == len(before), "a prefix was taken"
        assert made(store) == ids(batch) - {item.head.id for item in gone}
        if not died:
            return
    pytest.fail("forwarding took more steps than were tried")


@pytest.mark.rule("SK-4")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_of_two_that_forward_at_once_one_has_each_entry_taken(batch: list[Enqueue]) -> None:
    for step in range(STEPS):
        store, meddler = stage()
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        meddler.interrupt(step, partial(apply, other, *batch))
        answers = apply(engine, *batch)
        assert made(store) == ids(batch)
        if not meddler.happened:
            return
        for pair in zip(answers, meddler.happened, strict=True):
            assert {type(answer) for answer in pair} == {Applied, Taken}, (step, pair)
    pytest.fail("forwarding took more steps than were tried")


@pytest.mark.rule("SK-4")
def test_an_entry_is_skipped_or_taken_when_both_are_asked_at_once() -> None:
    (entry,) = BATCHES["one"]
    assert entry.forwarded is not None
    skip = Skip(QUEUE, entry.forwarded)
    for step in range(STEPS):
        store, meddler = stage()
        engine, other = opened(meddler), opened(MemoryRegistry(store))
        meddler.interrupt(step, partial(apply, other, skip))
        (answer,) = apply(engine, entry)
        if not meddler.happened:
            return
        assert {type(answer), type(meddler.happened[0])} == {Applied, Taken}
        assert made(store) == (ids([entry]) if isinstance(answer, Applied) else set())
    pytest.fail("forwarding took more steps than were tried")


@pytest.mark.rule("SK-4", "SK-12")
def test_entries_that_depend_on_nothing_are_few_transactions() -> None:
    _, meddler = stage()
    engine = opened(meddler)
    before = len(meddler.transactions)
    answers = apply(engine, *entries(*(make(number) for number in range(300))))
    assert all(isinstance(answer, Applied) for answer in answers)
    assert len(meddler.transactions) - before < 15


@pytest.mark.rule("SK-4")
def test_entries_with_one_id_do_not_stand_together() -> None:
    _, meddler = stage()
    answers = apply(opened(meddler), *entries(make(1), make(2), make(1)))
    assert [type(answer) for answer in answers] == [Applied, Applied, Exists]


def test_a_failure_after_a_convoy_is_an_unknown_outcome() -> None:
    store, meddler = stage()
    engine = opened(meddler)
    due = len(meddler.transactions) + 2

    def refuse(number: int, _transaction: Transaction) -> None:
        if number >= due:
            raise QuotaExceeded("full")

    meddler.before = refuse
    with pytest.raises(OutcomeUnknown, match="full"):
        apply(engine, *entries(*(make(number) for number in range(200))))
    assert 0 < len(made(store)) < 200
    with pytest.raises(QuotaExceeded):
        apply(engine, *entries(make(500)))
