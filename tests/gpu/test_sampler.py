from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from djinn_client.protocol import Sampling  # noqa: E402
from djinnd.core.session import Session  # noqa: E402
from djinnd.model.sampling.noise import gumbel, noise_keys, noise_streams, random_bits, vocabulary_counters  # noqa: E402
from djinnd.model.sampling.sampler import TEMPORARY_BYTES, Sampler  # noqa: E402
from djinnd.model.tuning import GROUP_LOGITS  # noqa: E402
from tests.support.sampling import wanting  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB = 128_256
KINDS = [
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=1.3, top_k=50),
    Sampling(temperature=1.3, top_p=0.9),
    Sampling(temperature=1.0, top_k=100, top_p=0.95, min_p=0.02),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, min_p=0.05),
    Sampling(frequency_penalty=0.5, logit_bias={7: 9.0, 9: -100.0}),
    Sampling(temperature=1.1, logit_bias={11: 5.0}, min_tokens=99, top_k=40),
]


def mixed(rows: int, kinds: list[Sampling] = KINDS, logprobs: int | None = 3) -> list[Session]:
    """Sessions with every kind of sampling in turn, each with its own seed and tokens."""
    sessions = []
    for row in range(rows):
        kind = kinds[row % len(kinds)]
        fields = {name: getattr(kind, name) for name in Sampling.__struct_fields__ if name != "seed"}
        prompt, output = range(row, row + 200), range(row * 3, row * 3 + 50)
        told = logprobs if row % 2 else None
        sessions.append(wanting(Sampling(**fields, seed=row), prompt, output, told, stop_tokens=[2, 11]))
    return sessions


def random_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 4
    return logits.to(dtype)


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """A list that is filled at the end with every operation in which the host waited for the device. It includes
    events, for which torch gives no warning."""
    waits: list[str] = []
    wait_for = torch.cuda.Event.synchronize

    def recorded(event: torch.cuda.Event) -> None:
        waits.append("an event")
        wait_for(event)

    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(torch.cuda.Event, "synchronize", recorded)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(warning.message) for warning in caught]
    waits += [message for message in messages if "called a synchronizing" in message]


def test_random_bits_equal_the_cpu():
    seeds, positions = torch.tensor([0, 1, (1 << 63) - 1]), torch.tensor([0, 131_072, 7])
    here = random_bits(noise_keys(noise_streams(seeds), positions), vocabulary_counters(VOCAB, CPU))
    there = random_bits(noise_keys(noise_streams(seeds.to(CUDA)), positions.to(CUDA)), vocabulary_counters(VOCAB, CUDA))
    assert torch.equal(here, there.cpu())


def test_gumbel_noise_is_finite_and_equals_the_cpu():
    seeds = torch.arange(16)
    here = gumbel(noise_keys(noise_streams(seeds), seeds), vocabulary_counters(VOCAB, CPU))
    there = gumbel(noise_keys(noise_streams(seeds.to(CUDA)), seeds.to(CUDA)), vocabulary_counters(VOCAB, CUDA))
    assert there.isfinite().all()
    torch.testing.assert_close(there.cpu(), here, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_equal_the_cpu(dtype: torch.dtype):
    rows = 4 * len(KINDS)
    logits = random_logits(rows, dtype)
    here = Sampler(VOCAB, CPU).sample(logits, mixed(rows))
    there = Sampler(VOCAB, CUDA).sample(logits.to(CUDA), mixed(rows))
    assert there.tokens == here.tokens
    for one, other in zip(here.logprobs, there.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert list(one.top) == list(other.top)
            assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_gets_the_same_token_alone_and_in_any_batch(dtype: torch.dtype):
    """The device may scan and sort one row by other kernels than many rows."""
    rows = 6 * len(KINDS)
    logits, sessions = random_logits(rows, dtype).to(CUDA), mixed(rows, logprobs=None)
    sampler = Sampler(VOCAB, CUDA)
    whole = sampler.sample(logits, sessions).tokens
    alone = [sampler.sample(logits[row : row + 1], sessions[row : row + 1]).tokens[0] for row in range(rows)]
    assert alone == whole
    assert sampler.sample(logits.flip(0), sessions[::-1]).tokens == whole[::-1]


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS], ids=["greedy", "mixed"])
def test_the_host_waits_once_for_a_step(kinds: list[Sampling]):
    rows = 2 * len(KINDS)
    logits, sessions = random_logits(rows, torch.bfloat16).to(CUDA), mixed(rows, kinds, logprobs=None)
    sampler = Sampler(VOCAB, CUDA)
    for _ in range(3):  # the first call builds the plan and allocates pinned memory
        tokens = sampler.sample(logits, sessions).tokens
        for session, token in zip(sessions, tokens, strict=True):
            session.tokens.append(token)
    with recorded_waits() as waits:
        sampler.sample(logits, sessions)
    assert len(waits) == 1, waits


def test_unsound_rows_harm_neither_the_others_nor_the_device():
    rows = 2 * len(KINDS)
    logits = random_logits(rows, torch.float32)
    broken = {1: math.nan, 3: math.nan, 4: math.inf, 8: math.nan, 11: math.inf}
    whole = Sampler(VOCAB, CUDA).sample(logits.to(CUDA), mixed(rows)).tokens
    for row, value in broken.items():
        logits[row, 5::7] = value
    logits[13] = -math.inf
    sampled = Sampler(VOCAB, CUDA).sample(logits.to(CUDA), mixed(rows))
    torch.cuda.synchronize()
    assert sampled.unsound == [*sorted(broken), 13]
    sound = [row for row in range(rows) if row not in sampled.unsound]
    assert [sampled.tokens[row] for row in sound] == [whole[row] for row in sound]


def test_temporary_memory_stays_within_temporary_bytes():
    rows = 4 * GROUP_LOGITS // VOCAB
    logits, sessions = random_logits(rows, torch.bfloat16).to(CUDA), mixed(rows)
    sampler = Sampler(VOCAB, CUDA)
    sampler.sample(logits, sessions)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampler.sample(logits, sessions)
    assert torch.cuda.max_memory_allocated() - before <= TEMPORARY_BYTES
