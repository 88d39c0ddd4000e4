"""The asyncio twins of the queue and its claims."""
