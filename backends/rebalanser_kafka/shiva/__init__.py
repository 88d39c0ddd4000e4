"""Shiva on Kafka: drives the state machines of ``rebalanser.core.shiva`` over three topics.

==============  ===============================================================================
``wire``        records as keys and values, and back
``reading``     decodes records to events of the machines
``topics``      the three topics and their settings
``patience``    retries reads while a broker is unavailable
``follower``    a thread that follows a topic, one batch at a time
``parts``       a worker's files: threads, and offsets of the parts of archives
``leader``      a candidate for COMMAND's partition; each time it gets it, a term
``worker``      a worker's threads, files and processes
``cluster``     a connection: client, leaders and workers
``effect``      waits for the effects of commands
==============  ===============================================================================
"""

from rebalanser_kafka.shiva.cluster import open_cluster

__all__ = ["open_cluster"]
