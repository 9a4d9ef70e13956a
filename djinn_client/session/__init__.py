"""The calls of a session as steps, which the blocking and the asyncio client run."""
