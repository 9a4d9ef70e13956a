"""MLPs of streamed blocks that the host computes, compared with transformers, with hooks, and with merged adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from djinn_client.protocol import Placing
from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Extent
from djinnd.core.session import Session
from djinnd.device import CopyLane, DeviceTrace
from djinnd.engine.run.model_info import info_of
from djinnd.weights.plan import BlockPlace
from tests.support import reference
from tests.support.adapters import KINDS, load_adapter, merged, open_with, write_adapter
from tests.support.beside import ROWS, host_takes, rows_on_host
from tests.support.checkpoints import altered, cast
from tests.support.hooked import Hooked
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model
from tests.support.placed import plan_of
from tests.support.whitebox import EVERY, WhiteBoxEngine, an_edit, near, values

LLAMA, VOCAB = reduced_model("llama-2"), 512
STREAMS = Placing(resident=1, slots=2, cpu_beside_bus=True)  # three of four blocks


@pytest.mark.parametrize("family", ["llama-2", "qwen3", "gemma-2"])
@pytest.mark.parametrize("mlps", [1, 3])
def test_sessions_that_join_and_leave_get_the_tokens_of_transformers(
    family: str, mlps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts go by the bus, steps of up to ROWS rows by both, and steps of more rows by the bus again."""
    host_takes(monkeypatch, mlps)
    on_host, folder = rows_on_host(monkeypatch), reduced_model(family)
    lengths, wishes = [1, 70, 12, 30, 25, 8], [10, 6, 9, 12, 15, 18]
    prompts = [random_prompt(length, VOCAB, seed) for seed, length in enumerate(lengths)]
    with Served(folder, plan=small_pages(60), placing=STREAMS, max_batch_tokens=48) as served:
        told = [note for note in info_of(served.runner).notes if "beside" in note]
        assert len(told) == 1 and f"the MLPs of {mlps} of 3 streamed blocks in steps of up to {ROWS} rows" in told[0]
        sessions: list[Session] = []
        for prompt, wish in zip(prompts, wishes, strict=True):
            sessions.append(served.open())
            served.submit(sessions[-1], prompt, max_tokens=wish)
            served.step()
            served.runner.model.placement.check_integrity()
        served.run()
        for session, prompt, wish in zip(sessions, prompts, wishes, strict=True):
            told_tokens = session.tokens[len(prompt) :]
            assert told_tokens == reference.greedy(folder, prompt, wish, told_tokens)
    assert {1, 2} <= set(on_host) <= set(range(1, ROWS + 1))


@pytest.mark.parametrize(("rows", "mlps"), [(1, 3), (ROWS, 3), (ROWS + 1, 0)])
def test_only_steps_of_few_rows_use_the_host(rows: int, mlps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 3)
    on_host = rows_on_host(monkeypatch)
    with Served(LLAMA, plan=small_pages(60), placing=STREAMS) as served:
        for seed in range(rows):
            served.submit(served.open(), random_prompt(5, VOCAB, seed), max_tokens=9)
        for _ in range(3):
            served.step()
        on_host.clear()
        served.step()
        assert on_host == [rows] * mlps


FORMS = {"packed": {}, "plain": {"packing": False}, "one slot": {"slots": 1}, "no prefetch": {"prefetch": False}}


@pytest.mark.parametrize("form", FORMS)
def test_the_host_gives_the_same_bits_in_bfloat16(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = altered(tmp_path / "m", "llama-2", lambda tensors: cast(tensors, torch.bfloat16))
    host_takes(monkeypatch, 2)
    found = []
    for beside in (False, True):
        placing = Placing(**{"resident": 0, "cpu_beside_bus": beside} | FORMS[form])  # type: ignore[arg-type]
        on_host = rows_on_host(monkeypatch)
        with Served(folder, dtype="bfloat16", plan=small_pages(60), placing=placing) as served:
            sessions = [served.open() for _ in range(3)]
            for seed, session in enumerate(sessions):
                served.submit(session, random_prompt(9 + 20 * seed, VOCAB, seed), max_tokens=8)
            served.run()
            found.append([session.tokens for session in sessions])
        assert bool(on_host) == beside
    assert found[0] == found[1]


@pytest.mark.parametrize("packing", [True, False])
def test_weights_that_the_host_multiplies_do_not_cross_the_bus(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = altered(tmp_path / "m", "llama-2", lambda tensors: cast(tensors, torch.bfloat16))
    host_takes(monkeypatch, 2)
    placing = Placing(resident=0, slots=2, packing=packing, cpu_beside_bus=True)
    with Served(folder, dtype="bfloat16", plan=small_pages(60), placing=placing) as served:
        session, copied = served.open(), served.device.copied
        served.submit(session, [1], max_tokens=12)
        for _ in range(3):
            served.step()
        before = copied[CopyLane.WEIGHTS]
        served.step()
        a_step = copied[CopyLane.WEIGHTS] - before
        own = served.runner.weights.store.buffers[0].layout
        mlp = sum(entry.numel for name, entry in own.entries.items() if "mlp" in name) * 2
        blocks = sum(len(served.runner.weights.store.travelling(index).view(torch.uint8)) for index in range(4))
        assert blocks - a_step == pytest.approx(2 * mlp * (0.75 if packing else 1), rel=0.01)
        info = info_of(served.runner)
        assert served.runner.places.streamed_bytes - info.streamed_bytes == blocks - a_step


def test_a_model_that_moves_between_two_steps_has_another_share(monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 4)
    on_host = rows_on_host(monkeypatch)
    with Served(LLAMA, plan=small_pages(60), placing=Placing(resident=0, cpu_beside_bus=True)) as served:
        session, first = served.open(), served.runner.places
        served.submit(session, random_prompt(9, VOCAB, 0), max_tokens=12)
        for _ in range(3):
            served.step()
        on_host.clear()
        served.step()
        assert on_host == [1] * 4
        for places, count in (((BlockPlace.PLAIN,) * 4, 0), ((BlockPlace.PLAIN, BlockPlace.STREAMED) * 2, 2)):
            served.runner.move(plan_of(served.runner.weights, places), served.runner.plan.num_pages)
            served.step()  # the first blocks of the ring have come whole
            on_host.clear()
            served.step()
            assert on_host == [1] * count
        served.runner.move(first, served.runner.plan.num_pages)
        served.run()
        assert session.tokens[9:] == reference.greedy(LLAMA, session.tokens[:9], 12, session.tokens[9:])


def test_memory_of_the_host_s_share_is_dropped_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 2)
    with Served(LLAMA, plan=small_pages(60), placing=STREAMS) as served:
        beside = served.runner.model.placement.beside
        assert beside is not None and sum(mlp.is_bound for mlp in beside._mlps.values()) == 2
        assert beside.saved_bytes
    assert not any(mlp.is_bound for mlp in beside._mlps.values())
    assert not beside.saved_bytes and not beside.notes


def test_a_pass_that_is_broken_off_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 3)
    with Served(LLAMA, plan=small_pages(60), placing=STREAMS) as served:
        session = served.open()
        served.submit(session, random_prompt(9, VOCAB, 0), max_tokens=8)
        for _ in range(3):
            served.step()
        placement = served.runner.model.placement
        placement.begin_pass(1, adapters=False)
        for index in range(3):
            placement.begin(index)
            if index < 2:
                placement.end(index)
        assert placement.is_shared(2)
        served.runner.recover()
        assert not placement.is_shared(2)
        placement.check_integrity()
        served.run()
        assert session.tokens[9:] == reference.greedy(LLAMA, session.tokens[:9], 8, session.tokens[9:])


