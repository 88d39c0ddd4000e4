"""What a client that waits for its command makes of the documents that it reads."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from rebalanser_kafka.shiva.effect import Effect

from rebalanser.errors import ApplicationFailed, Superseded
from rebalanser.shiva.records import AssignmentDocument
from rebalanser.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    Archive,
    Epoch,
    Mode,
    SetAside,
)

WEB = ApplicationId("t", "c", "web")
OFFSET = 7


def document(
    state: ApplicationState | None = None,
    *,
    command: str = "mine",
    consumed: int = OFFSET,
    set_aside: tuple[SetAside, ...] = (),
) -> AssignmentDocument:
    """A document that has the application in this state, or does not have it."""
    entries = {}
    if state is not None:
        entries[WEB] = ApplicationEntry(
            command=command,
            state=state,
            mode=Mode.AVAILABLE,
            archive=Archive("0" * 64, 1, 1),
            reason="why",
            failed_on=MappingProxyType({"w1": "exit code 3"} if state is ApplicationState.FAILED else {}),
        )
    return AssignmentDocument(
        Epoch(1, 1), "l", consumed, 3.0, applications=MappingProxyType(entries), set_aside=set_aside
    )


def effect() -> Effect:
    return Effect(WEB, "mine", OFFSET)


@pytest.mark.rule("SH-18")
@pytest.mark.parametrize(
    ("read", "come"),
    [
        (document(ApplicationState.RUNNING), True),
        (document(ApplicationState.FINISHED), True),
        (document(ApplicationState.WAITING), False),
        (document(ApplicationState.RUNNING, consumed=OFFSET - 1), False),
        (document(consumed=OFFSET - 1), False),
        (document(), True),
        (document(ApplicationState.STOPPING, command="earlier"), False),
    ],
)
def test_the_effect_has_come_once_a_document_that_read_the_command_shows_it(
    read: AssignmentDocument, come: bool
) -> None:
    assert effect().has_come(read) is come


@pytest.mark.rule("SH-18")
def test_what_failed_everywhere_is_told_with_the_reason_of_each_worker() -> None:
    with pytest.raises(ApplicationFailed, match="t/c/web is failed: why; w1: exit code 3"):
        effect().has_come(document(ApplicationState.FAILED))


@pytest.mark.rule("SH-18")
def test_a_later_command_is_told() -> None:
    with pytest.raises(Superseded, match="another command for t/c/web came later"):
        effect().has_come(document(ApplicationState.RUNNING, command="later"))


@pytest.mark.rule("SH-16", "SH-18")
def test_a_command_that_was_set_aside_has_failed() -> None:
    aside = SetAside(OFFSET, "cmd:t/c/web", "its parts are missing")
    with pytest.raises(ApplicationFailed, match="its parts are missing"):
        effect().has_come(document(set_aside=(aside,)))


@pytest.mark.rule("SH-16", "SH-18")
def test_a_record_of_another_topic_or_application_at_the_same_offset_means_nothing() -> None:
    others = (SetAside(OFFSET, "pong:w1", "poison"), SetAside(OFFSET, "cmd:t/c/other", "no"))
    assert effect().has_come(document(ApplicationState.RUNNING, set_aside=others))
