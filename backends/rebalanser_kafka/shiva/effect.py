"""Effects of commands, as assignment documents show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from rebalanser.core.shiva.records import AssignmentDocument
from rebalanser.core.shiva.types import (
    ApplicationEntry,
    ApplicationId,
    ApplicationState,
    CommandId,
    Cordon,
    WorkerId,
)
from rebalanser.errors import ApplicationFailed, Superseded

_EFFECTIVE: Final = frozenset({ApplicationState.RUNNING, ApplicationState.FINISHED})
_HOPELESS: Final = frozenset({ApplicationState.FAILED, ApplicationState.REFUSED})
SetAsideReasons: TypeAlias = Mapping[tuple[int | None, str], str]
_SHOWN: Final = 5
"""Maximum workers or applications that a sentence names."""


def not_cordoned_yet(
    document: AssignmentDocument, worker: WorkerId, cordon: Cordon | None, offset: int | None = None
) -> str:
    """Return why a command about a worker has no effect yet, for people; empty once it has (SH-26).

    ``offset`` is its offset on COMMAND, if known.
    """
    unread = offset is not None and document.consumed < offset
    if unread or document.cordons.get(worker) is not cordon:
        return f"no leader has taken up the command for {worker} yet"
    if cordon is not Cordon.DRAINED:
        return ""
    there = [
        str(application)
        for application, entry in document.applications.items()
        if worker in (entry.worker, entry.leaving.worker if entry.leaving else None)
    ]
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return f"{worker} still has {', '.join(sorted(there)[:_SHOWN])}{more}" if there else ""


def reasons_of(document: AssignmentDocument) -> SetAsideReasons:
    """Return the reasons of the records that were set aside, by offset and key."""
    return {(each.offset, each.key): each.reason for each in document.set_aside}


class CommandProgress:
    """Follows one command through the documents.

    ``offset`` is its offset on COMMAND, and ``starts`` is True for a start, False for a stop, if known. A
    command that is for nothing but another number of replicas has ``replicas``.
    """

    def __init__(
        self,
        application: ApplicationId,
        command: CommandId,
        offset: int | None,
        *,
        starts: bool = False,
        replicas: int | None = None,
    ) -> None:
        self._application = application
        self._command = command
        self._offset = offset
        self._starts = starts
        self._replicas = replicas
        self._document: AssignmentDocument | None = None
        self._others: Sequence[ApplicationId] = ()
        self.entry: ApplicationEntry | None = None
        """The application, or its first replica, in the last document; None if that does not have it."""

    @property
    def summary(self) -> str:
        """Progress as of the last document, for people."""
        if self._document is None:
            return "no leader has published anything yet"
        return self._summary_of(self._document)

    def has_come(
        self,
        document: AssignmentDocument,
        set_aside: SetAsideReasons,
        others: Sequence[ApplicationId] = (),
    ) -> bool:
        """True if the document shows the effect: the application runs or finished, or is gone.

        ``set_aside`` is what ``reasons_of`` finds in the document, and ``others`` are the replicas in it
        beside the first one.

        Raises:
            ApplicationFailed: the effect will not come; the message says why.
            Superseded: a later command took effect.
        """
        self._document, self._others = document, others
        self.entry = document.applications.get(self._application)
        # The key distinguishes it from a record of CONTROL.
        kind = "cmd" if self._replicas is None else "scale"
        reason = set_aside.get((self._offset, f"{kind}:{self._application}")) if set_aside else None
        if reason is not None:
            raise ApplicationFailed(f"{self._application}: {reason}")
        if self._offset is not None and document.consumed < self._offset:
            return False
        stopping = self.entry is not None and self.entry.state is ApplicationState.STOPPING
        if (self._starts or self._replicas is not None) and (self.entry is None or stopping):
            raise Superseded(f"a later command has stopped {self._application}")
        if self.entry is None:
            return not others
        if self._replicas is None and self.entry.command != self._command:
            return self._is_overtaken(self.entry)
        if self._replicas not in (None, self.entry.replicas):
            raise Superseded(
                f"another command came later: {self._application} is to have {self.entry.replicas} replicas"
            )
        return self._do_all_run(document, self.entry)

    def _do_all_run(self, document: AssignmentDocument, first: ApplicationEntry) -> bool:
        states = [document.applications[each].state for each in (self._application, *self._others)]
        if any(state in _HOPELESS for state in states):
            raise ApplicationFailed(self.summary)
        return len(states) == first.replicas and all(state in _EFFECTIVE for state in states)

    def _is_overtaken(self, entry: ApplicationEntry) -> bool:
        """Judge the entry of another command: after a stop it may be one that is being stopped."""
        if entry.state is ApplicationState.STOPPING or self._offset is None:
            return False
        raise Superseded(f"another command for {self._application} came later: {self.summary}")

    def _summary_of(self, document: AssignmentDocument) -> str:
        if self._offset is not None and document.consumed < self._offset:
            return f"no leader has taken up the command for {self._application} yet"
        known = document.applications
        there = [each for each in (self._application, *self._others) if each in known]
        lacking = [each for each in there if known[each].state not in _EFFECTIVE]
        hopeless = [each for each in lacking if known[each].state in _HOPELESS]
        shown = next(iter((*hopeless, *lacking, *there)), None)
        if shown is None:
            return f"{self._application} is not there"
        entry = known[shown]
        place = f" on {entry.worker}" if entry.worker else ""
        if entry.state is ApplicationState.STOPPING and entry.leaving is not None:
            place = f" on {entry.leaving.worker}, which has not reported yet that it stopped it"
        reason = f": {entry.reason}" if entry.reason else ""
        each = "".join(f"; {worker}: {why}" for worker, why in sorted(entry.failed_on.items())[:_SHOWN])
        return f"{shown} is {entry.state}{place}{reason}{each}"


class Effects:
    """Follows the commands of many applications through the documents."""

    def __init__(self, effects: Mapping[ApplicationId, CommandProgress]) -> None:
        self._waiting = dict(effects)
        self._count = len(effects)
        self._errors: list[ApplicationFailed | Superseded] = []
        self.entries: dict[ApplicationId, ApplicationEntry | None] = {}
        """Applications whose command has had its effect, as of then."""

    @property
    def summary(self) -> str:
        """Progress of the first command without an effect, for people."""
        first = next((effect.summary for effect in self._waiting.values()), "")
        waiting = f"{len(self._waiting):,} of {self._count:,} applications are not settled; "
        return (waiting if self._count > 1 else "") + first

    def have_come(self, document: AssignmentDocument) -> bool:
        """True if all commands have had their effect.

        Raises:
            ApplicationFailed: all other effects have come; these will not.
            Superseded: the only command was replaced by a later one.
        """
        set_aside = reasons_of(document)
        others: dict[ApplicationId, list[ApplicationId]] = defaultdict(list)
        for each in document.applications:
            if each.replica:
                others[each.whole].append(each)
        for application, effect in list(self._waiting.items()):
            try:
                if not effect.has_come(document, set_aside, sorted(others.get(application, ()))):
                    continue
                self.entries[application] = effect.entry
            except (ApplicationFailed, Superseded) as error:
                self._errors.append(error)
            del self._waiting[application]
        if self._waiting or not self._errors:
            return not self._waiting
        if self._count == 1:
            raise self._errors[0]
        told = "; ".join(map(str, self._errors[:_SHOWN]))
        more = "; and others" if len(self._errors) > _SHOWN else ""
        raise ApplicationFailed(f"{len(self._errors):,} of {self._count:,} applications: {told}{more}")
