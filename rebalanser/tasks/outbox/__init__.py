"""The outbox: enqueues while the engine is away (SK-4)."""
