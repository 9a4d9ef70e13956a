"""The text worker: a principal's child process that tokenises and detokenises for models that no administrator has
configured, confined by the kernel.

The server starts it (server/text/text_worker.py) and never imports it. Their messages are in djinnd/jobs/text.py.
"""
