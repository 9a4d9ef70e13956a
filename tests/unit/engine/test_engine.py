from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from djinn_client.protocol import Sampling
from djinnd import messages
from djinnd.device.cpu import CpuDevice
from djinnd.engine.report import Reporter
from djinnd.engine.run import prepare_model as serving_module
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import CHUNKS, SINGLES
from djinnd.scheduler.scheduler import Scheduler
from tests.support import reference
from tests.support.besides import add_part, in_steps, on_message
from tests.support.checkpoints import Tensors, altered
from tests.support.engine_thread import FOREVER, EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

VOCAB = 512
FOLDER = reduced_model("llama-2")


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        yield engine


@pytest.fixture
def serving(engine: EngineThread) -> EngineThread:
    """The engine with llama-2 as "m" and one session "s"."""
    engine.loaded(FOLDER)
    engine.open("s")
    return engine


# --- models ---------------------------------------------------------------------------------------------------------


def test_the_first_message_describes_the_device(engine: EngineThread) -> None:
    budget = engine.device.budget
    assert (engine.ready.device, engine.ready.budget_bytes, engine.ready.pid) == ("cpu", budget.total, os.getpid())


def test_a_load_sends_its_stages_and_then_the_model(engine: EngineThread) -> None:
    request = engine.number()
    engine.send(messages.Load(request, "m", str(FOLDER), host_kv_bytes=0))
    stages: list[str] = []
    while not isinstance(message := engine.receive(), messages.Loaded | messages.Failed):
        if isinstance(message, messages.NeedArena):
            assert message.request == request and message.model == "m"
            engine.send(engine.grant(message))
        stages.append(message.stage if isinstance(message, messages.Loading) else type(message).__name__)
    assert list(dict.fromkeys(stages)) == ["opening", "NeedArena", "reading", "uploading", "ArenaFilled", "preparing"]
    assert isinstance(message, messages.Loaded) and message.request == request
    assert (message.model.name, message.model.state, message.model.vocab) == ("m", "ready", VOCAB)


def test_unload_gives_back_the_memory_and_the_name(engine: EngineThread) -> None:
    for _ in range(2):
        engine.loaded(FOLDER)
        assert engine.report().used_bytes > 0
        engine.send(messages.Unload(7, "m"))
        assert engine.until(messages.Unloaded).request == 7
        report = engine.report()
        assert (report.used_bytes, report.models) == (0, [])


def test_two_models_share_the_budget_and_take_turns(serving: EngineThread) -> None:
    alone = serving.report().used_bytes
    other = reduced_model("gpt2")
    serving.loaded(other, "n")
    assert serving.report().used_bytes > alone
    serving.open("t", "n")
    one = serving.run_message("s", prompt(40), 12)
    two = serving.run_message("t", prompt(30), 12)
    serving.send(one, two)
    outcomes = serving.outcomes([one.request, two.request])
    assert outcomes[one.request][0] == reference.greedy(FOLDER, prompt(40), 12)
    assert outcomes[two.request][0] == reference.greedy(other, prompt(30), 12)


def test_a_model_serves_during_the_check_of_another(serving: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def check(*args: object, **options: object) -> Iterator[None]:
        while not may_end.is_set():
            yield

    monkeypatch.setattr(serving_module, "check_paging", check)
    load = messages.Load(serving.number(), "n", str(FOLDER), host_kv_bytes=0)
    serving.send(load)
    serving.send(serving.grant(serving.until(messages.NeedArena, messages.Loading)))
    while serving.until(messages.Loading, messages.ArenaFilled).stage != "preparing":
        pass
    run, tokens = serving.run("s", prompt(40), 12), list[int]()
    while len(tokens) < 12:
        tokens += [token.token for token in serving.until(messages.Stepped, messages.Loading).tokens]
    assert tokens == reference.greedy(FOLDER, prompt(40), 12)
    assert serving.until(messages.Finished, messages.Loading).request == run
    may_end.set()
    assert serving.until(messages.Loaded, messages.Loading).request == load.request


def test_a_load_s_options_are_in_its_model_info(engine: EngineThread) -> None:
    info = engine.loaded(FOLDER, kv_bytes=2 << 20, dtype="bfloat16", max_context=700)
    assert (info.dtype, info.max_context) == ("bfloat16", 700)
    assert info.kv_bytes == (info.pages + 1) * info.page_bytes <= 2 << 20


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model_rejected", r"lacks tensor model\.norm\.weight"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "model_rejected", "llama fails the check at load"),
    ],
    ids=["while it is read", "at the check"],
)
def test_a_failed_load_leaves_the_engine_as_it_was(
    serving: EngineThread, tmp_path: Path, change: Any, code: str, message: str
) -> None:
    before = serving.report()
    reply = serving.load(altered(tmp_path, change=change), "broken")
    assert isinstance(reply, messages.Failed) and reply.code == code
    assert message.replace("\\", "") in reply.message
    after = serving.report()
    assert (after.used_bytes, after.models) == (before.used_bytes, before.models)
    tokens, _ = serving.outcome(serving.run("s", prompt(9), 5))
    assert tokens == reference.greedy(FOLDER, prompt(9), 5)
    serving.loaded(reduced_model("gpt2"), "broken")


