"""Shiva on Kafka: drives the state machines of ``rebalanser.core.shiva`` over three topics.

=====================  ===========================================================================
``wire``               records as keys and values, and back
``decoding``           decodes records to events of the machines
``topics``             the three topics and their settings
``throttled_warning``  rate-limits warnings while a broker is unreachable
``follower``           a thread that follows a topic, one batch at a time
``last_records``       the last document and the last records of CONTROL
``parts``              a worker's files: threads, and offsets of the parts of archives
``candidate``          a candidate for COMMAND's partition; each time it gets it, a term begins
``leader``             the driver of one term
``worker``             a worker's threads, files and processes
``outputs``            answers to requests for the output of applications
``commands``           start commands with their archives, and commands that no document has yet
``cluster``            a connection: client, leaders and workers
``effect``             waits for the effects of commands
``facts``              facts of leaders and workers, in the history and in the log
=====================  ===========================================================================
"""

from rebalanser_kafka.shiva.cluster import open_cluster

__all__ = ["open_cluster"]
