from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from djinn_client.protocol import Sampling
from djinnd.core.session import Session
from djinnd.model.sampling import sampler as sampler_module
from djinnd.model.sampling.sampler import Sampled, Sampler
from tests.support.sampling import reference, wanting

CPU = torch.device("cpu")
GREEDY = Sampling()


def new_sampler(vocab: int) -> Sampler:
    return Sampler(vocab, CPU)


def sample(logits: Tensor, sessions: Sequence[Session]) -> Sampled:
    return new_sampler(logits.shape[1]).sample(logits, sessions)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


class Operations(TorchDispatchMode):
    """Records each operation's name and the size of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.resolve_conj.default, torch.ops.aten.resolve_neg.default):  # these run nothing
            self.names[str(func.overloadpacket)] += 1
        made = result if isinstance(result, tuple) else (result,)
        self.largest = max([self.largest, *(tensor.numel() for tensor in made if isinstance(tensor, Tensor))])
        return result


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_is_the_argmax(dtype: torch.dtype):
    logits = random_logits(5, 100).to(dtype)
    sampled = sample(logits, [wanting(GREEDY) for _ in range(5)])
    assert sampled.tokens == logits.argmax(-1).tolist()
    assert sampled.logprobs == [None] * 5
    assert sampled.unsound == []


def test_the_first_of_tied_tokens_is_the_greedy_one():
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0], [7.0, 7.0, 7.0, 7.0]])
    drawn = Sampling(temperature=1.0, seed=1)
    assert sample(logits, [wanting(GREEDY), wanting(GREEDY)]).tokens == [1, 0]
    assert sample(logits, [wanting(Sampling(presence_penalty=1.0)), wanting(drawn)]).tokens[0] == 1


def test_greedy_rows_need_one_pass_and_no_memory_of_the_size_of_the_logits():
    sampler, logits = new_sampler(1000), random_logits(4, 1000)
    sessions = [wanting(GREEDY) for _ in range(4)]
    with Operations() as operations:
        sampler.sample(logits, sessions)
    assert operations.names["aten.max"] == 1
    assert operations.largest <= 4
    assert operations.names.total() <= 4  # argmax, and the test for unsound rows


def test_a_batch_may_have_no_row():
    assert sample(torch.empty(0, 8), []) == Sampled([], [], [])


# --- distributions --------------------------------------------------------------------------------------------------

CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=3.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_k=1 << 30),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=2.0, top_p=0.5),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=2.0, min_p=0.3),
    Sampling(temperature=1.5, min_p=1.0),
    Sampling(temperature=1.5, top_k=12, top_p=0.8),
    Sampling(temperature=1.5, top_k=12, top_p=0.95, min_p=0.05),
    Sampling(temperature=1.2, repetition_penalty=1.5),
    Sampling(temperature=1.2, presence_penalty=1.0),
    Sampling(temperature=1.2, repetition_penalty=1.3, presence_penalty=-0.7, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.0, frequency_penalty=0.7, logit_bias={5: 2.0, 6: -1.5}, top_k=30),
]
PROMPT, OUTPUT = [0, 1, 2, 3, 1], [3, 4, 5, 4]


def expected(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities by transformers' logits processors: float64 [1, vocab]."""
    for token, bias in sampling.logit_bias.items():
        logits[0, token] += bias
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(torch.tensor([PROMPT + OUTPUT]), logits)
    for token, times in Counter(OUTPUT).items():
        scores[0, token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(torch.tensor([PROMPT + OUTPUT]), scores.double()).softmax(-1)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_drawn_tokens_have_the_distribution_of_transformers(sampling: Sampling):
    """The support is equal, and chi-square of the frequencies is within five standard deviations of its mean."""
    draws, vocab = 8192, 40
    logits = random_logits(1, vocab, seed=3, scale=1.0)
    wanted = expected(logits.clone(), sampling)[0]
    # One session with many seeds instead of many sessions, so that its marks are built once.
    fields = {name: getattr(sampling, name) for name in Sampling.__struct_fields__ if name != "seed"}
    sessions = [wanting(Sampling(**fields, seed=seed), PROMPT, OUTPUT) for seed in range(draws)]
    tokens = sample(logits.expand(draws, vocab), sessions).tokens
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    assert not counts[wanted == 0].any()
    assert counts[wanted > 0.002].all()
    likely = wanted * draws >= 5
    chi_square = ((counts - wanted * draws)[likely] ** 2 / (wanted * draws)[likely]).sum().item()
    freedom = max(1, int(likely.sum()) - 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=0, top_k=2),
        Sampling(temperature=1.0, seed=0, top_p=0.3),
        Sampling(temperature=1.0, seed=0, min_p=0.9),
    ],
    ids=str,
)
def test_tokens_that_tie_with_the_last_kept_token_are_kept(sampling: Sampling):
    logits = torch.tensor([[1.0, 5.0, 5.0, 1.0, 5.0, 5.0]]).expand(400, 6)
    sessions = [wanting(sampling, prompt=[0] * position) for position in range(400)]
    assert set(sample(logits, sessions).tokens) == {1, 2, 4, 5}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300, 5e-324])
