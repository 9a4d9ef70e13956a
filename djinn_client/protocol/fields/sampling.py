"""How a generation chooses its tokens."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.bounds import TokenId, Whole

MAX_BIASED = 1024  # tokens that have a logit bias in one call
BIAS_RANGE = 100.0

LogitBias = Annotated[dict[TokenId, float], msgspec.Meta(max_length=MAX_BIASED)]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Temperature 0 is greedy; 0 or 1 switches the other limits off, as named."""

    temperature: float = 0.0
    top_k: Whole = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; prompt and output, as in CTRL (Keskar et al. 2019)
    presence_penalty: float = 0.0  # 0: off; once for each token that the output has
    frequency_penalty: float = 0.0  # 0: off; once for each time that the output has the token
    logit_bias: LogitBias = {}  # token → number added to its logit
    min_tokens: Whole = 0  # before so many are generated, no end token, stop token or stop string ends the output
    seed: Whole | None = None  # None: the daemon draws one

    def validate(self) -> None:
        """Raises InvalidRequest for a value outside its range; NaN is outside every range."""
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            value = getattr(self, name)
            if math.isnan(value) or not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}; it must be from {low:g} to {high:g}", field=name)
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or abs(bias) > BIAS_RANGE:
                raise InvalidRequest(
                    f"the logit_bias of token {token} is {bias:g}; it must be from {-BIAS_RANGE:g} to {BIAS_RANGE:g}",
                    field="logit_bias",
                )
        if self.min_tokens < 0:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}; it must be 0 or more", field="min_tokens")
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, which leaves no token; use temperature=0 for greedy", field="top_p")
        if not 0 <= self.top_k < 1 << 31:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be 0 (off) or a positive count", field="top_k")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise InvalidRequest(f"seed is {self.seed}; it must be from 0 to 2^63-1", field="seed")
