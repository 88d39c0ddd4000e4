"""Groups in a log: the ``kafka://`` registry of ``rebalanser.Group``.

================  ===============================================================================
``records``       the records of the log
``parts``         values that are too large for one record
``splitting``     commands about very many resources, as several smaller ones
``replica``       the state of the group, computed from the log alone
``follower``      the replica of a log from its beginning, or from a snapshot
``leases``        counts leases, and chooses the node that writes that one has ended
``watches``       the watches that a change notifies
``coordinator``   a connection: its one thread, and the wait for its own record
``applications``  the applications of a cluster as resources
``log``           the log as a topic of Kafka
``groups``        the cluster behind a URL
================  ===============================================================================
"""

from rebalanser_kafka.group.groups import KafkaGroups, open_kafka

__all__ = ["KafkaGroups", "open_kafka"]
