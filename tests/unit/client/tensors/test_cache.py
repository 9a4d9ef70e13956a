from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
import torch

from djinn_client.errors import InvalidRequest, ProtocolError
from djinn_client.protocol import Generated, Timings, Usage
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinn_client.protocol.fields.points import PointMap
from djinn_client.tensors import arrays
from djinn_client.tensors.cache import Cache, mapped
from djinn_client.transport.shm import new_window
from tests.support.descriptors import open_descriptors

POINTS = PointMap(
    blocks=2,
    width=4,
    vocab=6,
    layers="model.layers",
    attention="self_attn",
    mlp="mlp",
    norm="model.norm",
    head="lm_head",
)
ROOM, POSITIONS, FIRST = 5, 3, 10
RESID = torch.arange(ROOM * 4, dtype=torch.float32).view(ROOM, 4)
LOGITS = -torch.arange(ROOM * 6, dtype=torch.float32).view(ROOM, 6)


def captured(dtype: str = "float32", **changes: object) -> Captured:
    size = 4 if dtype == "float32" else 2
    fields = {
        "dtype": dtype,
        "first": FIRST,
        "positions": POSITIONS,
        "room": ROOM,
        "nbytes": ROOM * 10 * size,
        "points": [CapturedPoint("logits", 6, ROOM * 4 * size), CapturedPoint("blocks.1", 4, 0)],
    }
    return Captured(**fields | changes)  # type: ignore[arg-type]


def generated(told: Captured | None) -> Generated:
    usage = Usage(prompt_tokens=3, generated_tokens=0, session_tokens=13, computed_tokens=3)
    return Generated(
        id=1,
        text="",
        token_ids=[],
        finish_reason="length",
        usage=usage,
        timings=Timings(queued=0.0, first_token=0.0, total=0.0),
        captured=told,
    )


def window(dtype: torch.dtype = torch.float32) -> int:
    """The descriptor of what the daemon would have passed."""
    data = b"".join(each.to(dtype).view(torch.uint8).numpy().tobytes() for each in (RESID, LOGITS))
    fd = new_window("captured", len(data))
    os.pwrite(fd, data, 0)
    return fd


def cache(dtype: str = "float32", points: PointMap | None = POINTS) -> Cache:
    reply = generated(captured(dtype))
    return Cache(*mapped(reply, [window(getattr(torch, dtype))]), reply, points)


def test_activations_are_tensors_that_know_where_they_are_from() -> None:
    found = cache()
    resid, logits = found["blocks.1"], found["logits"]
    assert resid.shape == (1, POSITIONS, 4) and torch.equal(resid[0], RESID[:POSITIONS])
    assert logits.shape == (1, POSITIONS, 6) and torch.equal(logits[0], LOGITS[:POSITIONS])
    assert (resid.point, resid.first, logits.point) == ("blocks.1", FIRST, "logits")
    assert found.positions == range(10, 13)
    assert found.generated.usage.session_tokens == 13
    assert not resid.requires_grad
    assert repr(found) == "<Cache of 2 points at positions 10 to 12: blocks.1, logits>"


def test_any_name_of_the_point_finds_it() -> None:
    found = cache()
    for name in ("blocks.1.hook_resid_post", "model.layers.1"):
        assert found[name] is found["blocks.1"]
    assert found["lm_head"] is found["hook_logits"] is found["logits"]


def test_it_is_a_mapping_in_the_order_of_computing() -> None:
    found = cache()
    assert list(found) == ["blocks.1", "logits"] and len(found) == 2
    assert [name for name, _ in found.items()] == list(found)
    assert "model.layers.1" in found
    for name in ("model.layers.0", "blocks.7", "nothing", "blocks.*"):
        assert name not in found and found.get(name) is None
    with pytest.raises(KeyError, match=r"model\.norm was not captured; there are blocks\.1, logits"):
        found["model.norm"]


def test_two_names_of_a_point_are_one_point() -> None:
    twice = captured(points=[CapturedPoint("blocks.1", 4, 0), CapturedPoint("model.layers.1", 4, 0)])
    reply = generated(twice)
    found = Cache(*mapped(reply, [window()]), reply, POINTS)
    assert len(found) == 1 and list(found) == ["blocks.1"]
    assert found["model.layers.1"] is found["blocks.1"]


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_resume_point_has_the_prompt_s_positions(monkeypatch: pytest.MonkeyPatch, has_torch: bool) -> None:
    """Its activation is the captured memory, without a copy."""
    if not has_torch:
        monkeypatch.setattr(arrays.importlib.util, "find_spec", lambda name: None)
    there = cache()
    whole, part = there.resume_point("model.layers.1"), there.resume_point("blocks.1", 12)
    assert whole.info == HitInfo(breakpoint=None, point="model.layers.1", block=2, first=10, end=13, prompt_end=13)
    assert part.info == HitInfo(breakpoint=None, point="blocks.1", block=2, first=10, end=12, prompt_end=12)
    assert (whole.layer, whole.positions, part.positions) == (1, range(10, 13), range(10, 12))
    assert whole.activation.shape == (1, 3, 4) and part.activation.shape == (1, 2, 4)
    there["blocks.1"][0, 1] = 7
    for each in (whole, part):
        values = each.values(None, [1])
        assert (values.dtype, values.rows, values.data) == ("float32", 1, np.full(4, 7, np.float32).tobytes())


