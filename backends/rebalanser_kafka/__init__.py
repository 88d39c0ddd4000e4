"""The Kafka backend: the ``kafka://`` registry, and the drivers of Shiva and NELI.

==================  ===========================================================================
``connection``      a URL, its options and the environment as librdkafka's configuration
``topics``          topics as they should be, and how existing ones differ
``log``             one topic partition read and written as a log, transactions included
``failures``        librdkafka's errors as Rebalanser's, with an outcome that is known or unknown
``history``         the sink of histories; ``history_source`` reads them
``group``           groups in a log: the coordinator of ``kafka://``
``shiva``           the driver of Shiva
``neli``            the driver of NELI
==================  ===========================================================================
"""

from rebalanser_kafka.group import open_kafka

__all__ = ["open_kafka"]
