"""NELI on Kafka: drives the member of ``rebalanser.core.neli`` with a consumer group.

===============  ================================================================================
``elections``    a cluster as NELI sees it: the way to all of these
``topic``        the topic of heartbeats and the group's settings as the mode needs them
``candidate``    one process's part: the thread that polls, and what the member says is done
``consuming``    the consumer: what the coordinator assigns, records, commits with their answers
``heartbeats``   the producer, and the questions for the partition count
``description``  a group as an outsider sees it
===============  ================================================================================
"""

from rebalanser_kafka.neli.elections import open_elections

__all__ = ["open_elections"]