def test_temperature_towards_zero_is_greedy(temperature: float):
    logits = random_logits(50, 300)
    sessions = [
        wanting(Sampling(temperature=temperature, seed=row, top_k=row % 3, top_p=1 - row % 2 / 2, min_p=row % 5 / 10))
        for row in range(50)
    ]
    assert sample(logits, sessions).tokens == logits.argmax(-1).tolist()


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((200, 50), -math.inf)
    logits[:, 17] = -3.0
    logits[:, 31] = -4.0
    sessions = [wanting(Sampling(temperature=100.0, seed=seed, top_p=0.999)) for seed in range(200)]
    assert set(sample(logits, sessions).tokens) == {17, 31}


def test_top_p_applies_after_top_k_whatever_other_rows_use():
    logits = (torch.arange(20) * -0.001).expand(200, 20)
    narrow = [wanting(Sampling(temperature=1.0, top_k=2, top_p=0.4, seed=seed)) for seed in range(100)]
    wide = [wanting(Sampling(temperature=1.0, top_p=0.99, seed=seed)) for seed in range(100)]
    tokens = sample(logits, [*narrow, *wide]).tokens
    assert set(tokens[:100]) == {0}
    assert len(set(tokens[100:])) > 10


# --- random numbers -------------------------------------------------------------------------------------------------


def stream(seed: int, length: int = 40) -> list[int]:
    """Tokens of a session with flat logits, generated one after the other."""
    sampler, session = new_sampler(1000), wanting(Sampling(temperature=1.0, seed=seed))
    for _ in range(length):
        session.tokens += sampler.sample(torch.zeros(1, 1000), [session]).tokens
    return session.tokens[1:]


def test_tokens_ahead_are_those_of_later_steps():
    """Also with a bar that ends between them: see min_tokens."""
    logits = torch.zeros(4, 1000)
    logits[:, 3] = 20.0
    sampling, others = Sampling(temperature=1.0, seed=11, min_tokens=2), wanting(Sampling())
    session, sampler = wanting(sampling, stop_tokens=[3]), new_sampler(1000)
    told = sampler.sample(logits, [session, session, session, others], ahead=[0, 1, 2, 0]).tokens
    tokens = []
    for _ in range(3):
        tokens += sampler.sample(logits[:1], [session]).tokens
        session.tokens.append(tokens[-1])
    assert told == [*tokens, 3] and 3 not in tokens[:2] and tokens[2] == 3


def test_a_seed_determines_the_tokens():
    assert stream(11) == stream(11)
    assert len(set(stream(11))) > 30  # positions differ
    assert sum(a == b for a, b in zip(stream(11), stream(12), strict=True)) <= 2


def test_a_missing_seed_is_an_assertion():
    with pytest.raises(AssertionError, match="seed"):
        sample(torch.zeros(1, 4), [wanting(Sampling(temperature=1.0))])


# --- the batch ------------------------------------------------------------------------------------------------------

MIXED = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.3, top_k=7, seed=2),
    Sampling(temperature=1.3, top_p=0.7, seed=3),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, min_p=0.05, seed=4),
    Sampling(temperature=1.0, presence_penalty=0.5, top_k=50, top_p=0.9, seed=5),
    Sampling(frequency_penalty=0.6, logit_bias={7: 1.5, 9: -100.0}),
    Sampling(temperature=1.0, logit_bias={3: 4.0}, min_tokens=len(OUTPUT) + 2, seed=6),
]


def mixed() -> list[Session]:
    return [wanting(some, PROMPT, OUTPUT, logprobs=row % 3, stop_tokens=[1, 3]) for row, some in enumerate(MIXED)]


def test_a_batch_in_several_groups_gives_the_same(monkeypatch: pytest.MonkeyPatch):
    logits = random_logits(len(MIXED), 128)
    whole = sample(logits, mixed())
    monkeypatch.setattr(sampler_module, "GROUP_LOGITS", 2 * 128)
    assert sample(logits, mixed()) == whole


def test_logits_are_not_changed():
    logits = random_logits(len(MIXED), 128)
    before = logits.clone()
    sample(logits, mixed())
    assert torch.equal(logits, before)


