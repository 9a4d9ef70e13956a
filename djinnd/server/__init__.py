"""The process that clients connect to: asyncio on uvloop, without torch. It owns sessions and users; engines
compute."""