def test_a_missing_checkpoint_is_refused(engine: EngineThread, tmp_path: Path) -> None:
    reply = engine.load(tmp_path)
    assert isinstance(reply, messages.Failed) and reply.code == "model_not_found"


def test_a_refused_arena_fails_the_load(serving: EngineThread) -> None:
    def refuse(need: messages.NeedArena) -> messages.ArenaRefused:
        return messages.ArenaRefused(need.request, "/dev/shm is too small", {"needed": need.nbytes})

    reply = serving.load(reduced_model("gpt2"), "n", grant=refuse)
    assert isinstance(reply, messages.Failed)
    assert (reply.code, reply.message) == ("out_of_memory", "/dev/shm is too small")
    assert reply.data["needed"] > 0
    serving.loaded(reduced_model("gpt2"), "n")


def test_a_complete_arena_is_not_read_from_disk(engine: EngineThread) -> None:
    kept: list[messages.ArenaReady] = []

    def keep(need: messages.NeedArena) -> messages.ArenaReady:
        kept.append(engine.grant(need))
        return kept[0]

    engine.loaded(FOLDER, grant=keep)
    engine.send(messages.Unload(7, "m"))
    engine.until(messages.Unloaded)

    def adopt(need: messages.NeedArena) -> messages.ArenaReady:
        return messages.ArenaReady(need.request, kept[0].name, kept[0].offset, complete=True)

    engine.loaded(FOLDER, grant=adopt)
    engine.open("s")
    tokens, _ = engine.outcome(engine.run("s", prompt(9), 5))
    assert tokens == reference.greedy(FOLDER, prompt(9), 5)


def test_too_small_a_budget_is_refused_with_a_figure_that_works() -> None:
    with EngineThread(CpuDevice(1 << 20)) as engine:
        reply = engine.load(FOLDER)
        assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
        assert "m needs at least" in reply.message and "and 1.0 MiB of the budget of 1.0 MiB is free" in reply.message
        assert reply.data["budget"] == reply.data["free"] == 1 << 20 < reply.data["needed"]
        assert engine.report().used_bytes == 0
    with EngineThread(CpuDevice(reply.data["needed"])) as engine:
        info = engine.loaded(FOLDER)
        assert (info.blocks_plain, info.blocks_streamed) == (0, 4)
        engine.open("s")
        tokens, _ = engine.outcome(engine.run("s", prompt(9), 5))
        assert tokens == reference.greedy(FOLDER, prompt(9), 5)
        assert engine.report().used_bytes == reply.data["needed"]


# --- generation -----------------------------------------------------------------------------------------------------


def test_a_run_sends_started_then_tokens_then_one_finished(serving: EngineThread) -> None:
    request = serving.run("s", prompt(100), 6)
    first = serving.until(messages.Stepped)
    assert serving.started == [request]
    tokens, reply = serving.outcome(request)
    assert [first.tokens[0].token, *tokens] == reference.greedy(FOLDER, prompt(100), 6)
    assert serving.started == [request], "once"
    assert reply == messages.Finished(request, "length", length=106, generated=6, computed=100)
    assert serving.report().generated_tokens == 6


