"""The process that owns one device: step loop, models, and the scheduler beside the memory it decides about."""
