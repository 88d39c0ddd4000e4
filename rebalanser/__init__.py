"""Nodes of a group share out resources so that every resource has exactly one owner."""
