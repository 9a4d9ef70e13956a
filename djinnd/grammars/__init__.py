"""The grammar process: follows the grammars of one principal's outputs on one model, beside the engine.

The engine starts it (engine/grammar/process.py) and never imports it; djinnd/jobs/grammar.py has their messages. A
grammar is untrusted, and following one may take all the time and memory there is, or crash the process. So it is done
here, and the engine's steps never wait for it.
"""
