"""The audit's findings beside what really was, kind by kind, for one run after another.

What the history can't show is told from the records alone: see ``is_hidden``, ``shows_removal``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

OVERLAP: Final = "overlap"
CLOCK_STEP_S: Final = 1e-6
"""What wall times are rounded to, in seconds, and more."""
COMPARED: Final = (
    OVERLAP,
    "barrier_overlap",
    "token_order",
    "start_without_barrier",
    "step_order",
    "two_leaders",
)


@dataclass
class Score:
    """What became of the true cases of one kind in some runs."""

    true: int = 0
    found: int = 0
    unseen: int = 0
    """True, and the records can't show it."""
    untrue: int = 0
    """Found because a record is not true: see ``removed_nothing_of_its_own``."""
    missed: list[str] = field(default_factory=list)
    """True and shown by the records, and not found."""
    false: list[str] = field(default_factory=list)
    """Found and not true."""

    def add(self, true: set[Any], found: set[Any], hidden: set[Any], group: str) -> None:
        """Take in what was true, found and hidden in one run."""
        self.true += len(true)
        self.found += len(true & found)
        self.unseen += len(true & hidden - found)
        self.missed += [f"{group} {case}" for case in sorted(true - found - hidden, key=str)]
        self.false += [f"{group} {case}" for case in sorted(found - true, key=str)]


@dataclass
class Seen:
    """The findings of one run, by kind, in the words of the truth."""

    certain: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    possible: dict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))


def seen(findings: Iterable[Mapping[str, Any]]) -> dict[str, Seen]:
    """The findings of each group."""
    groups: dict[str, Seen] = defaultdict(Seen)
    for finding in findings:
        certain = finding["certainty"] == "certain"
        of_group = groups[finding["group"]]
        kinds = of_group.certain if certain else of_group.possible
        kinds[finding["kind"]].add(_case(finding))
    return groups


def _case(finding: Mapping[str, Any]) -> Any:
    parties, resource = finding["parties"], finding["resource"]
    if finding["kind"] == "two_leaders":
        return int(finding["sentence"].split()[1])
    if finding["kind"] == "barrier_overlap":
        return resource, *((p["token"], p["process"]) for p in parties)
    starts = [(w["process"], w["sequence"]) for w in finding["evidence"] if w["kind"] == "start_entered"]
    return resource, *(starts[:1] if finding["kind"] == "token_order" else starts)


def overlaps(run: Any) -> Iterator[tuple[Any, Any]]:
    """All pairs of accesses of two processes that overlapped, the one with the smaller token first."""
    accesses = defaultdict(list)
    for access in run.accesses:
        accesses[access.resource].append(access)
    for of_resource in accesses.values():
        for at, one in enumerate(of_resource):
            for other in of_resource[at + 1 :]:
                if one.process != other.process and _overlap(one, other):
                    older, newer = sorted((one, other), key=lambda access: (access.token, access.process))
                    yield older, newer


def _overlap(one: Any, other: Any) -> bool:
    return (one.ends is None or one.ends > other.begins) and (other.ends is None or other.ends > one.begins)


def is_hidden(older: Any, newer: Any) -> bool:
    """Whether the records of a pair can't show that they overlapped.

    That is so where one of them has no recorded stop and its node wrote nothing after the other had started:
    it may have died before, for all that is written. From when OnStop raised nobody knows when access ended.
    The records of a removal decide where they say that the older one had stopped before it asked for it,
    which may be untrue: without its guards a registry lets a late request remove a barrier unasked. The start
    that a run broke down at is not written.
    """
    one, other = older.written, newer.written
    if one is None or other is None:
        return True
    released = one.released
    if released is not None and released.revision is not None and released.revision < newer.token:
        return True
    return bool(one.sure_end_wall <= other.start_wall or other.sure_end_wall <= one.start_wall)


def _pair(older: Any, newer: Any) -> Any:
    return older.resource, older.name, newer.name


def compare_overlaps(run: Any, found: Seen, score: Score) -> None:
    """Each later owner is told once, against one of the owners that it really overlapped with."""
    pairs = list(overlaps(run))
    true = {_pair(*pair) for pair in pairs}
    shown = {(newer.resource, newer.name) for older, newer in pairs if not is_hidden(older, newer)}
    told = found.certain[OVERLAP]
    score.false += [f"{run.group} {pair}" for pair in sorted(told - true)]
    later = {(resource, newer) for resource, _, newer in true}
    score.add(later, {(resource, newer) for resource, _, newer in told & true}, later - shown, run.group)


