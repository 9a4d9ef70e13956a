"""`make demo`: a conversation with a small real model, over HTTP and in a session that is forked, paused and steered.

It uses only public things: the commands `djinnd`, `djinnctl` and `curl`, and djinn_client.
"""
