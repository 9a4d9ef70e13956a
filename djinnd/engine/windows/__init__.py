"""Memory shared with clients: captures, logits and KV that leave or enter the engine."""
