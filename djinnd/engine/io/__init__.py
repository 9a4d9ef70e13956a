"""The engine's socket to the server, and work that is done beside steps."""
