"""The audit's findings beside what really was, kind by kind, for one run after another.

What the history can't show is told from the records alone: see :func:`is_hidden`, :func:`shows_removal`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    unproven: int = 0
    """Found of an owner whose OnStop raised: see :func:`is_unproven`."""
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
    if finding["kind"] == "token_order":
        return resource, *min((p["token"], p["process"]) for p in parties)
    return resource, *((p["token"], p["process"]) for p in parties)


def overlaps(run: Any) -> Iterator[tuple[Any, Any]]:
    """All pairs of accesses of two processes that overlapped, the one with the smaller token first."""
    accesses = defaultdict(list)
    for access in run.accesses:
        accesses[access.resource].append(access)
    for of_resource in accesses.values():
        for at, one in enumerate(of_resource):
            for other in of_resource[at + 1 :]:
                if one.process != other.process and _overlap(one, other):
                    older, newer = sorted((one, other), key=lambda access: access.token)
                    yield older, newer


def _overlap(one: Any, other: Any) -> bool:
    return (one.ends is None or one.ends > other.begins) and (other.ends is None or other.ends > one.begins)


def lasted_s(run: Any, older: Any, newer: Any) -> float:
    """For how long the pair overlapped, seconds, as measured by the smaller of the two ways round."""
    ends = [run.ended if access.ends_wall is None else access.ends_wall for access in (older, newer)]
    return min(ends[0] - newer.begins_wall, ends[1] - older.begins_wall)


def is_hidden(run: Any, older: Any, newer: Any) -> bool:
    """Whether the records of a pair can't show that they overlapped.

    That is so where one of them has no recorded stop and its node wrote nothing after the other had started:
    it may have died before, for all that is written. It is also so where a start is not recorded, and where
    the older one wrote that it stopped before it wrote that it had removed its barrier, at a revision below
    the newer one's token: the barrier was gone before its removal was written, and revisions outweigh clocks.
    Last, nobody knows when access ended whose OnStop raised.
    """
    one, other = (run.written.get(access.name) for access in (older, newer))
    if one is None or other is None or one.start_wall is None or other.start_wall is None:
        return True
    released = (
        one.stop_wall is not None
        and one.removed_sequence is not None
        and one.removed_revision is not None
        and one.stop_sequence < one.removed_sequence
        and one.removed_revision < newer.token
    )
    silent = one.end_wall <= other.start_wall or other.end_wall <= one.start_wall
    return released or silent or _raised(one) or _raised(other)


def _raised(written: Any) -> bool:
    return bool(written.failed and written.stop_wall is None)


def is_unproven(run: Any, pair: Any) -> bool:
    """Whether it hangs on an owner whose OnStop raised, or that started again with the token that it had.

    In the first case access is taken as not ended: by the oracle until the lease ends, of which the records
    know nothing, and by the audit until the last record of the node. In the second the audit has one interval
    for all that was done with the token. Each later owner is told once, perhaps against such an owner only.
    """
    resource, *owners = pair
    both = [run.written[resource, process, token] for token, process in owners]
    return any(
        (_raised(one) or one.starts > 1) and one.end_wall > other.start_wall
        for one, other in (both, both[::-1])
    )


def compare_overlaps(run: Any, found: Seen, score: Score) -> None:
    """Each later owner is told once, against one of the owners that it really overlapped with."""
    pairs = list(overlaps(run))
    true = {
        (older.resource, (older.token, older.process), (newer.token, newer.process)) for older, newer in pairs
    }
    hidden = {(newer.resource, newer.token) for _, newer in pairs}
    hidden -= {(newer.resource, newer.token) for older, newer in pairs if not is_hidden(run, older, newer)}
    told = found.certain[OVERLAP]
    unproven = {pair for pair in told - true if is_unproven(run, pair)}
    score.unproven += len(unproven)
    hidden |= {(resource, newer[0]) for resource, _, newer in unproven}
    score.false += [f"{run.group} {pair}" for pair in sorted(told - true - unproven)]
    score.add(
        {(resource, newer[0]) for resource, _, newer in true},
        {(resource, newer[0]) for resource, _, newer in told & true},
        hidden,
        run.group,
    )


def compare_barriers(run: Any, found: Seen, score: Score) -> None:
    """A barrier was taken from a node that still held it, and another one added before the node knew.

    Each later barrier is told once. A barrier that is written over another one may have that one's token.
    """
    true: set[Any] = set()
    for former in run.barriers:
        robbed = former.ended_by is not None and former.ended_by != former.node
        held = [
            w.removed_revision
            for (r, _, t), w in run.written.items()
            if (r, t) == (former.resource, former.token)
        ]
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
    score.unproven += len(untrue)
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

    A node that may remove what is not its own removes another's barrier, or none, and takes it for its own.
    """
    lost = {one.end_revision for one in run.barriers if (one.resource, one.token) == (resource, token)}
    removed = {w.removed_revision for (r, _, t), w in run.written.items() if (r, t) == (resource, token)}
    return not lost & removed


