"""A session's token depends only on its logits, its tokens and its request."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from djinn_client.protocol import Sampling
from djinnd.core.session import Session
from djinnd.model.sampling.sampler import Sampler
from tests.support.sampling import reference, wanting

CPU = torch.device("cpu")
VOCAB = 37

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.37, 0.91, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.29, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 4.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.1, 0.7]),
    seed=st.integers(0, (1 << 63) - 1),
)
sessions = st.builds(wanting, samplings, tokens, tokens, st.none() | st.integers(0, VOCAB + 2))
batches = st.lists(sessions, min_size=1, max_size=8)


def logits_of(rows: int, seed: int, tied: bool) -> Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if tied else logits


@settings(max_examples=150)
@given(batches, st.integers(0, 1 << 30), st.booleans(), st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_other_sessions(batch: list[Session], seed: int, tied: bool, random: Random) -> None:
    logits = logits_of(len(batch), seed, tied)
    together = Sampler(VOCAB, CPU)
    whole = together.sample(logits, batch)
    order = random.sample(range(len(batch)), random.randint(1, len(batch)))
    some = together.sample(logits[order], [batch[row] for row in order])
    for place, row in enumerate(order):
        alone = Sampler(VOCAB, CPU).sample(logits[row : row + 1], [batch[row]])
        assert alone.tokens[0] == some.tokens[place] == whole.tokens[row]
        assert alone.logprobs[0] == some.logprobs[place] == whole.logprobs[row]


@settings(max_examples=300)
@given(sessions, st.integers(0, 1 << 30))
def test_the_token_equals_that_of_a_plain_python_sampler(session: Session, seed: int) -> None:
    logits = logits_of(1, seed, tied=False)
    assert Sampler(VOCAB, CPU).sample(logits, [session]).tokens == [reference(logits[0].tolist(), session)]


@settings(max_examples=100)
@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_a_fresh_sampler_in_each_step_gives_the_same_tokens(kinds: list[Sampling], seed: int) -> None:
    one = [wanting(sampling) for sampling in kinds]
    other = [wanting(sampling) for sampling in kinds]
    sampler = Sampler(VOCAB, CPU)
    for step in range(6):
        logits = logits_of(len(kinds), seed + step, tied=True)
        for session, token in zip(one, sampler.sample(logits, one).tokens, strict=True):
            session.tokens.append(token)
        for session, token in zip(other, Sampler(VOCAB, CPU).sample(logits, other).tokens, strict=True):
            session.tokens.append(token)
    assert [session.tokens for session in one] == [session.tokens for session in other]
