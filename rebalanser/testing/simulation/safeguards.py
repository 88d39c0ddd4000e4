"""Proof that an oracle sees: a safeguard of the product is taken out, and that must be noticed.

Nothing of this is known to the product: a safeguard is a small method of it, replaced while seeds run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

from rich.table import Table

from rebalanser.testing.simulation.reports import USUAL_PROFILE, RunReport

ProfileT = TypeVar("ProfileT")


@dataclass(frozen=True)
class Switch:
    """A method, and what stands in for it; ``replacement`` is given the original."""

    owner: type
    method: str
    replacement: Callable[[Any], Any]


@dataclass(frozen=True)
class Safeguard:
    """What is taken out, what it is for, and the rules of which one is then seen to be broken."""

    name: str
    purpose: str
    switches: tuple[Switch, ...]
    rules: frozenset[str]
    profile: str = USUAL_PROFILE
    second_line: tuple[Switch, ...] = ()
    """Another safeguard that would make the loss good; with it alone taken out no rule is broken."""


@dataclass(frozen=True)
class Caught:
    """The first seed in which a rule was seen to be broken."""

    safeguard: Safeguard
    seeds: int
    rule: str
    sentence: str


def always(value: Any) -> Callable[[Any], Any]:
    """A replacement that answers this, whatever it is asked."""
    return lambda _: lambda *_args, **_kwargs: value


def instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement that needs nothing of the original."""
    return lambda _: function


@contextmanager
def switched(switches: Iterable[Switch]) -> Iterator[None]:
    """A context in which methods are replaced."""
    with ExitStack() as stack:
        for switch in switches:
            original = getattr(switch.owner, switch.method)
            stack.enter_context(mock.patch.object(switch.owner, switch.method, switch.replacement(original)))
        yield


def scan(
    safeguard: Safeguard,
    run_seed: Callable[[int, ProfileT], RunReport[Any, Any]],
    profiles: Mapping[str, ProfileT],
    limit: int,
) -> Caught | None:
    """Run seeds of the safeguard's profile, from 0 on, without it; None where ``limit`` seeds saw nothing."""
    with switched((*safeguard.switches, *safeguard.second_line)):
        for seed in range(limit):
            for _, rule, sentence in run_seed(seed, profiles[safeguard.profile]).violations:
                return Caught(safeguard, seed + 1, rule, sentence)
    return None


def table_of(found: Iterable[Caught]) -> Table:
    """What was caught, a line for each safeguard."""
    table = Table(title="safeguards, each taken out in turn")
    for column in ("safeguard", "what it is for", "profile", "rule broken", "seeds"):
        table.add_column(column)
    for caught in found:
        safeguard = caught.safeguard
        table.add_row(safeguard.name, safeguard.purpose, safeguard.profile, caught.rule, str(caught.seeds))
    return table
