"""Checks the trace of a streamed model, on any device."""

from __future__ import annotations

from itertools import pairwise

from djinn_client.protocol import Placing, Span
from djinnd import messages
from djinnd.weights.plan import PlacementPlan
from djinnd.weights.ring import RingRegion, place_regions
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import tiny_model

PROMPT = 5  # tokens
VOCAB = 2048


def check_streaming(engine: EngineThread, placing: Placing, steps: int, rounding_us: float) -> None:
    """Checks the first steps of djinn-tiny with this placing. `rounding_us`: possible error of the device's clock."""
    info = engine.loaded(tiny_model(), placing=placing)
    engine.open("s")
    engine.send(
        messages.Trace(99, steps, seconds=60.0), engine.run_message("s", random_prompt(PROMPT, VOCAB, 0), steps + 3)
    )
    spans = engine.until(messages.Traced, messages.Stepped, messages.Finished).spans
    placement = engine.runner().model.placement
    plan = placement.plan
    assert plan is not None and plan.streamed
    tracks = ("step", "compute", "copy", "host")
    step, compute, copy, host = ([span for span in spans if span.track == track] for track in tracks)
    assert len(spans) == len(step) + len(compute) + len(copy) + len(host)

    counts = [PROMPT] + [1] * (steps - 1)
    assert [span.args for span in step] == [
        {"model": "m", "rows": 1, "tokens": count, "chunks": int(count > 1)} for count in counts
    ]
    blocks = [f"block {index}" for index in range(info.blocks)]
    assert [span.name for span in compute] == ["prologue", *blocks, "epilogue"] * steps
    assert [span.args["place"] for span in compute if span.args] == [place.value for place in plan.places] * steps
    copied = {f"block {index}": 0 for index in plan.streamed}
    for span in copy:
        copied[span.name] += span.args["bytes"]
    assert copied == {f"block {index}": steps * placement._store.travelling(index).nbytes for index in plan.streamed}

    composed = [span.name for span in host].count("compose")
    assert steps - 1 <= composed <= steps, "the trace may begin in the turn of the first step"
    for track in (step, compute, copy, sorted([*step, *host], key=lambda span: span.start_us)):
        assert all(ended(before) <= after.start_us + rounding_us for before, after in pairwise(track))
    for span in compute:
        assert any(whole.start_us <= span.start_us + rounding_us for whole in step)
        assert any(ended(span) <= ended(whole) + rounding_us for whole in step)
    regions = regions_of(plan)
    for span in compute:
        for other in copy:
            if span.name in regions and regions[span.name].overlaps(regions[other.name]):
                apart = ended(other) <= span.start_us + rounding_us or ended(span) <= other.start_us + rounding_us
                assert apart, f"{other} while {span}"


def regions_of(plan: PlacementPlan) -> dict[str, RingRegion]:
    """The regions of streamed blocks, by the names of their spans."""
    sizes = [-(-plan.sizes[index].least // 256) * 256 for index in plan.streamed]
    regions = place_regions(sizes, plan.ring_bytes)
    return {f"block {index}": region for index, region in zip(plan.streamed, regions, strict=True)}


def ended(span: Span) -> float:
    return span.start_us + span.duration_us
