"""Index of open tasks: the partitions of this process, and what may be claimed in them."""
