"""Shiva on Kafka: drives the machines of :mod:`rebalanser.shiva` over three topics of one partition each.

==============  ===============================================================================
``wire``        records as keys and values, and back
``reading``     what was read, as the machines' events
``topics``      the three topics as they should be
``patience``    asking again while a broker is not well
``follower``    a thread that follows a topic, one batch at a time
``parts``       the parts of archives, on a worker's disk until they are whole
``leader``      a leader: a candidate for COMMAND's partition, and a term for each time it gets it
``worker``      a worker: files and processes as the machine says
``cluster``     a client, and the way to all of these
``effect``      what has become of a client's command
==============  ===============================================================================
"""

from rebalanser_kafka.shiva.cluster import open_cluster

__all__ = ["open_cluster"]
