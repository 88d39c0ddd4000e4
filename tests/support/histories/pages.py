"""Histories as lines of files: doubled, shuffled, torn, of an older schema, and mixed with no records."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from rebalanser.history import SCHEMA_VERSION, Protocol, Record, UnreadableReason
from support.histories.ownership import overtake, strangers
from support.histories.planted import Defect, Planted, finding
from support.histories.world import World

_FIRST_SCHEMA_KEYS: Final = (
    "group", "node", "label", "incarnation", "sequence", "kind", "term", "version", "resource", "token",
    "revision", "wall_time", "monotonic_time", "detail",
)  # fmt: skip


@dataclass(slots=True)
class Pages:
    """What is written: ``records`` and ``noise`` anywhere, each of ``torn`` at the end of a file."""

    records: list[bytes]
    noise: list[bytes] = field(default_factory=list)
    torn: list[bytes] = field(default_factory=list)


Spoiler: TypeAlias = Callable[[random.Random, World, Pages], tuple[Planted, ...]]
"""Does something to the lines and tells what an audit must find of it."""


def pages_of(world: World) -> Pages:
    """Everything that the processes of a world wrote, in order."""
    return Pages([record.to_line() for process in world.processes for record in process.records])


def _quarantined(world: World, reason: UnreadableReason) -> Planted:
    return Planted(Defect.QUARANTINE, world.group, reason=reason)


def _some(rng: random.Random, pages: Pages) -> dict[str, object]:
    content: dict[str, object] = json.loads(rng.choice(pages.records))
    return content


def _line(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def doubled_records(rng: random.Random, _world: World, pages: Pages) -> tuple[Planted, ...]:
    """Some records are there twice or more often: a near miss (AU-2)."""
    pages.records.extend(rng.choices(pages.records, k=rng.randint(1, len(pages.records))))
    return ()


def doubled_file(_rng: random.Random, _world: World, pages: Pages) -> tuple[Planted, ...]:
    """All records are there twice, the second time in the other order: a near miss (AU-2)."""
    pages.records.extend(reversed(pages.records))
    return ()


def shuffled_records(rng: random.Random, _world: World, pages: Pages) -> tuple[Planted, ...]:
    """The records come in any order: a near miss."""
    rng.shuffle(pages.records)
    return ()


def keys_in_other_order(rng: random.Random, _world: World, pages: Pages) -> tuple[Planted, ...]:
    """The same JSON, its keys in another order and with blanks, some twice: a near miss."""
    for number in range(len(pages.records)):
        content = list(json.loads(pages.records[number]).items())
        again = json.dumps(dict(rng.sample(content, len(content)))).encode() + b"\n"
        if rng.random() < 0.3:
            pages.records.append(pages.records[number])
        pages.records[number] = again
    return ()


def torn_line(rng: random.Random, world: World, pages: Pages) -> tuple[Planted, ...]:
    """A copy of a record breaks off in the middle, as the last line of its file (AU-1)."""
    line = rng.choice(pages.records)
    begins = line.index(b'"group":') + len(world.group) + 10
    pages.torn.append(line[: rng.randrange(begins, len(line) - 2)])
    return (_quarantined(world, UnreadableReason.TORN),)


def garbage(rng: random.Random, world: World, pages: Pages) -> tuple[Planted, ...]:
    """A line is not JSON (AU-1)."""
    noise = rng.choice(["core dumped", "\x00\x01", "[1, 2", "ÿ" * 200, "}{"])
    pages.noise.append(f'{noise} "{world.group}" <- here\n'.encode())
    return (_quarantined(world, UnreadableReason.NOT_JSON),)


def no_record(rng: random.Random, world: World, pages: Pages) -> tuple[Planted, ...]:
    """A line is JSON, but a key is missing, or one is too many, or a value is of another type (AU-1)."""
    content = _some(rng, pages)
    content["resource"] = world.group
    match rng.randrange(4):
        case 0:
            del content[rng.choice(["group", "process", "sequence", "kind", "wall_time", "schema_version"])]
        case 1:
            content[rng.choice(["sequence", "wall_time", "term"])] = "many"
        case 2:
            content["kind"] = "no_such_kind"
        case _:
            content["sequence"] = -1
    pages.noise.append(_line(content))
    return (_quarantined(world, UnreadableReason.NOT_A_RECORD),)


def newer_schema(rng: random.Random, world: World, pages: Pages) -> tuple[Planted, ...]:
    """A line was written by a newer version (AU-1)."""
    content = _some(rng, pages)
    content["schema_version"] = SCHEMA_VERSION + rng.randint(1, 40)
    if rng.random() < 0.5:
        content["epoch"] = 17
    pages.noise.append(_line(content))
    return (_quarantined(world, UnreadableReason.NEWER_SCHEMA),)


def first_schema(_rng: random.Random, world: World, pages: Pages) -> tuple[Planted, ...]:
    """Two processes wrote in the first schema, which knew no host: their overlap is found all the same."""
    first, second = strangers(world)
    resource = overtake(world, first, second, world.rng.uniform(5.0, 60.0))
    pages.records.extend(_line(in_first_schema(r)) for r in (*first.records, *second.records))
    return (finding(world, Defect.OVERLAP, resource),)


def in_first_schema(record: Record) -> dict[str, object]:
    """A record as schema version 1 wrote it."""
    content = json.loads(record.to_line())
    return {"schema_version": 1} | {key: content.get(key) for key in _FIRST_SCHEMA_KEYS}


@dataclass(frozen=True, slots=True)
class Spoiling:
    """A spoiler, and in which protocols it can happen."""

    spoil: Spoiler
    protocols: frozenset[Protocol] = frozenset(Protocol)

    @property
    def name(self) -> str:
        """What the spoiler is called."""
        return self.spoil.__name__


SPOILINGS: Final = (
    Spoiling(doubled_records),
    Spoiling(doubled_file),
    Spoiling(shuffled_records),
    Spoiling(keys_in_other_order),
    Spoiling(torn_line),
    Spoiling(garbage),
    Spoiling(no_record),
    Spoiling(newer_schema),
    Spoiling(first_schema, frozenset({Protocol.GROUP})),
)


def write_pages(folder: Path, histories: Sequence[Pages], *, files: int, seed: int) -> list[Path]:
    """Write many histories into ``files`` JSONL files, mixed with each other, and one for each torn line.

    The lines of a history keep their order within a file. The same arguments write the same bytes.
    """
    rng = random.Random(f"pages of {seed}")
    sheets: list[list[bytes]] = [[] for _ in range(files)]
    for history in histories:
        first = rng.randrange(files)
        for line in (*history.records, *history.noise):
            sheets[rng.choice([first, first, first, rng.randrange(files)])].append(line)
    folder.mkdir(parents=True, exist_ok=True)
    torn = [[line] for history in histories for line in history.torn]
    for sheet in torn:
        sheet.insert(0, sheets[0].pop() if sheets[0] else b"")
    paths = []
    for number, sheet in enumerate(rng.sample(sheets + torn, len(sheets) + len(torn))):
        path = folder / f"history.{number:06}.jsonl"
        path.write_bytes(b"".join(sheet))
        paths.append(path)
    return paths
