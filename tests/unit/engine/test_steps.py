"""Steps that are launched before the tokens of the step before are read, on a CPU, which computes them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from djinn_client.protocol import Placing, Sampling
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.engine import steps, tuning
from djinnd.engine.run import passes
from djinnd.model.step.graphs import StepGraphs
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.scheduler.timing.step_times import StepTimes
from tests.support import reference
from tests.support.engine_thread import EngineThread
from tests.support.followed import lives, noted
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model
from tests.support.serving import TINY
from tests.support.walks import tiny_tokenizer

VOCAB = 512
FOLDER = reduced_model("llama-2")


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The steps that have been launched ahead."""
    monkeypatch.setitem(tuning.LAUNCHES_AHEAD, "cpu", True)
    monkeypatch.setattr(steps, "AHEAD_FOR_S", 60.0)  # on a busy machine a step may take longer than the usual time
    return noted(monkeypatch)


@pytest.fixture
def serving(followers: list[Batch]) -> Iterator[EngineThread]:
    with EngineThread() as engine:
        engine.loaded(FOLDER)
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sessions_that_join_and_leave_get_the_same_tokens(
    serving: EngineThread, followers: list[Batch], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    ahead = lives(serving, VOCAB, temperature)
    assert len(followers) > 20
    assert all(len(tokens) == generated for tokens, _, generated in ahead)
    monkeypatch.setitem(tuning.LAUNCHES_AHEAD, "cpu", False)
    with EngineThread() as other:
        other.loaded(FOLDER)
        assert lives(other, VOCAB, temperature) == ahead
    assert {reason for _, reason, _ in ahead} == {"length", "stop"}


@pytest.fixture
def with_graphs(serving: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's steps take the inputs of graphs. These are never captured, so each step runs eagerly, in its padded
    shape."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    runner = serving.runner()
    limits = 64, 32, 8, 8 * runner.plan.page_size
    runner.graphs.current = StepGraphs(runner.model, serving.device, *limits, runner.last_tokens)  # type: ignore[arg-type]
    runner.graphs.current.stop_capturing()


@pytest.mark.usefixtures("with_graphs")
def test_steps_of_graphs_follow_each_other(serving: EngineThread, followers: list[Batch]) -> None:
    serving.open("s")
    prompt = random_prompt(10, VOCAB, 1)
    tokens, _ = serving.outcome(serving.run("s", prompt, 30))
    assert tokens == reference.greedy(FOLDER, prompt, 30)
    assert len(followers) == 28, "all but the prompt's step and the first after it"


@pytest.mark.usefixtures("with_graphs")
def test_inputs_are_filled_again_when_the_device_has_taken_them(
    serving: EngineThread, followers: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the same shape share their inputs. The results of one step can be read before the next step, which has
    been launched, has taken its inputs."""
    sent, wait, compose = StepInputs.sent, StepInputs.wait, passes.compose
    untaken, fillings = set[StepInputs](), Counter[StepInputs]()

    def note_sent(inputs: StepInputs) -> None:
        sent(inputs)
        untaken.add(inputs)

    def note_wait(inputs: StepInputs) -> None:
        wait(inputs)
        untaken.discard(inputs)

    def note_filling(inputs: StepInputs, *args: Any) -> None:
        assert inputs not in untaken
        fillings[inputs] += 1
        compose(inputs, *args)

    monkeypatch.setattr(StepInputs, "sent", note_sent)
    monkeypatch.setattr(StepInputs, "wait", note_wait)
    monkeypatch.setattr(passes, "compose", note_filling)
    serving.open("s")
    prompt = random_prompt(10, VOCAB, 1)
    tokens, _ = serving.outcome(serving.run("s", prompt, 30))
    assert tokens == reference.greedy(FOLDER, prompt, 30)
    assert len(followers) == 28 and fillings.most_common(1)[0][1] == 29


@pytest.mark.parametrize("ends", ["cancel", "halt", "close"])
def test_a_run_that_is_ended_while_a_step_is_ahead(serving: EngineThread, followers: list[Batch], ends: str) -> None:
    prompt = random_prompt(10, VOCAB, 1)
    serving.open("s")
    serving.open("t")
    request, other = serving.run_message("s", prompt, 400), serving.run_message("t", prompt, 60)
    serving.send(request, other)
    for _ in range(12):
        serving.until(messages.Stepped)
    end = {"cancel": messages.CancelRun(request.request), "halt": messages.Halt(request.request, 5)}
    serving.send(end.get(ends, messages.Close("s")))
    outcomes = serving.outcomes([request.request, other.request])
    reply = outcomes[request.request][1]
    assert isinstance(reply, messages.Finished) and reply.reason == {"halt": "stop"}.get(ends, "cancelled")
    assert outcomes[other.request][1].generated == 60
    assert followers
    if ends != "close":
        again = serving.run("s", [7], 5)
        tokens, _ = serving.outcome(again)
        whole = reference.greedy(FOLDER, prompt, reply.generated)
        assert tokens == reference.greedy(FOLDER, [*prompt, *whole, 7], 5)


def test_a_step_that_fails_ahead_fails_its_requests_once(
    serving: EngineThread, followers: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, forward = random_prompt(10, VOCAB, 1), PagedModel.forward

    def fails(*args: Any, **options: Any) -> Any:
        if len(followers) > 3:
            monkeypatch.setattr(PagedModel, "forward", forward)
            raise RuntimeError("a kernel of ours is broken")
        return forward(*args, **options)

    monkeypatch.setattr(PagedModel, "forward", fails)
    for session in "st":
        serving.open(session)
    asked = [serving.run_message(session, prompt, 40) for session in "st"]
    serving.send(*asked)
    for tokens, reply in serving.outcomes([message.request for message in asked]).values():
        assert isinstance(reply, messages.Failed) and "a kernel of ours is broken" in reply.message
        assert tokens == reference.greedy(FOLDER, prompt, len(tokens)) and 3 <= len(tokens) < 8
    assert serving.outcome(serving.run("s", prompt, 5))[0] == reference.greedy(FOLDER, prompt, 5)


@pytest.mark.parametrize(
    "more",
    [{"logprobs": 2}, {"sampling": Sampling(repetition_penalty=1.2)}, {"sampling": Sampling(presence_penalty=0.5)}],
    ids=["log probabilities", "repetition penalty", "presence penalty"],
)
def test_no_step_is_launched_ahead_of_a_run_that_needs_the_tokens(
    serving: EngineThread, followers: list[Batch], more: dict[str, Any]
) -> None:
    serving.open("s")
    message = replace(serving.run_message("s", random_prompt(10, VOCAB, 1), 20), **more)
    serving.send(message)
    serving.outcome(message.request)
    assert not followers
    serving.outcome(serving.run("s", [5], 20))
    assert followers


def test_steps_ahead_end_for_work_between_two_steps(
    serving: EngineThread, followers: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time at all for such steps, each step is composed."""
    monkeypatch.setattr(steps, "AHEAD_FOR_S", 0.0)
    serving.open("s")
    serving.outcome(serving.run("s", random_prompt(10, VOCAB, 1), 20))
    assert not followers


def test_steps_ahead_and_guesses_take_turns(
    serving: EngineThread, followers: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses seem to cost nothing, whatever the times of steps are."""
    monkeypatch.setattr(StepTimes, "predict", lambda *given: 0.0)
    prompt = tiny_tokenizer().tokenize_str("def add(a, b):\n    return a + b\n\n\n" * 2)
    found = []
    for name, speculation in (("with", True), ("without", False)):
        serving.loaded(TINY, name, placing=Placing(speculation=speculation))
        serving.open(name, name)
        followers.clear()
        sampling = Sampling(temperature=1.0, seed=4)
        message = replace(serving.run_message(name, prompt, 200), sampling=sampling)
        serving.send(message)
        tokens, reply = serving.outcome(message.request)
        assert isinstance(reply, messages.Finished) and (reply.kept > 0) == speculation
        assert len(followers) > 10
        found.append(tokens)
        serving.send(messages.Close(name), messages.Unload(7, name))
        serving.until(messages.Unloaded)
    assert found[0] == found[1]
