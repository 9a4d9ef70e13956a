"""The intervention process: calls one tenant's functions outside of the engine, confined by the kernel.

The server starts it (server/whitebox/function_process.py) and never imports it. The messages are in
djinnd/jobs/sandbox.py.
"""
