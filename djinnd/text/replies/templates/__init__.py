"""Response templates: a checkpoint says itself how its replies are to be read, as transformers publishes it."""
