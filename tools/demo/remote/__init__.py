"""`make demo-remote`: djinnd on one machine, a program on another one, and a cable between them, all on this machine.

It uses only public things: the commands `djinnd`, `djinnctl` and `openssl`, and djinn_client.
"""