def test_meanwhile_is_called_once_a_step():
    logits, done = random_logits(len(MIXED), 128), []
    sampled = new_sampler(128).sample(logits, mixed(), lambda: done.append("copies"))
    assert sampled.tokens == sample(logits, mixed()).tokens and done == ["copies"]


def test_parameters_are_uploaded_once_for_a_batch():
    sampler, sessions, logits = new_sampler(128), mixed(), random_logits(len(MIXED), 128)
    uploads = []
    for _ in range(4):
        with Operations() as operations:
            tokens = sampler.sample(logits, sessions).tokens
        uploads.append(operations.names["aten.lift_fresh"])  # the dispatcher's name for torch.tensor(list)
        for session, token in zip(sessions, tokens, strict=True):
            session.tokens.append(token)
    first, *rest = uploads
    assert rest == [3, 3, 3]  # positions, and the new tokens of the sessions with penalties, and how many
    assert first > 10


def test_another_batch_uploads_its_own_parameters():
    sampler, logits = new_sampler(128), random_logits(len(MIXED), 128)
    sessions = mixed()
    whole = sampler.sample(logits, sessions).tokens
    assert sampler.sample(logits[2:5], sessions[2:5]).tokens == whole[2:5]
    assert sampler.sample(logits.flip(0), sessions[::-1]).tokens == whole[::-1]
    sessions[1].request = wanting(Sampling(temperature=0.8, top_k=1, seed=1)).request
    assert sampler.sample(logits, sessions).tokens[1] == logits[1].argmax().item()


def test_penalties_follow_sessions_that_join_and_leave():
    """Compares greedy generation with transformers' repetition penalty. Bigram tables serve as models."""
    vocab, penalty = 30, 1.8
    table = random_logits(vocab, vocab, seed=5)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    sampler = new_sampler(vocab)
    sessions = [wanting(Sampling(repetition_penalty=penalty), prompt=[start, start + 1]) for start in range(6)]
    for step in range(40):
        present = [session for number, session in enumerate(sessions) if (step + number) % 5]
        logits = table[[session.tokens[-1] for session in present]]
        tokens = sampler.sample(logits, present).tokens
        for row, session in enumerate(present):
            wanted = processor(torch.tensor([session.tokens]), logits[row : row + 1].clone()).argmax().item()
            assert tokens[row] == wanted
            session.tokens.append(tokens[row])


def test_each_row_of_a_mixed_batch_agrees_with_the_reference():
    sampler, sessions = new_sampler(40), mixed()
    for step in range(6):
        logits = random_logits(len(MIXED), 40, seed=step)
        tokens = sampler.sample(logits, sessions).tokens
        for session, row, token in zip(sessions, logits.tolist(), tokens, strict=True):
            assert token == reference(row, session)
            session.tokens.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_is_chosen_before_min_tokens(temperature: float):
    logits = torch.zeros(2, 8)
    logits[:, [2, 5]] = 50.0
    sampler = new_sampler(8)
    sampling = Sampling(temperature=temperature, min_tokens=3, seed=1)
    sessions = [wanting(sampling, [2, 5], stop_tokens=[2, 5, 99]), wanting(Sampling(), stop_tokens=[2])]
    chosen = []
    for _ in range(4):
        tokens = sampler.sample(logits, sessions).tokens
        assert tokens[1] == 2  # the row without min_tokens may end
        chosen.append(tokens[0])
        sessions[0].tokens.append(tokens[0])
    assert not {2, 5} & {*chosen[:3]} and chosen[3] in (2, 5)


def test_a_request_begun_by_an_earlier_engine_counts_its_generated_tokens():
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0]])
    sampling = Sampling(min_tokens=3, frequency_penalty=10.0)
    assert sample(logits, [wanting(sampling, [0], [2, 1], stop_tokens=[2])]).tokens != [2]
    assert sample(logits, [wanting(sampling, [0], [1, 1, 1], stop_tokens=[2])]).tokens == [2]
    assert sample(logits, [wanting(Sampling(frequency_penalty=10.0), [2, 2], [2])]).tokens != [2]


def test_forgotten_requests_leave_nothing():
    sampler, sessions = new_sampler(128), mixed()
    requests = [session.request for session in sessions if session.request is not None]
    references = [sys.getrefcount(request) for request in requests]
    sampler.sample(random_logits(len(MIXED), 128), sessions)
    assert all(sys.getrefcount(request) > before for request, before in zip(requests, references, strict=True))
    for request in requests:
        sampler.forget(request)
        sampler.forget(request)
    del request
    assert [sys.getrefcount(request) for request in requests] == references


