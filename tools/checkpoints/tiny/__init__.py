"""djinn-tiny, the model that ships: its training from nothing, and its card."""
