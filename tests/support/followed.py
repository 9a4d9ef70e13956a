"""An engine under runs that join and leave, and the steps that it launches before the last one's tokens are read."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from djinn_client.protocol import Sampling
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.scheduler.scheduler import Scheduler
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt

SESSIONS = 12


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """A list of the steps that will be launched ahead."""
    found, follow = list[Batch](), Scheduler.follow

    def note(scheduler: Scheduler, batch: Batch) -> Batch | None:
        following = follow(scheduler, batch)
        found.extend([following] if following else [])
        return following

    monkeypatch.setattr(Scheduler, "follow", note)
    return found


def lives(serving: EngineThread, vocab: int, temperature: float) -> list[tuple[list[int], str, int]]:
    """The tokens, reason and count of runs that join at different times, and end by limits or stop tokens."""
    chance, asked = random.Random(3), []
    tokens: dict[int, list[int]] = {}
    ended: dict[int, messages.Finished] = {}
    for number in range(SESSIONS):
        serving.open(f"s{number}")
        sampling = Sampling(temperature=temperature, seed=number, top_p=0.9)
        prompt, count = random_prompt(chance.randint(3, 40), vocab, number), chance.randint(1, 60)
        stop = [chance.randrange(vocab) for _ in range(9)]
        asked.append(replace(serving.run_message(f"s{number}", prompt, count), sampling=sampling, stop_tokens=stop))
    waiting, received = list(asked), 0
    while len(ended) < len(asked):
        if received % 8 == 0 and waiting:
            serving.send(*waiting[: SESSIONS // 3])
            del waiting[: SESSIONS // 3]
        message = serving.receive()
        received += 1
        if isinstance(message, messages.Stepped):
            for token in message.tokens:
                assert token.request not in ended
                tokens.setdefault(token.request, []).append(token.token)
        else:
            assert isinstance(message, messages.Finished) and message.request not in ended
            ended[message.request] = message
    replies = [ended[message.request] for message in asked]
    return [(tokens[reply.request], reply.reason, reply.generated) for reply in replies]
