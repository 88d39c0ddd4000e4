"""A worker's processes in a process of their own, to be killed or stopped: starts come by lines of JSON.

``application_worker.py FOLDER``; what becomes of the processes is told by lines of JSON too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rebalanser.core.shiva.messages import ProcessExited, ProcessStarted
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.runtime.clock import SystemClock
from rebalanser.shiva.data_folder import DataFolder
from rebalanser.shiva.manifest import Manifest
from rebalanser.shiva.processes import ApplicationProcesses, ProcessEvent


def tell(kind: str, **what: object) -> None:
    print(json.dumps({"event": kind, **what}), flush=True)


def main(folder: Path) -> None:
    with DataFolder.open(folder) as data:
        incarnation = data.incarnation
        tell("opened", lineage=incarnation.lineage, number=incarnation.number)

        def hear(event: ProcessEvent) -> None:
            name = str(event.application)
            if isinstance(event, ProcessStarted):
                pid = processes.running[event.application, event.run]
                tell("started", application=name, run=event.run, pid=pid)
            elif isinstance(event, ProcessExited):
                tell("exited", application=name, run=event.run, code=event.code, error=event.error)

        processes = ApplicationProcesses(data, "worker-1", hear)
        try:
            for line in sys.stdin:
                order = json.loads(line)
                application = ApplicationId.parse(order["application"])
                lasts_s = order.get("lasts_s")
                deadline = None if lasts_s is None else SystemClock().now() + lasts_s
                manifest = Manifest.model_validate_json(json.dumps(order["manifest"]))
                processes.start(application, order["run"], folder, manifest, 7, deadline)
        finally:
            processes.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
