"""The etcd backend: ``etcd://``, ``etcd+tls://`` and both with ``+srv``, etcd 3.4 or later.

It uses the generated stubs of ``python3-etcd3`` (imported as ``etcd3``). Failover, error mapping and watches
are its own, because a registry must know of every request whether it had an effect.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else gRPC's C core prints on the stderr of the command line

from rebalanser_etcd.registry import EtcdRegistry, open_etcd

__all__ = ["EtcdRegistry", "open_etcd"]
