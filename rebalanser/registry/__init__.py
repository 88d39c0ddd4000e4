"""The contracts of registries and coordinators, the storage of a group, and the backends by URL."""

from rebalanser.registry.contract import Capabilities, Registry
from rebalanser.registry.coordinator import Coordinator, GroupView, Holding
from rebalanser.registry.keys import MAX_ATTRIBUTE_BYTES, MAX_NAME_BYTES, GroupKeys
from rebalanser.registry.registry_coordinator import RegistryCoordinator, put_if_owned
from rebalanser.registry.script import Answer, failure
from rebalanser.registry.translation import Translation
from rebalanser.registry.urls import (
    GroupStore,
    RegistryUrl,
    known_schemes,
    open_backend,
    open_registry,
    parse_url,
)

__all__ = [
    "MAX_ATTRIBUTE_BYTES",
    "MAX_NAME_BYTES",
    "Answer",
    "Capabilities",
    "Coordinator",
    "GroupKeys",
    "GroupStore",
    "GroupView",
    "Holding",
    "Registry",
    "RegistryCoordinator",
    "RegistryUrl",
    "Translation",
    "failure",
    "known_schemes",
    "open_backend",
    "open_registry",
    "parse_url",
    "put_if_owned",
]
