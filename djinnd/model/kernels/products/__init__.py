"""Products with plain weights for a few tokens, and those of LoRA adapters."""
