"""The HTTP gateway: a process that speaks HTTP to programs and djinnd's protocol to the daemon.

    program ── HTTP ──► http/ ──────► app.py ──► entry/ ──────► openai/, … ──► calls/ ──► daemon/ ──► djinnd
                        size and      routes     token, place,  fields to     outputs    a pool of
                        time of                  body, reply,   requests,     of a       connections
                        a request                disconnects    replies       request    a token

It keeps no state but connections, and names of responses in progress. It knows a principal only by the token that it
hands on: an attacker inside the gateway gains the tokens that pass through it, and no more.
"""