def test_a_point_from_which_no_session_resumes() -> None:
    there = cache()
    with pytest.raises(KeyError, match="was not captured"):
        there.resume_point("blocks.0")
    with pytest.raises(InvalidRequest, match="logits is no such point"):
        there.resume_point("logits")
    for end in (10, 14):
        with pytest.raises(InvalidRequest, match=f"positions 10 to 12, not at {end}"):
            there.resume_point("blocks.1", end)
    with pytest.raises(InvalidRequest, match="of a model that is loaded"):
        cache(points=None).resume_point("blocks.1")


def test_the_old_name_of_resume_point_warns() -> None:
    with pytest.warns(DeprecationWarning, match="checkpoint is resume_point now") as warned:
        assert cache().checkpoint("blocks.1", 12).positions == range(10, 12)
    assert warned[0].filename == __file__


def test_where_the_model_is_gone_names_are_those_that_were_asked_for() -> None:
    found = cache(points=None)
    assert list(found) == ["logits", "blocks.1"] and "model.layers.1" not in found


def test_captures_in_bfloat16_keep_their_bits() -> None:
    resid = cache("bfloat16")["blocks.1"]
    assert resid.dtype == torch.bfloat16 and torch.equal(resid[0], RESID[:POSITIONS].bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_torch_there_are_arrays(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(arrays.importlib.util, "find_spec", lambda name: None)
    resid = cache(dtype)["model.layers.1"]
    assert isinstance(resid, np.ndarray) and resid.shape == (1, POSITIONS, 4)
    assert resid.dtype == (np.uint16 if dtype == "bfloat16" else dtype)
    assert (resid.point, resid.first, resid.stored) == ("blocks.1", FIRST, dtype)
    assert not hasattr(resid[:, 1:], "point") and resid[:, 1:].stored == dtype


def test_it_is_mapped_and_what_is_written_stays_here() -> None:
    fd = window()
    kept, before = os.dup(fd), open_descriptors()
    reply = generated(captured())
    found = Cache(*mapped(reply, [fd]), reply, POINTS)
    assert open_descriptors() == before - 1
    found["blocks.1"][:, 0] = 77.0
    assert found["model.layers.1"][0, 0, 0] == 77.0
    assert np.frombuffer(os.pread(kept, 16, 0), np.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    os.close(kept)


def test_a_tensor_outlives_its_cache() -> None:
    found = cache()
    resid = found["blocks.1"]
    del found
    assert torch.equal(resid[0], RESID[:POSITIONS])


@pytest.mark.parametrize(
    "changes",
    [
        {"nbytes": ROOM * 10 * 4 + 4},
        {"nbytes": ROOM * 10 * 4 - 4},
        {"nbytes": 0, "points": []},
        {"nbytes": ROOM * 10 * 4 - 1, "points": []},
        {"positions": ROOM + 1},
        {"positions": -1},
        {"first": -1},
        {"room": ROOM + 1},
        {"points": [CapturedPoint("logits", 6, -4)]},
        {"points": [CapturedPoint("logits", 6, 2)]},
        {"points": [CapturedPoint("logits", -6, 0)]},
        {"points": [CapturedPoint("logits", 6, ROOM * 4 * 4 + 4)]},
    ],
)
def test_captures_beyond_their_window_are_refused_and_closed(changes: dict[str, object]) -> None:
    fd = window()
    before = open_descriptors()
    with pytest.raises(ProtocolError):
        mapped(generated(captured(**changes)), [fd])
    assert open_descriptors() == before - 1


def test_an_invalid_window_of_captures_is_refused_and_closed() -> None:
    unsealed = os.memfd_create("captured")
    os.truncate(unsealed, ROOM * 10 * 4)
    for reply, fds in (
        (generated(captured()), []),
        (generated(captured()), [unsealed]),
        (generated(captured()), [window(), window()]),
        (generated(None), [window()]),
    ):
        before = open_descriptors()
        with pytest.raises(ProtocolError):
            mapped(reply, fds)
        assert open_descriptors() == before - len(fds)


def test_the_form_of_captures_survives_encoding() -> None:
    told = captured()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Captured) == told
