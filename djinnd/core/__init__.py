"""Values and state machines of the engine: no torch, no asyncio, no clock, no I/O."""
