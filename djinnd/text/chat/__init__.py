"""Turns messages into tokens, by the checkpoint's chat template.

    ChatInput ──conversation──► plain values ──control──► marked values ──environment──► text ──control──► tokens

Templates are programs. The server runs the templates of configured models; text workers run all others.
"""
