"""Place jobs by weight, capacity and tags: three nodes in one process, for a moment.

    python examples/gpu_workers.py

Two nodes offer a GPU, one of them with less capacity. Training needs a GPU, reports run anywhere. One job
needs what no node has: it stays without an owner, and the state says why.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import rebalanser

NODES = {
    "gpu-large": rebalanser.Settings(capacity=8, tags=["gpu"]),
    "gpu-small": rebalanser.Settings(capacity=4, tags=["gpu"]),
    "plain": rebalanser.Settings(capacity=6),
}
JOBS = {
    **{f"train-{number}": {"weight": 3, "needs": ["gpu"]} for number in range(3)},
    **{f"report-{number}": {"weight": 1} for number in range(6)},
    "render": {"needs": ["gpu", "display"]},
}


def node(name: str, registry: str) -> rebalanser.Group:
    """A node that works on the jobs it owns."""
    group = rebalanser.Group("jobs", registry, node=name, settings=NODES[name])

    @group.worker
    def work(owned: rebalanser.Owned) -> None:
        owned.stop_requested.wait()  # a job would run here until it has to go

    return group


def run(registry: str) -> None:
    """Start the nodes, and print what each of them owns."""
    with rebalanser.Admin("jobs", registry) as admin, ExitStack() as nodes:
        admin.add_each(JOBS)
        for name in NODES:
            nodes.enter_context(node(name, registry))
        state = admin.wait_balanced()
    for each in state.nodes:
        owned = ", ".join(job.resource for job in state.resources if job.owner == each.label)
        print(f"{each.label} ({each.load:g} of {each.capacity:g}): {owned}")
    for job in state.resources:
        if job.reason is not None:
            print(f"nobody owns {job.resource}: {job.reason}")


def main() -> None:
    """Add the jobs, and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registry", metavar="URL", help="default: a SQLite file that is deleted afterwards")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(arguments.registry or f"sqlite:///{Path(folder) / 'groups.db'}")


if __name__ == "__main__":
    main()
