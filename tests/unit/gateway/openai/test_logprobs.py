from __future__ import annotations

import asyncio

from djinn_client.protocol import Logprobs, Piece
from djinnd.gateway.openai.logprobs import LOWEST, ROWS_AT_ONCE, TokenTexts


def test_log_probabilities_of_parts_of_characters():
    texts = TokenTexts()
    piece = Piece(
        id=1, text="", token_ids=[7], logprobs=[Logprobs(-1.0, {7: -1.0, 8: -3e38})], token_bytes={7: b"\xc3", 8: b"a"}
    )
    (token,) = texts.of_chat(piece)["content"]
    assert (token["token"], token["bytes"]) == ("bytes:\\xc3", [0xC3])
    assert [top["logprob"] for top in token["top_logprobs"]] == [-1.0, LOWEST]
    assert texts.of_completion(piece).top_logprobs == [{"bytes:\\xc3": -1.0, "a": LOWEST}]


def test_the_rows_of_a_long_prompt_are_those_of_all_at_once():
    rows = [(token % 7, Logprobs(-float(token), {1: -0.5})) for token in range(2 * ROWS_AT_ONCE + 3)]
    known = {token: b"ab"[: 1 + token % 2] for token in range(7)}
    slow, fast = TokenTexts(), TokenTexts()
    slow.learn(known)
    fast.learn(known)
    assert asyncio.run(slow.rows_in_turns(rows)) == fast.rows(rows)
