"""From messages to tokens, by the chat template that a checkpoint brings.

    ChatInput ──conversation──► plain values ──control──► marked values ──environment──► text ──control──► tokens

Templates are programs. Those of models that an administrator has configured run in the server, all others in a text
worker.
"""