def compare_tokens(run: Any, found: Seen, score: Score) -> None:
    """A smaller token was first used after a larger one, by a clock that can tell them apart."""
    first: dict[Any, Any] = {}
    for access in run.accesses:
        first.setdefault(access.name, access)
    true, hidden = set(), set()
    for one in first.values():
        larger = [
            other
            for other in first.values()
            if other.resource == one.resource and other.token > one.token and other.begins < one.begins
        ]
        if larger:
            case = (one.resource, one.token, one.process)
            true.add(case)
            if all(other.begins_wall == one.begins_wall for other in larger):
                hidden.add(case)
    score.add(true, found.certain["token_order"], hidden, run.group)


def compare_starts(run: Any, found: Seen, score: Score) -> None:
    """OnStart was entered with a token that was not that of a barrier of the node."""
    true = {(a.resource, (a.token, a.process)) for a in run.accesses if not a.guarded}
    hidden = {(r, (t, p)) for r, (t, p) in true if (r, p, t) not in run.written}
    score.add(true, found.certain["start_without_barrier"], hidden, run.group)


def shows_removal(run: Any, access: Any) -> bool:
    """Whether the records show that the barrier of an access was removed before its OnStop had returned."""
    written = run.written.get(access.name)
    if written is None or written.removed_sequence is None or written.start_wall is None:
        return False
    return written.stop_wall is None or written.removed_sequence < written.stop_sequence


def compare_steps(run: Any, found: Seen, score: Score) -> None:
    """A node removed the barrier of a resource while it accessed it, or began to access it afterwards."""
    by_token = {(barrier.resource, barrier.token): barrier for barrier in run.barriers}
    true, hidden = set(), set()
    for access in run.accesses:
        barrier = by_token.get((access.resource, access.token))
        if barrier is None or barrier.ends is None or barrier.ended_by != access.node:
            continue
        if access.ends is None or barrier.ends < access.ends:
            case = (access.resource, (access.token, access.process))
            true.add(case)
            if not shows_removal(run, access):
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
    """What became of each kind, for the sound runs and for those without each safeguard."""
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
        true = {(o.resource, (o.token, o.process), (n.token, n.process)) for o, n in pairs}
        for pair in (told.certain[OVERLAP] | told.possible[OVERLAP]) - true:
            resource, *owners = pair
            one, other = (run.written[resource, process, token] for token, process in owners)
            apart_s = max(other.start_wall - one.end_wall, one.start_wall - other.end_wall)
            near = pair in told.possible[OVERLAP] and apart_s <= clock_error_s + CLOCK_STEP_S
            if not near and not is_unproven(run, pair):
                wrong.append(f"{run.group} {pair} did not overlap, by {apart_s:.4f} s")
        later = {(resource, newer) for resource, _, newer in told.certain[OVERLAP]}
        for older, newer in pairs:
            long = shown_s(run, older, newer) > 2 * clock_error_s
            if long and (newer.resource, (newer.token, newer.process)) not in later:
                wrong.append(f"{run.group} {older.name} {newer.name} overlapped, and nothing is said")
    return wrong


def shown_s(run: Any, older: Any, newer: Any) -> float:
    """For how long (seconds) the records show that the pair overlapped, the smaller of the two ways round."""
    if is_hidden(run, older, newer):
        return 0.0
    one, other = (run.written[access.name] for access in (older, newer))
    return min(one.end_wall - other.start_wall, other.end_wall - one.start_wall)


def table(runs: Iterable[Any], scores: Mapping[tuple[str, str], Score]) -> str:
    """The scores for people, one line for each variant and kind that had a case, and what went wrong."""
    of_variant: dict[str, list[Any]] = defaultdict(list)
    for run in runs:
        of_variant[run.group.rpartition("/")[0]].append(run)
    lines = [
        (
            f"{'variant':34}{'seeds':>6}{'broken':>7} {'kind':22}{'true':>6}{'found':>6}{'unseen':>7}"
            f"{'unproven':>9}{'missed':>7}{'false':>6}"
        )
    ]
    for variant, of in of_variant.items():
        broken = sum(run.violation is not None for run in of)
        head = f"{variant:34}{len(of):6}{broken:7}"
        for kind in COMPARED:
            s = scores[variant, kind]
            if s.true or s.unproven or s.false or kind == OVERLAP:
                lines.append(
                    f"{head} {kind:22}{s.true:6}{s.found:6}{s.unseen:7}{s.unproven:9}"
                    f"{len(s.missed):7}{len(s.false):6}"
                )
                head = " " * 47
    for (_, kind), score in scores.items():
        lines += [f"missed {kind} {case}" for case in score.missed[:20]]
        lines += [f"false {kind} {case}" for case in score.false[:20]]
    return "\n".join(lines)
