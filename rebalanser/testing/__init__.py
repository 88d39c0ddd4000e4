"""Tools for tests of Rebalanser, of its backends and of applications on top of it.

The conformance suite for registries is ``rebalanser.testing.registry_suite``; it alone needs pytest.
"""

from typing import TYPE_CHECKING, Any

from rebalanser.testing.clock import FakeClock
from rebalanser.testing.memory import MEMORY_CAPABILITIES, MemoryRegistry, MemoryStore, open_memory

if TYPE_CHECKING:
    from rebalanser.testing.claim import FakeClaim

__all__ = [
    "MEMORY_CAPABILITIES",
    "FakeClaim",
    "FakeClock",
    "MemoryRegistry",
    "MemoryStore",
    "open_memory",
]


def __getattr__(name: str) -> Any:
    """Load ``FakeClaim`` at its first use: a registry in memory needs no tasks."""
    if name == "FakeClaim":
        from rebalanser.testing.claim import FakeClaim  # noqa: PLC0415 - see above

        return FakeClaim
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
