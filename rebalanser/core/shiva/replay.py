"""Commands from before a leader took over: of each application the last one wins (SH-2, SH-9)."""

from __future__ import annotations

from dataclasses import dataclass, field

from rebalanser.core.shiva.messages import RecordMetadata, StartRead, StopRead
from rebalanser.core.shiva.records import KeptCommand, StartCommand, StopCommand
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.types import ApplicationId, CommandId


@dataclass(frozen=True, slots=True)
class OrderedCommand:
    """A client's command, the offset as of which it counts, and its own offset."""

    record: StartCommand | StopCommand
    order: int
    at: RecordMetadata


@dataclass(slots=True)
class History:
    """The commands of one application on COMMAND."""

    last: OrderedCommand
    stop: OrderedCommand | None = None
    """The last stop command."""
    starts: dict[CommandId, OrderedCommand] = field(default_factory=dict)
    """Each start command, as it was read last: a kept one follows the client's own."""


@dataclass(frozen=True, slots=True)
class Due:
    """The commands to follow for one application: the stop, if any, and then one of the starts."""

    last: OrderedCommand
    stop: OrderedCommand | None
    starts: tuple[OrderedCommand, ...]
    """Starts after the stop, the last first: an earlier one counts if the later ones are refused."""


def commanded(event: StartRead | StopRead) -> OrderedCommand:
    """Return the command of a record."""
    record = event.record
    if isinstance(record, KeptCommand):
        return OrderedCommand(record.start, record.original, event.at)
    return OrderedCommand(record, event.at.offset, event.at)


class Replay:
    """The commands on COMMAND when a leader took over, read one by one."""

    def __init__(self, guards: Safeguards) -> None:
        self.histories: dict[ApplicationId, History] = {}
        self._guards = guards

    def read(self, command: OrderedCommand) -> None:
        """Take in one command; a kept one may be the copy of one that was overridden long ago."""
        application = command.record.application
        history = self.histories.setdefault(application, History(command))
        if self._guards.comes_after(command.order, history.last.order):
            history.last = command
        if isinstance(command.record, StartCommand):
            history.starts[command.record.command] = command
        elif history.stop is None or command.order > history.stop.order:
            history.stop = command

    def after(self, consumed: int) -> list[Due]:
        """Return the commands of each application since a document, in the order of the last ones."""
        due = [
            self._due(history, consumed)
            for history in self.histories.values()
            if not self._guards.is_reflected(history.last.order, consumed)
        ]
        return sorted(due, key=lambda commands: commands.last.order)

    def _due(self, history: History, consumed: int) -> Due:
        stop = history.stop
        if stop is not None and self._guards.is_reflected(stop.order, consumed):
            stop = None
        starts = [
            start
            for start in history.starts.values()
            if not self._guards.is_reflected(start.order, consumed)
            and (stop is None or self._guards.comes_after(start.order, stop.order))
        ]
        starts.sort(key=lambda start: start.order, reverse=True)
        return Due(history.last, stop, tuple(starts))
