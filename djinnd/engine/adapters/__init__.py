"""LoRA adapters of a model's sessions: read from their files, kept on the host, and brought to the device for a run"""
