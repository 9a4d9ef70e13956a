"""OpenAI's API, with vLLM's additional endpoints."""
