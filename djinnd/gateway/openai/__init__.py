"""OpenAI's API, and what vLLM's server has beside it."""