def test_a_request_forgotten_and_named_again_is_marked_anew():
    sampler, session = new_sampler(8), wanting(Sampling(repetition_penalty=10.0), prompt=[1])
    logits = torch.tensor([[0.0, 5.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert sampler.sample(logits, [session]).tokens == [2]
    assert session.request is not None
    sampler.forget(session.request)
    assert sampler.sample(logits, [session]).tokens == [2]
    sampler.forget(session.request)
    other = wanting(Sampling(repetition_penalty=10.0), prompt=[2])  # takes the slot
    assert sampler.sample(logits, [other]).tokens == [1]
    assert sampler.sample(logits, [session]).tokens == [2]


# --- log probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_come_from_the_raw_logits(dtype: torch.dtype):
    logits = random_logits(len(MIXED), 128).to(dtype)
    sampled = sample(logits, mixed())
    wanted = logits.float().log_softmax(-1)
    for row, (token, logprobs) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        assert logprobs is not None
        assert logprobs.token == pytest.approx(wanted[row, token].item(), abs=1e-5)
        top = wanted[row].topk(row % 3)
        assert list(logprobs.top) == top.indices.tolist()
        assert list(logprobs.top.values()) == pytest.approx(top.values.tolist(), abs=1e-5)


def test_the_likeliest_of_equal_tokens_are_the_first():
    logits = torch.tensor([[-1.0, 2.0, -1.0, 2.0, 0.0, 2.0, -1.0, -9.0]])
    for count in range(9):
        logprobs = sample(logits, [wanting(GREEDY, logprobs=count)]).logprobs[0]
        assert logprobs is not None
        assert list(logprobs.top) == [1, 3, 5, 4, 0, 2, 6, 7][:count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_impossible_tokens_are_finite(dtype: torch.dtype):
    ruled_out = -math.inf
    logits = torch.tensor([[0.0, ruled_out, 1.0, ruled_out], [ruled_out, ruled_out, -3.0, ruled_out]], dtype=dtype)
    for logprobs, kept in zip(sample(logits, [wanting(GREEDY, logprobs=4)] * 2).logprobs, [[2, 0], [2]], strict=True):
        assert logprobs is not None and list(logprobs.top)[: len(kept)] == kept
        assert all(map(math.isfinite, [logprobs.token, *logprobs.top.values()]))
        assert sum(map(math.exp, logprobs.top.values())) == pytest.approx(1.0)
        json.loads(json.dumps(logprobs.top, allow_nan=False))


def test_logprobs_only_where_asked_for_and_at_most_the_vocabulary():
    sampled = sample(random_logits(3, 5), [wanting(GREEDY), wanting(GREEDY, logprobs=99), wanting(GREEDY, logprobs=0)])
    none, all_, own = sampled.logprobs
    assert none is None
    assert all_ is not None and sorted(all_.top) == list(range(5))
    assert sum(map(math.exp, all_.top.values())) == pytest.approx(1.0)
    assert own is not None and own.top == {}


# --- rows that are not sound ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row_of",
    [
        lambda row: row.index_fill(0, torch.tensor([3]), math.nan),
        lambda row: row.index_fill(0, torch.tensor([3]), math.inf),
        lambda row: torch.full_like(row, math.nan),
        lambda row: torch.full_like(row, -math.inf),
    ],
    ids=["a NaN", "an inf", "all NaN", "all -inf"],
)
@pytest.mark.parametrize("place", range(len(MIXED)))
def test_an_unsound_row_harms_no_other(row_of: Any, place: int):
    logits = random_logits(len(MIXED), 128)
    logits[:, 3] = 20.0 * torch.rand(len(MIXED), generator=torch.Generator().manual_seed(1))
    whole = sample(logits, mixed())
    logits[place] = row_of(logits[place])
    sampled = sample(logits, mixed())
    assert sampled.unsound == [place]
    assert sampled.logprobs[place] is None
    finite = logits[place].masked_fill(~logits[place].isfinite(), -math.inf)
    assert sampled.tokens[place] == finite.argmax().item()
    for row in set(range(len(MIXED))) - {place}:
        assert sampled.tokens[row] == whole.tokens[row]
        assert sampled.logprobs[row] == whole.logprobs[row]


def test_two_queued_calls_are_read_in_order_also_when_the_first_logits_are_gone():
    """A step is launched before the last one's tokens are read, and overwrites its logits."""
    sampler, sessions = new_sampler(8), [wanting(GREEDY) for _ in range(2)]
    logits = torch.eye(8)[:2].clone()
    logits[1] = math.nan
    first = sampler.queue(logits, sessions)
    first.logits = None
    logits.copy_(torch.eye(8)[4:6])
    second = sampler.queue(logits, sessions)
    assert sampler.read(first) == Sampled([0, 0], [None, None], [1])
    assert sampler.read(second) == Sampled([4, 5], [None, None], [])
