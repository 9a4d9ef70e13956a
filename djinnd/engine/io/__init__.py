"""The engine's socket to the server, its parent's death, and work that is done beside steps."""
