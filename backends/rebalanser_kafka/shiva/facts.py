"""What happens to a leader or a worker, in the log."""

from __future__ import annotations

from rebalanser.runtime.logs import get_logger
from rebalanser.shiva.messages import Fact, FactKind

_WARNINGS = frozenset(
    {
        FactKind.WORKER_REMOVED,
        FactKind.WORKER_REFUSED,
        FactKind.COMMAND_REFUSED,
        FactKind.RECORD_SET_ASIDE,
        FactKind.DOCUMENT_REFUSED,
        FactKind.FILES_REFUSED,
        FactKind.APPLICATION_FAILED,
        FactKind.LEADER_SILENT,
    }
)


def log_fact(fact: Fact, cluster: str) -> None:
    """One line, with ``action`` saying what happened."""
    fields = {name: value for name, value in fact.detail.items() if value not in (None, "")}
    if fact.application is not None:
        fields["application"] = str(fact.application)
    if fact.worker:
        fields["worker"] = fact.worker
    log = get_logger("rebalanser.shiva")
    report = log.warning if fact.kind in _WARNINGS else log.info
    report(fact.kind.value.replace("_", " "), action=fact.kind.value, cluster=cluster, **fields)
