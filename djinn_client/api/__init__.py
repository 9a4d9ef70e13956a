"""The public interface: sessions and calls, blocking and for asyncio."""
