"""Text of requests: templates and tokenizers, in the server or in a confined process of their user."""
