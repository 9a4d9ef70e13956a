"""OpenAI's Responses API, which keeps what it has answered."""
