"""What a person sees of the demo: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rebalanser.cli.table import render
from rebalanser.state import GroupState


@dataclass(frozen=True, slots=True)
class Scene:
    """The demo at one moment."""

    state: GroupState
    processes: dict[str, str]
    """What the processes are doing, by the label of their node: running, stopped, killed, left."""
    written: dict[str, int]
    """Lines accepted from each worker."""
    behind_bytes: int
    refused: int


class View:
    """Shows scenes and tells events; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_at = time.monotonic()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, event: str) -> None:
        """Print what happens, above the table."""
        passed_s = time.monotonic() - self._started_at
        self._console.print(f"{passed_s:5.1f} s  {event}", highlight=False, markup=False)

    def show(self, scene: Scene) -> None:
        """Draw the picture anew."""
        if self._live is not None:
            self._live.update(_picture(scene), refresh=True)


def _picture(scene: Scene) -> RenderableType:
    """What ``rebalanser watch`` shows of the group, and below it the processes and the stream."""
    processes = "   ".join(
        f"{label} {doing}, {scene.written.get(label, 0):,} lines" for label, doing in scene.processes.items()
    )
    stream = (
        f"{sum(scene.written.values()):,} lines processed, {scene.behind_bytes / 1024:,.0f} KiB behind, "
        f"{scene.refused} stale writes refused"
    )
    return Group(render(scene.state), Text(f"  {processes}"), Text(f"  {stream}"))
