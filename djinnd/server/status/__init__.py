"""Status, metrics, and the audit of the server's tables."""
