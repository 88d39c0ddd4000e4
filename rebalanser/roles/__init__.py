"""Who leads which role: ``Neli`` and ``AsyncNeli``, and the contract of the log beneath them."""

from rebalanser.roles.async_facade import AsyncNeli
from rebalanser.roles.contract import Candidacy, open_elections
from rebalanser.roles.description import GroupDescription
from rebalanser.roles.facade import Neli

__all__ = ["AsyncNeli", "Candidacy", "GroupDescription", "Neli", "open_elections"]
