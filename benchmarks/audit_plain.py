"""The plainest audit that a user would write: one SQL script in DuckDB, without Spark.

``python benchmarks/audit_plain.py FOLDER`` prints what it found as one line of JSON. It looks for overlaps by
wall clock beyond an error, barriers held by two by revision, missing numbers and tokens that do not grow; it
has no quarantine, no clocks proven wrong, no step order, no metrics, no evidence and no stream. It is in this
folder only, as something to compare with.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import duckdb

CLOCK_ERROR_S = 0.5
COLUMNS = {
    "group": "VARCHAR", "process": "VARCHAR", "node": "VARCHAR", "sequence": "BIGINT", "kind": "VARCHAR",
    "resource": "VARCHAR", "token": "BIGINT", "revision": "BIGINT", "wall_time": "DOUBLE",
}  # fmt: skip
ACCESSES = """
create temp table accesses as
select "group", resource, token, process, node,
       min(wall_time) filter (kind = 'start_entered') as starts,
       max(wall_time) filter (kind = 'stop_returned') as stops,
       max(revision) filter (kind = 'barrier_removed') as removed
from history where resource is not null and token is not null
group by all
"""
PAIRS = """
create temp table pairs as
select *, max(stops) over before as stopped, max(removed) over before as was_removed,
       max(starts) over before as started
from accesses
window before as (partition by "group", resource order by token
                  rows between unbounded preceding and 1 preceding)
"""
MISSING = """
select coalesce(sum(last + 1 - present), 0) from (
    select max(sequence) as last, count(distinct sequence) as present from history group by process
)
"""
QUESTIONS = {
    "overlaps": f"select count(*) from pairs where stopped - starts > {CLOCK_ERROR_S}",
    "barrier_overlaps": "select count(*) from pairs where was_removed > token",
    "token_order": f"select count(*) from pairs where started - starts > {CLOCK_ERROR_S}",
    "missing": MISSING,
    "accesses": "select count(starts) from accesses",
}


def found(folder: Path) -> dict[str, int]:
    """How many of each there are in the history in ``folder``, JSONL or Parquet."""
    source = f"read_parquet('{folder}/*.parquet')"
    if not list(folder.glob("*.parquet")):
        source = f"read_json('{folder}/*.jsonl', format='newline_delimited', columns={COLUMNS})"
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    with duckdb.connect() as database:
        database.execute(f"create temp table history as select {names} from {source}")
        database.execute(ACCESSES)
        database.execute(PAIRS)
        answers = {name: database.execute(question).fetchone() for name, question in QUESTIONS.items()}
    return {name: int(row[0]) for name, row in answers.items() if row is not None}


def main() -> None:
    """Audit one folder, and tell how long it took."""
    began, cpu = time.monotonic(), time.process_time()
    told = found(Path(sys.argv[1]))
    figures = {
        "wall_s": time.monotonic() - began,
        "cpu_s": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(figures | {"told": ", ".join(f"{count:,} {name}" for name, count in told.items())}))


if __name__ == "__main__":
    main()
