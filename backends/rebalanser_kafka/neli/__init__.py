"""NELI on Kafka: drives the member of ``rebalanser.core.neli`` with a consumer group.

===============  ================================================================================
``elections``    a cluster as NELI sees it: opens all of these
``topic``        the topic of heartbeats and the group's settings as the mode needs them
``candidate``    one process of a group: the thread that polls and carries out the member's effects
``consumer``     the consumer: assignments, records, and commits with their answers
``heartbeats``   the producer, and the requests for the number of partitions
``description``  a group as an outsider sees it
===============  ================================================================================
"""

from rebalanser_kafka.neli.elections import open_elections

__all__ = ["open_elections"]
