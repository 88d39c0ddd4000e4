"""What runs did and found, whatever is simulated: counted, judged and added up."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Generic, Self, TypeVar

from rebalanser.errors import InternalError

FaultT = TypeVar("FaultT")
FactT = TypeVar("FactT")

USUAL_PROFILE = "anything"
"""What every simulator calls the profile that it runs if none is named."""
MIN_SEEDS_TO_JUDGE = 50
"""Fewer seeds than these need not meet everything that can happen."""
_FAULTS_PER_SEED = 0.01


class Violation(Exception):
    """A rule was broken."""

    def __init__(self, rule: str, sentence: str) -> None:
        super().__init__(f"{rule}: {sentence}")
        self.rule = rule


@dataclass
class RunReport(Generic[FaultT, FactT]):
    """What one run or many of them did and found; every simulator adds its own counts."""

    seeds: int = 0
    simulated_s: float = 0.0
    events: int = 0
    faults: Counter[FaultT] = field(default_factory=Counter)
    facts: Counter[FactT] = field(default_factory=Counter)
    violations: list[tuple[int, str, str]] = field(default_factory=list)
    """Seed, rule, sentence."""

    def add(self, other: Self) -> None:
        """Take in the report of other runs: everything is added up."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))

    @classmethod
    def of(cls, reports: Iterable[Self]) -> Self:
        """What all these runs did and found."""
        total = cls()
        for report in reports:
            total.add(report)
        return total

    @contextmanager
    def judging(self, seed: int, say: Callable[[str, str], None]) -> Iterator[None]:
        """What breaks a rule in here is noted with its seed, and said in the trace."""
        try:
            yield
        except Violation as violation:
            self.violations.append((seed, violation.rule, str(violation)))
        except InternalError as error:
            self.violations.append((seed, "the core's own", f"{type(error).__name__}: {error}"))
        for _, _, sentence in self.violations:
            say("oracle", f"VIOLATION {sentence}")

    def told(self, replay_command: Callable[[int], str]) -> str:
        """Every violation, and the command that shows it again."""
        return "\n".join(f"{sentence}\n  {replay_command(seed)}" for seed, _, sentence in self.violations)

    def too_rare(self, kinds: Iterable[FaultT]) -> list[str]:
        """A sentence for every one of these faults that struck less often than once in a hundred seeds."""
        return [
            f"{self.seeds} seeds had {self.faults[kind]} times only: {kind}"
            for kind in kinds
            if self.faults[kind] < max(1, self.seeds * _FAULTS_PER_SEED)
        ]


def command_to_replay(simulator: str, seed: int, profile: str) -> str:
    """The one command that shows a seed's run again."""
    which = "" if profile == USUAL_PROFILE else f" --profile {shlex.quote(profile)}"
    return f"python tests/simulation {simulator} --seed {seed}{which} --trace"