def test_a_trace_has_the_host_s_work(monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 3)
    with Served(LLAMA, plan=small_pages(60), placing=STREAMS) as served:
        served.submit(served.open(), random_prompt(9, VOCAB, 0), max_tokens=8)
        for _ in range(3):
            served.step()
        device = served.device
        device.trace = DeviceTrace(device.stamp)
        served.step()
        trace, device.trace = device.trace, None
        while not trace.is_read:
            trace.read(100)
        found = {name: [span for span in trace.spans() if span.track == name] for name in ("cpu", "compute")}
        assert [span.name for span in found["cpu"]] == ["MLP of 1 rows"] * 3
        blocks = [span for span in found["compute"] if span.args.get("place") == "streamed"]
        for own, block in zip(found["cpu"], blocks, strict=True):
            assert block.start_us <= own.start_us
            assert own.start_us + own.duration_us <= block.start_us + block.duration_us


def test_without_gain_the_bus_carries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 0)
    on_host = rows_on_host(monkeypatch)
    with Served(LLAMA, plan=small_pages(60), placing=STREAMS) as served:
        served.submit(served.open(), [1, 2, 3], max_tokens=4)
        served.run()
        assert not on_host
        assert any("not used, as the host would not help" in note for note in info_of(served.runner).notes)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_mlps_cross_the_bus(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLPs without a gate, and experts."""
    host_takes(monkeypatch, 3)
    folder = reduced_model(family)
    with Served(folder, plan=small_pages(60), placing=STREAMS) as served:
        session = served.open()
        served.submit(session, random_prompt(9, VOCAB, 0), max_tokens=6)
        served.run()
        assert session.tokens[9:] == reference.greedy(folder, session.tokens[:9], 6, session.tokens[9:])
        assert any("no streamed block has a gated MLP" in note for note in info_of(served.runner).notes)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[WhiteBoxEngine]:
    host_takes(monkeypatch, 3)
    with WhiteBoxEngine() as engine:
        engine.loaded(LLAMA, placing=STREAMS)
        yield engine


@pytest.mark.parametrize("block", [0, 2])
def test_edits_and_captures_see_what_the_host_computed(
    engine: WhiteBoxEngine, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = rows_on_host(monkeypatch)
    point, prompt = Point("mlp", block), random_prompt(20, VOCAB, 1)
    edit = an_edit("add", [point], [Extent(5)], values(engine))
    engine.open("s")
    engine.edit("s", edit)
    tokens, reply = engine.outcome(engine.run("s", prompt, 6, capture=EVERY))
    assert 1 in on_host
    first, seen = engine.captured(reply, EVERY)
    hooked = Hooked(LLAMA)
    assert tokens == hooked.greedy(prompt, 6, [edit])
    expected = hooked.run(prompt + tokens[:-1], [edit], EVERY)[1]
    for each in EVERY:
        near(seen[each], expected[each][first:])


def test_steps_with_adapters_go_by_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first adapter comes after steps in which the host computed all MLPs."""
    host_takes(monkeypatch, 4)
    folder = write_adapter(tmp_path / "adapter", LLAMA, 0, **KINDS[0])
    checkpoint = merged(tmp_path / "merged", LLAMA, folder)
    with WhiteBoxEngine() as engine:
        engine.loaded(LLAMA, placing=Placing(resident=0, cpu_beside_bus=True))
        identity, prompt = load_adapter(engine, folder), random_prompt(20, VOCAB, 3)
        on_host = rows_on_host(monkeypatch)
        for name, adapter in (("before", b""), ("with", identity), ("after", b"")):
            on_host.clear()
            open_with(engine, name, adapter)
            told = engine.tokens(name, prompt, 6)
            assert told == reference.greedy(checkpoint if adapter else LLAMA, prompt, 6, told)
            assert bool(on_host) != bool(adapter)
