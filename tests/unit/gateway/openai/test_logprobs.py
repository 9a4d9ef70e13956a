from __future__ import annotations

from djinn_client.protocol import Logprobs, Piece
from djinnd.gateway.openai.logprobs import LOWEST, TokenTexts


def test_log_probabilities_of_parts_of_characters():
    texts = TokenTexts()
    piece = Piece(
        id=1, text="", token_ids=[7], logprobs=[Logprobs(-1.0, {7: -1.0, 8: -3e38})], token_bytes={7: b"\xc3", 8: b"a"}
    )
    (token,) = texts.of_chat(piece).content
    assert (token.token, token.bytes) == ("bytes:\\xc3", [0xC3])
    assert [top.logprob for top in token.top_logprobs] == [-1.0, LOWEST]
    assert texts.of_completion(piece).top_logprobs == [{"bytes:\\xc3": -1.0, "a": LOWEST}]
