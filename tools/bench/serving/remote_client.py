"""The client's part of `remote_links`: measures one way to the daemon, and prints its figures as JSON.

python -m tools.bench.serving.remote_client ADDRESS ROUNDS TOKENS VOCABULARY
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import djinn_client as djinn
from tools.bench.serving.http import MODEL
from tools.bench.serving.remote import timed
from tools.two_machines import CLIENT_END, crossed

CALLS = 20
STREAMED = 64  # tokens of a stream
LOGITS = 500  # tokens of a forward
POINTS = ("blocks.*.hook_attn_out", "blocks.*.hook_resid_post")
# Little work and much to send: most weights are in the embedding, and a token has 131 kB of activations.
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def calls(address: str, rounds: int) -> dict[str, float]:
    """Medians: seconds of an empty call, of a first token and of a stop at a breakpoint; and tokens a second. The first
    round imports torch for the stop's activation, and does not count."""
    firsts, rates, stops = [], [], []
    with djinn.Session(MODEL, address=address) as s:
        empty = statistics.median(timed(s.token_ids) for _ in range(CALLS))
    for _ in range(1 + rounds):
        with djinn.Session(MODEL, address=address) as s:
            began = time.perf_counter()
            pieces = [time.perf_counter() for _ in s.stream("x = ", max_tokens=STREAMED, ignore_eos=True)]
            firsts.append(pieces[0] - began)
            rates.append((len(pieces) - 1) / (pieces[-1] - pieces[0]))
            s.breakpoint("blocks.4.hook_resid_post")
            stops.append(timed(partial(s.run, "y", max_tokens=1)))
    medians = (statistics.median(each[1:]) for each in (firsts, rates, stops))
    return {"call_s": empty, **dict(zip(("first_token_s", "tokens_per_s", "breakpoint_s"), medians, strict=True))}


def logits(address: str, rounds: int) -> dict[str, Any]:
    """A forward, until its logits are here, and the bytes that cross the cable for it."""
    seconds, wire = [], []
    for _ in range(rounds):
        with djinn.Session(MODEL, address=address) as s:
            before = _crossed()
            began = time.perf_counter()
            nbytes = s.forward([7] * LOGITS).nbytes
            seconds.append(time.perf_counter() - began)
            wire.append(_crossed() - before)
    return {"logits_s": statistics.median(seconds), "logits_bytes": nbytes, "wire_bytes": statistics.median(wire)}


def _crossed() -> int:
    try:
        return crossed(CLIENT_END)
    except ValueError:
        return 0  # a way without a cable


def large(address: str, rounds: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    """A model that is shared, once, and a capture of it."""
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **SHAPE))
    began = time.perf_counter()
    with djinn.share_model(model, name="large", address=address) as handle:
        shared = time.perf_counter() - began
        seconds = []
        for number in range(rounds):
            with djinn.Session(handle.name, address=address) as s:
                began = time.perf_counter()
                cache = s.capture(POINTS).run([number + 1] * tokens)
                seconds.append(time.perf_counter() - began)
                captured = sum(tensor.nbytes for tensor in cache.values())
                del cache
    weights = sum(weight.nbytes for weight in model.parameters())
    capture = {"capture_s": statistics.median(seconds), "capture_bytes": captured}
    return {**capture, "share_s": shared, "share_bytes": weights}


def main(address: str, rounds: str, tokens: str, vocabulary: str) -> None:
    times = int(rounds)
    small = calls(address, times) | logits(address, times)
    print(json.dumps(small | large(address, times, int(tokens), int(vocabulary))))


if __name__ == "__main__":
    main(*sys.argv[1:])