def compare_barriers(run: Any, found: Seen, score: Score) -> None:
    """A barrier was taken from a node that still held it, and another one added before the node knew.

    Each later barrier is told once. A barrier that is written over another one may have that one's token.
    """
    true: set[Any] = set()
    for former in run.barriers:
        robbed = former.ended_by is not None and former.ended_by != former.node
        held = run.removals.get((former.resource, former.token), set())
        removed = max((revision for revision in held if revision is not None), default=0)
        if robbed:
            true |= {
                (later.resource, former.token, token)
                for later in run.barriers
                if later.resource == former.resource and former.token < later.token < removed
                for token in {later.token, former.token}
            }
    told = {(resource, one[0], other[0]) for resource, one, other in found.certain["barrier_overlap"]}
    untrue = {case for case in told - true if removed_nothing_of_its_own(run, *case[:2])}
    score.untrue += len(untrue)
    shown = {case for case in true if (case[0], case[2]) in run.added and case[1] != case[2]}
    score.add(
        {(resource, token) for resource, former, token in true if former != token},
        {(resource, token) for resource, former, token in told & true if former != token},
        {(resource, token) for resource, former, token in true - shown},
        run.group,
    )
    score.false += [f"{run.group} {case}" for case in sorted(told - true - untrue)]


def removed_nothing_of_its_own(run: Any, resource: str, token: int) -> bool:
    """Whether a removal is written at another revision than that at which the registry lost the barrier.

    A node that may remove what is not its own removes another's barrier, or none, and takes it for its own:
    no record tells the one from the other.
    """
    lost = {one.end_revision for one in run.barriers if (one.resource, one.token) == (resource, token)}
    return not lost & run.removals.get((resource, token), set())


def compare_tokens(run: Any, found: Seen, score: Score) -> None:
    """A smaller token was used after a larger one, by a clock that can tell them apart; or by two nodes."""
    true, hidden = _used_by_two(run)
    for one in run.accesses:
        larger = [
            other
            for other in run.accesses
            if other.resource == one.resource and other.token > one.token and other.begins < one.begins
        ]
        if larger:
            case = (one.resource, one.name)
            true.add(case)
            if all(other.begins_wall == one.begins_wall for other in larger):
                hidden.add(case)
    score.add(true, found.certain["token_order"], hidden, run.group)


def _used_by_two(run: Any) -> tuple[set[Any], set[Any]]:
    """Accesses with a token that another node, or session of it, has used too; and those nothing tells of."""
    users: dict[Any, dict[Any, Any]] = defaultdict(dict)
    for access in run.accesses:
        users[access.resource, access.token][access.process, access.node] = access
    true, hidden = set(), set()
    for (resource, _), of_token in users.items():
        last_of_each = [of_token[user] for user in sorted(of_token)]
        for one, other in pairwise(last_of_each):
            true.add((resource, one.name))
            if one.written is None or other.written is None:
                hidden.add((resource, one.name))
    return true, hidden


def compare_starts(run: Any, found: Seen, score: Score) -> None:
    """OnStart was entered with a token that was not that of a barrier of the node; told once of a token."""
    first: dict[Any, Any] = {}
    for access in run.accesses:
        first.setdefault(access.key, access)
    unguarded = [access for access in first.values() if not access.guarded]
    true, hidden = (
        {(access.resource, access.name) for access in of}
        for of in (unguarded, [access for access in unguarded if access.written is None])
    )
    score.add(true, found.certain["start_without_barrier"], hidden, run.group)


def shows_removal(access: Any) -> bool:
    """Whether the records show that the barrier of an access was given up before its OnStop had returned."""
    written = access.written
    return written is not None and written.removal is not None and written.released is None


def compare_steps(run: Any, found: Seen, score: Score) -> None:
    """A node gave up the barrier of a resource while it accessed it, or began to access it afterwards.

    It gave it up when it asked for the removal, even if that took effect later only.
    """
    by_token = {(barrier.resource, barrier.token): barrier for barrier in run.barriers}
    true, hidden = set(), set()
    for access in run.accesses:
        barrier = by_token.get((access.resource, access.token))
        went_first = (
            barrier is not None
            and barrier.ends is not None
            and barrier.ended_by == access.node
            and (access.ends is None or barrier.ends < access.ends)
        )
        if access.given_up or went_first:
            case = (access.resource, access.name)
            true.add(case)
            if not shows_removal(access):
                hidden.add(case)
    score.add(true, found.certain["step_order"], hidden, run.group)


