"""Shiva: a cluster as its clients see it, and an application's files and processes on one worker.

A client uses ``open_cluster``, and ``status_of`` on what it reads there. A worker keeps files in its
``DataFolder`` and runs them by ``ApplicationProcesses``; ``tail`` reads what they printed.
"""

from __future__ import annotations

from rebalanser.core.shiva.options import LeaderOptions
from rebalanser.core.shiva.types import ApplicationId, Mode
from rebalanser.core.shiva.worker_options import WorkerOptions
from rebalanser.shiva.archives import Packed, inspect, pack, unpack
from rebalanser.shiva.channel import read_channel_file
from rebalanser.shiva.cluster import (
    Cluster,
    Commanded,
    OpenCluster,
    Running,
    Start,
    TopicNames,
    open_cluster,
)
from rebalanser.shiva.data_folder import DataFolder
from rebalanser.shiva.manifest import Manifest, manifest_schema, parse_manifest
from rebalanser.shiva.outputs import tail
from rebalanser.shiva.processes import ApplicationProcesses, ProcessEvent
from rebalanser.shiva.status import ClusterStatus, LastHeard, status_of

__all__ = [
    "ApplicationId",
    "ApplicationProcesses",
    "Cluster",
    "ClusterStatus",
    "Commanded",
    "DataFolder",
    "LastHeard",
    "LeaderOptions",
    "Manifest",
    "Mode",
    "OpenCluster",
    "Packed",
    "ProcessEvent",
    "Running",
    "Start",
    "TopicNames",
    "WorkerOptions",
    "inspect",
    "manifest_schema",
    "open_cluster",
    "pack",
    "parse_manifest",
    "read_channel_file",
    "status_of",
    "tail",
    "unpack",
]
