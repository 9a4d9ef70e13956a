"""The process that clients talk to: asyncio on uvloop, no torch. It knows sessions and users; engines do the work."""