def compare_leaders(run: Any, found: Seen, score: Score) -> None:
    """Two nodes became leader of one term."""
    true = {term for term, nodes in run.leaders.items() if len(nodes) > 1}
    hidden = {term for term in true if len(run.elected.get(term, ())) < 2}
    score.add(true, found.certain["two_leaders"], hidden, run.group)


COMPARE: Final = {
    OVERLAP: compare_overlaps,
    "barrier_overlap": compare_barriers,
    "token_order": compare_tokens,
    "start_without_barrier": compare_starts,
    "step_order": compare_steps,
    "two_leaders": compare_leaders,
}


def scores(runs: Iterable[Any], findings: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Score]:
    """What became of each kind, for the sound runs and for those of each mutant."""
    found = seen(findings)
    result: dict[tuple[str, str], Score] = defaultdict(Score)
    for run in runs:
        variant = run.group.rpartition("/")[0]
        for kind, compare in COMPARE.items():
            compare(run, found.get(run.group, Seen()), result[variant, kind])
    return result


def false_by_clocks(
    runs: Iterable[Any], findings: Iterable[Mapping[str, Any]], clock_error_s: float
) -> list[str]:
    """What clocks that are off made certain though it was not so, possible though it could not be, or hid.

    Clocks within ``clock_error_s`` (seconds) of each other can hide overlaps of up to twice as long.
    """
    found = seen(findings)
    wrong = []
    for run in runs:
        told = found.get(run.group, Seen())
        pairs = list(overlaps(run))
        by_name = {access.name: access for access in run.accesses}
        for pair in (told.certain[OVERLAP] | told.possible[OVERLAP]) - {_pair(*pair) for pair in pairs}:
            one, other = (by_name[name].written for name in pair[1:])
            apart_s = max(other.start_wall - one.end_wall, one.start_wall - other.end_wall)
            if pair in told.certain[OVERLAP] or apart_s > clock_error_s + CLOCK_STEP_S:
                wrong.append(f"{run.group} {pair} did not overlap, by {apart_s:.4f} s")
        later = {(resource, newer) for resource, _, newer in told.certain[OVERLAP]}
        for older, newer in pairs:
            long = shown_s(older, newer) > 2 * clock_error_s
            if long and (newer.resource, newer.name) not in later:
                wrong.append(f"{run.group} {_pair(older, newer)} overlapped, and nothing is said")
    return wrong


def shown_s(older: Any, newer: Any) -> float:
    """For how long (seconds) the records show that the pair overlapped, the smaller of the two ways round."""
    if is_hidden(older, newer):
        return 0.0
    one, other = older.written, newer.written
    return float(min(one.sure_end_wall - other.start_wall, other.sure_end_wall - one.start_wall))


def table(runs: Iterable[Any], scores: Mapping[tuple[str, str], Score]) -> str:
    """The scores for people, one line for each variant and kind that had a case, and what went wrong."""
    of_variant: dict[str, list[Any]] = defaultdict(list)
    for run in runs:
        of_variant[run.group.rpartition("/")[0]].append(run)
    lines = [
        (
            f"{'variant':34}{'seeds':>6}{'broken':>7} {'kind':22}{'true':>6}{'found':>6}{'unseen':>7}"
            f"{'untrue':>7}{'missed':>7}{'false':>6}"
        )
    ]
    for variant, of in of_variant.items():
        broken = sum(run.violation is not None for run in of)
        head = f"{variant:34}{len(of):6}{broken:7}"
        for kind in COMPARED:
            s = scores[variant, kind]
            if s.true or s.untrue or s.false or kind == OVERLAP:
                lines.append(
                    f"{head} {kind:22}{s.true:6}{s.found:6}{s.unseen:7}{s.untrue:7}"
                    f"{len(s.missed):7}{len(s.false):6}"
                )
                head = " " * 47
    for (_, kind), score in scores.items():
        lines += [f"missed {kind} {case}" for case in score.missed[:20]]
        lines += [f"false {kind} {case}" for case in score.false[:20]]
    return "\n".join(lines)
