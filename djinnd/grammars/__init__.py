"""The grammar process: follows the grammars of one principal's outputs on one model, beside the engine.

The engine starts it (engine/grammar/process.py) and never imports it; djinnd/jobs/grammar.py has their messages.
A grammar is a stranger's, and following one may take all the time and memory there is, or end the process: so it is
done here, and the engine's steps wait for none of it.
"""
