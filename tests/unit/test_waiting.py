"""Limits of waits: one environment variable scales them."""

from __future__ import annotations

import pytest

from rebalanser.errors import InvalidSettings
from rebalanser.testing.waiting import PATIENCE_VARIABLE, patience_ratio, wait_until


@pytest.mark.parametrize(("text", "ratio"), [("1", 1.0), ("2", 2.0), ("0.5", 0.5)])
def test_variable_scales_limits(monkeypatch: pytest.MonkeyPatch, text: str, ratio: float) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, text)
    assert patience_ratio() == ratio


def test_ratio_is_one_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATIENCE_VARIABLE, raising=False)
    assert patience_ratio() == 1.0


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "inf", "nan"])
def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, text)
    with pytest.raises(InvalidSettings, match=rf"{PATIENCE_VARIABLE} '{text}': use a positive number"):
        patience_ratio()


def test_wait_returns_the_first_true_result() -> None:
    results = iter([None, 0, "", "found", "later"])
    assert wait_until(lambda: next(results)) == "found"


def test_wait_that_fails_names_the_awaited_event() -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s: the server is ready"):
        wait_until(lambda: None, "the server is ready", timeout_s=0)


def test_wait_that_fails_tells_how_it_is_then() -> None:
    """A log that was empty when the wait began is not the log that explains why it failed."""
    log = ["nothing yet"]
    with pytest.raises(AssertionError, match=r"not within 0 s: the log: all that came"):
        wait_until(lambda: log.__setitem__(0, "all that came"), lambda: f"the log: {log[0]}", timeout_s=0)
