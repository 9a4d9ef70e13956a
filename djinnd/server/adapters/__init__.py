"""The LoRA adapters of models: their names, files and users, and which of them an engine has"""
