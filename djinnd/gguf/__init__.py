"""GGUF files: their headers, and the configuration and tokenizer that their metadata describe"""
