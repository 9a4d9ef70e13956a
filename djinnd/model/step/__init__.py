"""One step: its inputs in one piece, the pass over paged KV, and the CUDA graphs of both."""
