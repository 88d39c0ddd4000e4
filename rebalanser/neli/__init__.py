"""Leader election for roles: ``Neli`` and ``AsyncNeli``, and the contract of the log beneath them."""

from rebalanser.core.neli.roles import Role, hash_slot
from rebalanser.core.neli.settings import Mode, NeliSettings
from rebalanser.neli.async_facade import AsyncNeli
from rebalanser.neli.contract import Candidacy, open_elections
from rebalanser.neli.description import GroupDescription
from rebalanser.neli.facade import Neli

__all__ = [
    "AsyncNeli",
    "Candidacy",
    "GroupDescription",
    "Mode",
    "Neli",
    "NeliSettings",
    "Role",
    "hash_slot",
    "open_elections",
]
