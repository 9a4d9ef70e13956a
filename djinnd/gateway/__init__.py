"""The HTTP gateway: a process that speaks HTTP to programs and djinnd's protocol to the daemon.

    program ── HTTP ──► connections.py ──► app.py ──► endpoint.py ──► openai_*.py ── daemon.py ──► djinnd
                        size and time      routes     token, places,   fields to       one pool of
                        of requests                   disconnects      requests        connections a token

It keeps no state but connections. It knows a principal only by the token that it hands on, so that breaking into the
gateway gives no more than the tokens that pass through it.
"""