def test_started_requests_are_sent_while_the_device_runs_the_step(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, counts, send = list[type](), list[int](), serving.channel.send
    monkeypatch.setattr(
        serving.channel, "send", lambda message, *fds: (sent.append(type(message)), send(message, *fds))
    )
    add_part(monkeypatch, serving.engine, lambda: counts.append(sent.count(messages.Stepping)))
    request = serving.run("s", prompt(10), 2)
    serving.outcome(request)
    assert serving.started == [request] and counts == [1, 1]


def test_a_session_continues_without_a_prompt_and_after_an_engine_s_death(serving: EngineThread) -> None:
    serving.outcome(serving.run("s", prompt(20), 4))
    tokens, reply = serving.outcome(serving.run("s", [], 4))
    wanted = reference.greedy(FOLDER, prompt(20), 8)
    assert tokens == wanted[4:] and isinstance(reply, messages.Finished) and reply.length == 28
    serving.open("again", tokens=prompt(20) + wanted[:4])
    tokens, _ = serving.outcome(serving.run("again", [], 4))
    assert tokens == wanted[4:]


def test_a_stop_token_ends_a_run(serving: EngineThread) -> None:
    wanted = reference.greedy(FOLDER, prompt(20), 8)
    tokens, reply = serving.outcome(serving.run("s", prompt(20), 8, stop_tokens=[wanted[3]]))
    assert tokens == wanted[: wanted.index(wanted[3]) + 1]
    assert isinstance(reply, messages.Finished) and reply.reason == "stop"


def test_logprobs_come_with_the_tokens(serving: EngineThread) -> None:
    request = serving.run("s", prompt(20), 1, logprobs=3)
    stepped = serving.until(messages.Stepped)
    assert serving.until(messages.Finished).request == request
    (token,) = stepped.tokens
    wanted = torch.from_numpy(reference.logits(FOLDER, prompt(20)))[-1].log_softmax(-1)
    assert token.logprobs is not None and len(token.logprobs.top) == 3
    assert token.logprobs.token == pytest.approx(wanted[token.token].item(), abs=1e-4)


def test_logits_come_in_a_window(serving: EngineThread) -> None:
    _, reply = serving.outcome(serving.run("s", prompt(100), 0, logits=True))
    assert reply == messages.LogitsReady(reply.request, tokens=100, vocab=VOCAB)  # type: ignore[union-attr]
    np.testing.assert_allclose(serving.logits(reply), reference.logits(FOLDER, prompt(100)), rtol=0, atol=1e-4)
    _, reply = serving.outcome(serving.run("s", prompt(3, seed=1), 0, logits=True))
    wanted = reference.logits(FOLDER, prompt(100) + prompt(3, seed=1))[-3:]
    np.testing.assert_allclose(serving.logits(reply), wanted, rtol=0, atol=1e-4)
    serving.report()


def test_a_prompt_that_never_fits_is_refused_and_changes_nothing(serving: EngineThread) -> None:
    serving.outcome(serving.run("s", prompt(8), 1))
    for more in ({}, {"logits": True}):
        request = serving.run("s", prompt(2100), 0 if more else 1, **more)
        _, reply = serving.outcome(request)
        assert isinstance(reply, messages.Failed) and reply.code == "prompt_too_long"
        assert reply.data == {"tokens": 2109 + (not more), "max_context": 2048}
    (use,) = serving.report().sessions
    assert (use.session, use.state, use.kv_tokens) == ("s", "idle", 8)


def test_a_run_of_an_unknown_session_is_refused(serving: EngineThread) -> None:
    _, reply = serving.outcome(serving.run("ghost", [1], 1))
    assert isinstance(reply, messages.Failed) and reply.code == "session_not_found"


# --- events while a run is under way --------------------------------------------------------------------------------


class Gate:
    """Stops the engine in every step, after the batch is composed and before it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arrived = threading.Semaphore(0)
        self._tickets = threading.Semaphore(0)
        launch = ModelRunner.launch

        def gated(runner: ModelRunner, *given: Any) -> Any:
            self._arrived.release()
            assert self._tickets.acquire(timeout=FOREVER)
            return launch(runner, *given)

        monkeypatch.setattr(ModelRunner, "launch", gated)

    def let_through(self, steps: int) -> None:
        self._tickets.release(steps)

    def await_steps(self, count: int) -> None:
        """Returns when `count` more steps have come to the gate."""
        for _ in range(count):
            assert self._arrived.acquire(timeout=FOREVER)


@pytest.fixture
def gate(serving: EngineThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.let_through(10_000)


def run_some(serving: EngineThread, gate: Gate, session: str = "s", tokens: int = 3, **more: Any) -> int:
    """A run of 1000 tokens that has sent its first ones; its next step waits at the gate."""
    request = serving.run(session, prompt(10), 1000, **more)
    gate.let_through(tokens)
    for _ in range(tokens):
        assert len(serving.until(messages.Stepped).tokens) == 1
    gate.await_steps(tokens + 1)
    return request


def test_cancel_ends_a_run_within_a_step(serving: EngineThread, gate: Gate) -> None:
    request = run_some(serving, gate)
    serving.send(messages.CancelRun(request), messages.CancelRun(99))
    gate.let_through(1)
    tokens, reply = serving.outcome(request)
    assert reply == messages.Finished(request, "cancelled", length=14, generated=4, computed=10)
    assert len(tokens) == 1
    gate.let_through(2)
    tokens, _ = serving.outcome(serving.run("s", [], 2))
    assert tokens == reference.greedy(FOLDER, prompt(10), 6)[4:]


def test_halt_removes_the_tokens_after_the_kept_ones(serving: EngineThread, gate: Gate) -> None:
    request = run_some(serving, gate)
    serving.send(messages.Halt(request, keep=2))
    gate.let_through(1)
    _, reply = serving.outcome(request)
    assert reply == messages.Finished(request, "stop", length=12, generated=2, computed=10)
    gate.let_through(2)
    tokens, _ = serving.outcome(serving.run("s", [], 2))
    assert tokens == reference.greedy(FOLDER, prompt(10), 4)[2:]


def test_a_held_run_waits_while_others_go_on(serving: EngineThread, gate: Gate) -> None:
    held = run_some(serving, gate)
    serving.open("t")
    serving.send(messages.Hold(held, held=True))
    other = serving.run("t", prompt(5), 5)
    gate.let_through(1)
    assert [token.request for token in serving.until(messages.Stepped).tokens] == [held]  # its step had begun
    gate.let_through(5)
    tokens, _ = serving.outcome(other)
    assert tokens == reference.greedy(FOLDER, prompt(5), 5)
    report = serving.report()
    assert {use.session: use.state for use in report.sessions} == {"s": "held", "t": "idle"}
    serving.send(messages.Hold(held, held=False))
    gate.let_through(1)
    assert [token.request for token in serving.until(messages.Stepped).tokens] == [held]
    serving.send(messages.CancelRun(held))
    gate.let_through(1)
    serving.outcome(held)


def test_close_cancels_the_run_and_frees_the_pages(serving: EngineThread, gate: Gate) -> None:
    request = run_some(serving, gate)
    serving.send(messages.Close("s"))
    gate.let_through(1)
    _, reply = serving.outcome(request)
    assert isinstance(reply, messages.Finished) and reply.reason == "cancelled"
    report = serving.report()
    assert report.sessions == [] and report.models[0].pages_used == 0


def test_a_cancelled_forward_pass_has_no_logits(serving: EngineThread, gate: Gate) -> None:
    request = serving.run("s", prompt(200), 0, logits=True)
    gate.let_through(1)
    gate.await_steps(2)
    serving.send(messages.CancelRun(request))
    gate.let_through(1)
    _, reply = serving.outcome(request)
    assert isinstance(reply, messages.Finished) and reply.reason == "cancelled"
    assert serving.started == [request]
    serving.report()


def test_truncate_cuts_an_idle_session(serving: EngineThread) -> None:
    serving.outcome(serving.run("s", prompt(20), 4))
    serving.send(messages.Truncate("s", 12))
    (use,) = serving.report().sessions
    assert use.kv_tokens == 12
    tokens, _ = serving.outcome(serving.run("s", [], 3))
    assert tokens == reference.greedy(FOLDER, prompt(20)[:12], 3)


def test_truncating_a_closed_session_does_nothing(serving: EngineThread) -> None:
    """The server closes a session just after its run has ended, and hears of that end only then."""
    serving.open("t")
    serving.outcome(serving.run("t", prompt(20), 4))
    serving.send(messages.Close("t"), messages.Truncate("t", 12))
    assert [use.session for use in serving.report().sessions] == ["s"]


# --- measured time of steps -------------------------------------------------------------------------------------------


def test_the_time_of_unwaited_steps_counts_towards_the_next_one(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last of a prompt's three chunks gives a token; the host does not wait for the others."""
    launch, complete = ModelRunner.launch, Scheduler.complete
    steps: list[tuple[int, float]] = []

    def slow(runner: ModelRunner, *given: Any) -> Any:
        time.sleep(0.02)
        return launch(runner, *given)

    def seen(scheduler: Scheduler, batch: Any, tokens: Any, seconds: float, further: Any) -> Any:
        steps.append((batch.tokens, seconds))
        return complete(scheduler, batch, tokens, seconds, further)

    monkeypatch.setattr(ModelRunner, "launch", slow)
    monkeypatch.setattr(Scheduler, "complete", seen)
    serving.outcome(serving.run("s", prompt(150), 2))
    (*chunks, last), after = steps[:3], steps[3]
    assert chunks == [(64, 0.0), (64, 0.0)] and last[0] == 22 and after[0] == 1
    assert last[1] >= 3 * 0.02 and after[1] >= 0.02


# --- steps that fail ------------------------------------------------------------------------------------------------


def test_a_failed_step_fails_all_its_requests_and_rolls_them_back(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.open("t")
    serving.outcome(serving.run("s", prompt(20), 4))
    forward = PagedModel.forward

    def fails(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(PagedModel, "forward", forward)
        raise RuntimeError("a kernel of ours is broken")

    monkeypatch.setattr(PagedModel, "forward", fails)
    one, two = serving.run_message("s", prompt(5), 4), serving.run_message("t", prompt(7), 0, logits=True)
    serving.send(one, two)
    for tokens, reply in serving.outcomes([one.request, two.request]).values():
        assert tokens == [] and isinstance(reply, messages.Failed)
        assert reply.code == "error" and "a kernel of ours is broken" in reply.message
    states = {use.session: (use.state, use.kv_tokens) for use in serving.report().sessions}
    assert states == {"s": ("idle", 23), "t": ("idle", 0)}
    tokens, _ = serving.outcome(serving.run("s", [], 2))
    assert tokens == reference.greedy(FOLDER, prompt(20), 6)[4:]


def test_a_step_without_memory_fails_with_out_of_memory(serving: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = PagedModel.forward

    def fails(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(PagedModel, "forward", forward)
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(PagedModel, "forward", fails)
    _, reply = serving.outcome(serving.run("s", prompt(5), 4))
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory" and "2.00 GiB" in reply.message


def test_a_session_survives_a_lack_of_host_memory_for_logits(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuses)
        _, reply = serving.outcome(serving.run("s", prompt(5), 0, logits=True))
    assert isinstance(reply, messages.Failed) and reply.code == "out_of_memory"
    assert "no memory for the logits" in reply.message
    (use,) = serving.report().sessions
    assert (use.state, use.kv_tokens) == ("idle", 0)
    serving.outcome(serving.run("s", prompt(5), 0, logits=True))


CHECKED = np.random.default_rng(0).integers(0, VOCAB, sum(CHUNKS) + SINGLES)  # tokens of the check at load
POISON = next(token for token in range(VOCAB) if token not in CHECKED)


def poison(tensors: Tensors) -> None:
    """Makes one row of the embedding NaN, of a token that the check at load does not use."""
    tensors["model.embed_tokens.weight"][POISON] = float("nan")


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_logits_that_are_no_numbers_fail_only_their_request(
    engine: EngineThread, tmp_path: Path, max_tokens: int
) -> None:
    folder = altered(tmp_path, change=poison)
    engine.loaded(folder)
    for name in ("sick", "sound"):
        engine.open(name)
    sound_prompt = [token for token in prompt(20) if token != POISON]
    sick = engine.run_message("sick", [5, POISON, 6], max_tokens)
    sound = engine.run_message("sound", sound_prompt, max_tokens)
    engine.send(sick, sound)
    outcomes = engine.outcomes([sick.request, sound.request])
    assert outcomes[sound.request][0] == reference.greedy(FOLDER, sound_prompt, max_tokens)
    tokens, reply = outcomes[sick.request]
    assert tokens == [] and isinstance(reply, messages.Failed) and "no numbers" in reply.message
    kept = {use.session: use.kv_tokens for use in engine.report().sessions}
    assert kept == {"sick": 0, "sound": len(sound_prompt) + max_tokens - 1}
    tokens, _ = engine.outcome(engine.run("sick", sound_prompt, 2))
    assert tokens == reference.greedy(FOLDER, sound_prompt, 2)


# --- messages during a step -------------------------------------------------------------------------------------------


@pytest.fixture
def heard(serving: EngineThread, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The messages handled from now on, and whether during a step."""
    seen, is_beside = list[tuple[str, bool]](), in_steps(monkeypatch, serving.engine)
    on_message(monkeypatch, serving.engine, lambda message: seen.append((type(message).__name__, is_beside())))
    return seen


def say_beside(serving: EngineThread, monkeypatch: pytest.MonkeyPatch, *said: Any) -> None:
    """Sends the messages as soon as a step runs."""
    engine, waiting = serving.engine, [*said]

    def speaking() -> None:
        sent, waiting[:] = waiting[:], []
        serving.send(*sent)

    add_part(monkeypatch, engine, speaking)


def test_calls_and_signals_are_handled_during_a_step(
    serving: EngineThread, heard: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in "tu":
        serving.open(session)
    one = serving.run_message("s", prompt(10), 4)
    other = serving.run_message("t", prompt(20, seed=1), 4)
    nobody = serving.run_message("nobody", prompt(5), 1)
    serving.report()
    heard.clear()
    say_beside(serving, monkeypatch, messages.Signal("u", waits=True), other, messages.Inquire(77), nobody)
    serving.send(one)
    report, refused, ended = None, None, set[int]()
    while report is None or refused is None or len(ended) < 2:
        match message := serving.receive():
            case messages.Report():
                report = message
            case messages.Failed():
                refused = message
            case messages.Finished():
                ended.add(message.request)
    assert heard == [("Run", False), ("Signal", True), ("Run", True), ("Inquire", True), ("Run", False)]
    assert ended == {one.request, other.request}
    assert (report.request, refused.request, refused.code) == (77, nobody.request, "session_not_found")
    states = {use.session: use.state for use in report.sessions}
    assert states == {"s": "running", "t": "queued", "u": "waiting"}, "it has no row in the step that runs"
    for session, seed, length in (("s", 0, 10), ("t", 1, 20)):  # they have the tokens that they would have alone
        expected = reference.greedy(FOLDER, prompt(length, seed), 6)
        assert serving.outcome(serving.run(session, [], 2))[0] == expected[4:]


def test_a_call_handled_during_a_step_counts_in_the_next_step_s_trace(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.open("t")
    one, other = serving.run_message("s", prompt(10), 4), serving.run_message("t", prompt(20, seed=1), 1)
    serving.send(messages.Trace(99, steps=3, seconds=60.0))
    serving.report()
    say_beside(serving, monkeypatch, other)
    serving.send(one)
    traced, ended = None, set[int]()
    while traced is None or len(ended) < 2:
        match message := serving.receive():
            case messages.Traced():
                traced = message
            case messages.Finished():
                ended.add(message.request)
    calls = [span.args["calls"] for span in traced.spans if span.name == "messages"]
    rows = [span.args["rows"] for span in traced.spans if span.track == "step"]
    assert (calls, rows) == ([1, 1, 0], [1, 2, 1])


def test_a_message_that_must_wait_for_the_step_holds_up_later_ones(
    serving: EngineThread, heard: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.open("t")
    forward = serving.run_message("t", prompt(7), 0, logits=True)
    serving.report()
    heard.clear()
    say_beside(
        serving, monkeypatch, messages.Signal("t", waits=True), messages.Truncate("t", 0), messages.Signal("t", False)
    )
    serving.outcome(serving.run("s", prompt(10), 1))
    serving.report()
    assert heard == [("Run", False), ("Signal", True), ("Truncate", False), ("Signal", False), ("Inquire", False)]
    heard.clear()
    say_beside(serving, monkeypatch, forward)
    one = serving.run("s", [5], 1)
    assert set(serving.outcomes([one, forward.request])) == {one, forward.request}
    assert heard == [("Run", False), ("Run", False)], "a window is to be made for its logits"


def test_a_server_that_closes_during_a_step_ends_the_engine_quietly(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_part(monkeypatch, serving.engine, serving.socket.close)
    serving.run("s", prompt(10), 1000)
    serving.join()
    assert serving.error is None
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == ["server_gone"]


# --- exit -------------------------------------------------------------------------------------------------------------


def test_shutdown_ends_the_engine(serving: EngineThread) -> None:
    serving.send(messages.Shutdown())
    serving.join()
    with pytest.raises(EOFError):
        serving.receive()


def test_the_engine_ends_when_the_server_is_gone(serving: EngineThread) -> None:
    serving.run("s", prompt(10), 1000)
    serving.until(messages.Stepped)
    serving.socket.close()
    serving.join()
    assert serving.error is None


@pytest.mark.parametrize("end", ["shutdown", "gone"])
def test_the_engine_ends_during_a_load(engine: EngineThread, end: str) -> None:
    engine.send(messages.Load(1, "m", str(FOLDER), host_kv_bytes=0))
    engine.until(messages.NeedArena, messages.Loading)  # never granted
    if end == "shutdown":
        engine.send(messages.Shutdown())
    else:
        engine.socket.close()
    engine.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "djinn-load"]


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_has_the_figures(serving: EngineThread) -> None:
    serving.open("t", tokens=prompt(5))
    serving.outcome(serving.run("s", prompt(300), 1))
    report = serving.report()
    assert report.budget_bytes == serving.device.budget.total
    assert report.used_bytes == serving.device.budget.used
    assert (report.steps, report.generated_tokens) == (5, 1)  # 300 tokens, 64 a step
    assert [model.name for model in report.models] == ["m"]
    assert [(use.session, use.state, use.kv_tokens, use.pages) for use in report.sessions] == [
        ("s", "idle", 300, 2),
        ("t", "idle", 0, 0),
    ]


def test_a_report_is_made_during_a_step_and_an_audit_between_two(
    serving: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[int, bool]]()
    is_beside, report = in_steps(monkeypatch, serving.engine), Reporter.report

    def reported(reporter: Reporter, message: messages.Inquire) -> messages.Report:
        seen.append((message.request, is_beside()))
        return report(reporter, message)

    monkeypatch.setattr(Reporter, "report", reported)
    run = serving.run_message("s", prompt(10), 2)
    looks = [messages.Inquire(1), messages.Inquire(2, check=True), messages.Inquire(3)]
    serving.send(run, *looks)  # received together
    assert [serving.until(messages.Report).request for _ in looks] == [1, 2, 3]
    serving.outcome(run.request)
    serving.send(messages.Inquire(4))
    serving.until(messages.Report)
    assert seen == [(1, False), (2, False), (3, True), (4, False)]


def test_the_audit_finds_a_wrong_state(serving: EngineThread) -> None:
    serving.outcome(serving.run("s", prompt(10), 1))
    (page,) = serving.runner().kv.pool.allocate(1, tenant=0)  # no session holds it
    serving.send(messages.Inquire(1, check=False), messages.Inquire(2, check=True))
    assert serving.until(messages.Report).findings == []
    (finding,) = serving.until(messages.Report).findings
    assert finding.startswith(f"scheduler: page {page}")


def test_seeds_decide_the_sampled_tokens(serving: EngineThread) -> None:
    drawn = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        serving.open(name)
        number = serving.number()
        serving.send(messages.Run(number, name, prompt(6), 12, Sampling(temperature=1.0, seed=seed)))
        drawn.append(serving.outcome(number)[0])
    assert drawn[0] == drawn[1] != drawn[2]


# --- forks ----------------------------------------------------------------------------------------------------------


def test_a_fork_has_its_parent_s_kv(serving: EngineThread) -> None:
    first = serving.run_message("s", prompt(40), 4)
    serving.send(first)
    serving.outcome(first.request)
    serving.send(messages.Fork("t", "s", "batch"), messages.Close("s"))
    again = serving.run_message("t", [], 8)
    serving.send(again)
    tokens, reply = serving.outcome(again.request)
    assert tokens == reference.greedy(FOLDER, prompt(40), 12)[4:]
    assert isinstance(reply, messages.Finished) and reply.computed == 1
    report = serving.report()
    assert ([use.session for use in report.sessions], report.findings) == (["t"], [])
