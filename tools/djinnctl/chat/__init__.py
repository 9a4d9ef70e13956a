"""`djinnctl run`: a conversation with a model at the terminal."""
