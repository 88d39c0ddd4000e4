"""How large what stands in a registry may be, by the registry's own limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rebalanser.registry.contract import Capabilities

KEYS_BYTES: Final = 16_384
"""Kept free in each transaction for the keys of one write."""
STATE_BYTES: Final = 65_536
"""What a state may take beside its result: the names of holder and worker, the last error."""
LARGEST_UPDATE_BYTES: Final = 131_072
"""However much the registry takes: results lie with the states, of which a page has hundreds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in bytes. Any state fits beside a head and an update, so that a task once added can move."""

    payload: int
    update: int
    state: int
    head: int
    """As text, which is mostly the ids that the task depends on."""
    task: int
    """Payload, head and first state together."""


def limits_of(capabilities: Capabilities) -> Limits:
    """The limits that follow from a registry's."""
    request = capabilities.max_request_bytes - KEYS_BYTES
    update = min(LARGEST_UPDATE_BYTES, (request - 2 * STATE_BYTES) * 3 // 10)
    state = update * 4 // 3 + STATE_BYTES
    return Limits(
        payload=request - STATE_BYTES,
        update=update,
        state=state,
        head=request - state - update,
        task=request,
    )
