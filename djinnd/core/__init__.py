"""Values and state machines of the engine: session, request, batch, edits. No torch, asyncio, clock or I/O."""
