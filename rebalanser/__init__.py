"""Nodes of a group share out resources so that every resource has exactly one owner."""

from rebalanser.admin import Admin
from rebalanser.async_group import AsyncGroup
from rebalanser.feed import ResourceFeed
from rebalanser.group import Group
from rebalanser.runtime.owned import Owned
from rebalanser.settings import Settings

__all__ = ["Admin", "AsyncGroup", "Group", "Owned", "ResourceFeed", "Settings"]
