"""What tests of Rebalanser, of its backends and of applications on top of it are made with.

The conformance suite for registries is :mod:`rebalanser.testing.registry_suite`; it alone needs pytest.
"""

from rebalanser.testing.clock import FakeClock
from rebalanser.testing.memory import MEMORY_CAPABILITIES, MemoryRegistry, MemoryStore, open_memory

__all__ = ["MEMORY_CAPABILITIES", "FakeClock", "MemoryRegistry", "MemoryStore", "open_memory"]
