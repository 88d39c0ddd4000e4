"""Groups in a log: the ``kafka://`` registry of ``rebalanser.Group``.

===============  ================================================================================
``records``      what stands in the log
``parts``        requests that are too large for one record
``portions``     commands about very many resources, one after the other
``replica``      what the group is like, worked out from the log alone
``follower``     the replica of a log from its beginning, or from a snapshot
``leases``       counting leases, and whose turn it is to say that one has ended
``watches``      who is to be told of what
``coordinator``  a connection: the one thread, and waiting for one's own record
``applications``  what runs in the cluster, as resources
``log``          the log as a topic of Kafka
``naming``       the name of a group's topic
``groups``       the cluster behind a URL
===============  ================================================================================
"""

from rebalanser_kafka.group.groups import KafkaGroups, open_kafka

__all__ = ["KafkaGroups", "open_kafka"]
