"""MLPs in codes of 8 bits that the host computes while blocks stream: a checkpoint's codes, and those that a load
makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from djinn_client.protocol import Placing
from djinnd.core.session import Session
from djinnd.device import CopyLane
from djinnd.engine.run.model_info import info_of
from djinnd.weights.forms.coded_form import CodedForm
from tests.support import quantised as by
from tests.support import reference
from tests.support.beside import ROWS, host_takes, rows_on_host
from tests.support.loaded import Served, random_prompt, small_pages
from tests.support.models import reduced_model

VOCAB, FAMILY = 512, "qwen3"


def ct(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


@dataclass(frozen=True)
class Form:
    """A model in a code of 8 bits."""

    coder: by.Coder | None = None  # None: quantised when it is loaded
    told: dict[str, Any] = field(default_factory=dict)
    copies: int = 0  # bytes of a block's MLP that the host copies
    ending: str = "proj.weight"  # of the names of matrices with a code


FORMS = {
    "rows": Form(by.int8_rows, ct("int-quantized", strategy="channel", **INT8)),
    "packed in rows": Form(by.pack_quantized(8, -1), ct("pack-quantized", strategy="channel", **INT8), 3 * 64 * 160),
    "groups": Form(
        by.pack_quantized(8, 32), ct("pack-quantized", strategy="group", group_size=32, **INT8), 3 * 64 * 160
    ),
    "gptq": Form(
        by.gptq(8, 32),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False},
        3 * 64 * 160,
    ),
    "rows, gate and up plain": Form(
        by.int8_rows, ct("int-quantized", strategy="channel", **INT8), ending="n_proj.weight"
    ),
    "the MLP plain": Form(by.fp8(1, 0), ct("float-quantized", type="float"), ending="o_proj.weight"),
    "at load": Form(copies=64 * 160),  # groups of 128 columns: gate and up have one
}


def folder_of(form: str, folder: Path) -> Path:
    own = FORMS[form]
    if own.coder is None:
        return reduced_model(FAMILY)
    return by.write_quantised(folder, own.coder, own.told, FAMILY, own.ending)


def placing_of(form: str, **more: Any) -> Placing:
    return Placing(resident=0, quantise="int8" if FORMS[form].coder is None else "", **more)


def tokens_of(served: Served, count: int) -> list[list[int]]:
    sessions: list[Session] = []
    for seed in range(count):
        sessions.append(served.open())
        served.submit(sessions[-1], random_prompt(9 + 20 * seed, VOCAB, seed), max_tokens=8)
    served.run()
    return [session.tokens for session in sessions]


@pytest.mark.parametrize("more", [{}, {"slots": 1}, {"prefetch": False}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_host_gives_the_tokens_of_the_bus(
    form: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_takes(monkeypatch, 2)
    on_host, folder, found = rows_on_host(monkeypatch), folder_of(form, tmp_path / "m"), []
    for beside in (False, True):
        on_host.clear()
        placing = placing_of(form, cpu_beside_bus=beside, **more)
        with Served(folder, dtype="float32", plan=small_pages(60), placing=placing) as served:
            found.append(tokens_of(served, 3))
        assert bool(on_host) == beside
    assert found[0] == found[1] and set(on_host) <= set(range(1, ROWS + 1))


def test_sessions_get_the_tokens_of_the_decoded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 4)
    folder, placing = folder_of("rows", tmp_path / "m"), placing_of("rows", cpu_beside_bus=True)
    with Served(folder, dtype="float32", plan=small_pages(60), placing=placing) as served:
        told = tokens_of(served, 2)
    for tokens, length in zip(told, (9, 29), strict=True):
        assert tokens[length:] == reference.greedy(folder / "plain", tokens[:length], 8, tokens[length:])


@pytest.mark.parametrize("form", FORMS)
def test_in_bfloat16_only_roundings_differ(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_takes(monkeypatch, 4)
    folder, found = folder_of(form, tmp_path / "m"), []
    on_host = rows_on_host(monkeypatch)
    for beside in (False, True):
        placing = placing_of(form, cpu_beside_bus=beside)
        with Served(folder, dtype="bfloat16", plan=small_pages(60), placing=placing) as served:
            tokens_of(served, 1)  # afterwards the ring has no MLPs
            on_host.clear()
            request = served.submit(served.open(), random_prompt(ROWS, VOCAB, 7))
            served.run()
            found.append(served.logits_of(request))
        assert on_host == [ROWS] * 4 * beside
    assert (found[1] - found[0]).norm() < 0.03 * found[0].norm()


@pytest.mark.parametrize("form", FORMS)
def test_codes_that_the_host_multiplies_cross_no_bus_and_are_not_decoded(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_takes(monkeypatch, 4)
    placing = placing_of(form, slots=2, cpu_beside_bus=True)
    with Served(folder_of(form, tmp_path / "m"), dtype="float32", plan=small_pages(60), placing=placing) as served:
        placement, store = served.runner.model.placement, served.runner.weights.store
        beside, layout = placement.beside, store.buffers[0].layout
        assert beside is not None
        assert {weights.copied_bytes for weights in beside._weights.values()} == {FORMS[form].copies}
        session, copied = served.open(), served.device.copied
        served.submit(session, [1], max_tokens=12)
        for _ in range(3):
            served.step()
        before, scratch = copied[CopyLane.WEIGHTS], placement._scratch
        assert scratch is not None
        plain = scratch[: layout.numel].fill_(float("nan"))
        served.step()
        a_step = copied[CopyLane.WEIGHTS] - before
        form = store.forms[0]
        assert isinstance(form, CodedForm)
        for unit in layout.units:
            is_missing = "mlp" in unit[0] or form.is_plain(unit)  # plain ones are read in place
            assert layout.joined(plain, unit).isnan().all() == is_missing
        own = [name for name in layout.entries if "mlp" in name]
        nbytes = sum(layout.entries[name].numel * (1 if name in form.codes else 4) for name in own)
        blocks = sum(len(store.travelling(index)) for index in range(4))
        assert blocks - a_step == beside.saved_bytes
        assert 4 * nbytes <= beside.saved_bytes < 4 * nbytes * 1.2  # with scales


@pytest.mark.parametrize(
    ("coder", "told"),
    [
        (by.fp8(1, 0), ct("float-quantized", type="float")),
        (by.pack_quantized(4, 32), ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)),
        (by.pack_quantized(8, 32, False), ct("pack-quantized", strategy="group", group_size=32, **INT8)),
    ],
    ids=["fp8", "int4", "zero points"],
)
def test_mlps_in_other_codes_cross_the_bus(
    coder: by.Coder, told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_takes(monkeypatch, 2)
    on_host, folder = rows_on_host(monkeypatch), by.write_quantised(tmp_path / "m", coder, told, FAMILY)
    placing = Placing(resident=0, cpu_beside_bus=True)
    with Served(folder, dtype="float32", plan=small_pages(60), placing=placing) as served:
        tokens_of(served, 1)
        assert any(
            "no streamed block has a gated MLP in 16 or 32 bits" in note for note in info_of(served.runner).notes
        )
    assert not on_host
