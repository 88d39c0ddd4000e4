"""Proof that an oracle or a test sees: a mutant of the product breaks a rule, and that must be noticed.

Nothing of this is known to the product: a mutant replaces small parts of it while seeds or tests run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

from rich.table import Table

from simulation.kernel.reports import USUAL_PROFILE, RunReport

ProfileT = TypeVar("ProfileT")


@dataclass(frozen=True)
class Switch:
    """A method, function or constant, and its replacement; ``replacement`` is given the original."""

    owner: type | ModuleType
    method: str
    replacement: Callable[[Any], Any]


@dataclass(frozen=True)
class Mutant:
    """A small change of the product, the promise that it breaks, and the rules that this is against."""

    name: str
    promise: str
    switches: tuple[Switch, ...]
    rules: frozenset[str]
    profile: str = USUAL_PROFILE
    first: int = 0
    """The first seed that is run."""
    second_line: tuple[Switch, ...] = ()
    """What would make the change good; switched alone, it breaks no rule."""
    test: str = ""
    """The test that must fail, of a mutant that no simulator runs."""


@dataclass(frozen=True)
class Caught:
    """The first seed in which a rule was seen to be broken; no seeds if a test saw it."""

    mutant: Mutant
    seeds: int | None
    rule: str
    sentence: str


def always(value: Any) -> Callable[[Any], Any]:
    """A replacement that answers this, whatever it is asked."""
    return lambda _: lambda *_args, **_kwargs: value


def instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A replacement that needs nothing of the original."""
    return lambda _: function


def edited(old: str, new: str, *more: tuple[str, str]) -> Callable[[Any], Any]:
    """A replacement with the original's source, in which ``new`` stands in place of ``old``."""

    def replacement(original: Any) -> Any:
        method: Any = original.fget if isinstance(original, property) else original
        function: Any = inspect.unwrap(method)
        source = textwrap.dedent(inspect.getsource(function))
        for before, after in ((old, new), *more):
            if source.count(before) != 1:
                raise ValueError(f"{before!r} is {source.count(before)} times in {function.__qualname__}")
            source = source.replace(before, after)
        made: dict[str, Any] = {}
        tree = compile(ast.parse(source), "<mutant>", "exec")
        exec(tree, function.__globals__, made)
        return made[function.__name__]

    return replacement


@contextmanager
def switched(switches: Iterable[Switch]) -> Iterator[None]:
    """A context in which methods are replaced."""
    with ExitStack() as stack:
        for switch in switches:
            original = getattr(switch.owner, switch.method)
            stack.enter_context(mock.patch.object(switch.owner, switch.method, switch.replacement(original)))
        yield


def scan(
    mutant: Mutant,
    run_seed: Callable[[int, ProfileT], RunReport[Any, Any]],
    profiles: Mapping[str, ProfileT],
    limit: int,
) -> Caught | None:
    """Run seeds of the mutant's profile until one shows a rule that it breaks; None after ``limit`` seeds."""
    with switched((*mutant.switches, *mutant.second_line)):
        for seed in range(mutant.first, mutant.first + limit):
            for _, rule, sentence in run_seed(seed, profiles[mutant.profile]).violations:
                if rule in mutant.rules:
                    return Caught(mutant, seed + 1 - mutant.first, rule, sentence)
    return None


def table_of(found: Iterable[Caught]) -> Table:
    """What was caught, a line for each mutant."""
    table = Table(title="mutants")
    for column in ("mutant", "promise", "profile or test", "rule broken", "seeds"):
        table.add_column(column, overflow="fold")
    for caught in found:
        mutant, seeds = caught.mutant, "" if caught.seeds is None else str(caught.seeds)
        table.add_row(mutant.name, mutant.promise, mutant.test or mutant.profile, caught.rule, seeds)
    return table
