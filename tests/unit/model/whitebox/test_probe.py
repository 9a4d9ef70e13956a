"""Compares every family at every kind of point with transformers and plain hooks on the same modules, for reads and for
changes. Two sessions share the steps, in chunks with and without history and in single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from djinn_client.protocol.fields.edits import Op
from djinn_client.protocol.fields.placing import Placing
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd.device.cpu import CpuDevice
from djinnd.model.edit_rows import CODES, EditRows
from djinnd.model.placing.loader import Weights
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.whitebox.editing import apply
from djinnd.model.whitebox.probe import Probe, watching
from tests.support import ops, reference
from tests.support.loaded import MEMORY, InputRow, fill, load_weights, paged_model, random_prompt
from tests.support.models import reduced_model
from tests.support.paged import same_bytes
from tests.support.parameters import ALL_FAMILIES, BUILDS
from tests.support.probing import Change, Looking, all_points

PAGE, PAGES = 4, 12
PROMPTS = [random_prompt(13, 512, 1), random_prompt(9, 512, 2)]
TABLES = [[7, 2, 11, 5], [3, 9, 1]]
# The rows of each step: session, first position, end. A fresh chunk, one with history, single tokens.
STEPS = [[(0, 0, 6), (1, 0, 4)], [(1, 4, 5), (0, 6, 12)], [(0, 12, 13), (1, 5, 9)]]
TOLERANCE = 1e-4

OPS: tuple[Op, ...] = get_args(Op)
# Edits of each session: position and op. All are at one point, in steps with rows of both sessions.
EDITED = [(session, at, op) for session in range(2) for at, op in enumerate(OPS, start=3 - session)]
EDITED.append((0, 12, "add"))
SCALE, LOW, HIGH = 0.7, -0.05, 0.05


@dataclass
class Driven:
    folder: Path
    weights: Weights
    model: PagedModel
    device: CpuDevice

    @property
    def points(self) -> PointMap:
        return self.model.skeleton.points

    def run(self, probe_of: Callable[[int], Probe | None] = lambda step: None) -> list[Tensor]:
        """Each session's logits at all its positions. `probe_of` makes the step's probe."""
        self.model.pool.zero_()
        parts: list[list[Tensor]] = [[] for _ in PROMPTS]
        for number, step in enumerate(STEPS):
            rows: list[InputRow] = [(PROMPTS[s][start:end], start, TABLES[s]) for s, start, end in step]
            counts = [len(tokens) for tokens, _, _ in rows]
            inputs = StepInputs(self.device, sum(counts), len(rows), max(map(len, TABLES)))
            fill(inputs, rows, PAGE)
            inputs.host["logit_rows"][:] = range(sum(counts))
            inputs.send()
            longest, fresh = max(end for _, _, end in step), number == 0
            probe = probe_of(number)
            batch = inputs.paged_batch(max_query=max(counts), max_kv=longest, fresh=fresh)
            hidden = self.model.forward(inputs, batch, probe)
            logits = self.model.logits(hidden, inputs.logit_rows(sum(counts)), probe)
            for (session, _, _), own in zip(step, logits.split(counts), strict=True):
                parts[session].append(own)
        return [torch.cat(own) for own in parts]


@contextmanager
def driven(family: str, placing: Placing | None = None) -> Iterator[Driven]:
    folder = reduced_model(family)
    device = CpuDevice(MEMORY)
    weights = load_weights(folder, device, placing=placing)
    yield Driven(folder, weights, paged_model(weights, PAGES, PAGE), device)
    weights.release(device)
    device.close()


@pytest.fixture(params=BUILDS, scope="module")
def family(request: pytest.FixtureRequest) -> Iterator[Driven]:
    with driven(request.param) as one:
        yield one


@pytest.fixture(params=["llama-2", "qwen3-moe"], scope="module")
def streamed(request: pytest.FixtureRequest) -> Iterator[Driven]:
    """Three of four blocks pass through the ring."""
    with driven(request.param, Placing(resident=1)) as one:
        assert one.weights.placement.streams
        yield one


# --- transformers -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def by_hooks(
    folder: Path, points: PointMap, prompt: list[int], wanted: Iterable[Point], change: dict[Point, Change]
) -> tuple[dict[Point, Tensor], Tensor]:
    """Outputs of transformers' modules, [tokens, width] each, and its logits. `change` changes outputs."""
    model, seen = reference.model_of(folder), {}

    def look(point: Point, value: Tensor) -> Tensor:
        value = value.clone()
        if point in change:
            change[point](value.view(-1, value.shape[-1]))
        seen[point] = value.view(-1, value.shape[-1]).clone()  # Falcon adds to its MLP's output in place
        return value

    def before(point: Point) -> Callable[..., object]:
        return lambda module, args: (look(point, args[0]), *args[1:])

    def after(point: Point) -> Callable[..., object]:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> object:
            return (look(point, output[0]), *output[1:]) if isinstance(output, tuple) else look(point, output)

        return hook

    with ExitStack() as hooks:
        for point in {*wanted, *change}:
            if point == Point("resid"):
                first = model.get_submodule(f"{points.layers}.0")
                hooks.enter_context(first.register_forward_pre_hook(before(point)))
            elif path := path_of(points, point):
                hooks.enter_context(model.get_submodule(path).register_forward_hook(after(point)))
        logits = model(torch.tensor([prompt]), use_cache=False).logits
        if not points.head:  # no module returns the logits that are sampled from
            logits = look(Point("logits"), logits)
    return seen, logits[0]


def path_of(points: PointMap, point: Point) -> str:
    """Path of the module whose output the point is."""
    within = {"attn": points.attention, "mlp": points.mlp}
    if point.where == "resid":
        return f"{points.layers}.{point.block - 1}"
    if point.where in within:
        return f"{points.layers}.{point.block}.{within[point.where]}"
    return points.norm if point.where == "norm" else points.head


# --- reads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL_FAMILIES, indirect=True)
def test_a_probe_sees_every_point_as_hooks_do(family: Driven) -> None:
    check_what_is_seen(family)


def test_a_probe_sees_every_point_of_a_streamed_model_as_hooks_do(streamed: Driven) -> None:
    check_what_is_seen(streamed)


def check_what_is_seen(model: Driven) -> None:
    points = all_points(model.points)
    assert {point.where for point in points} == {"resid", "attn", "mlp", "norm", "logits"}
    probes = [Looking(points) for _ in STEPS]
    model.run(lambda step: probes[step])
    assert all(probe.order == points for probe in probes)
    hooked = [by_hooks(model.folder, model.points, prompt, points, {})[0] for prompt in PROMPTS]
    for point in points:
        seen = by_session([probe.seen[point][0] for probe in probes])
        for own, wanted in zip(seen, hooked, strict=True):
            assert_close(own, wanted[point], str(point))


def assert_close(got: Tensor, wanted: Tensor, what: str) -> None:
    """Asserts equality up to the order of float32 sums; activations inside of a block reach hundreds."""
    error, largest = (got - wanted).abs().max().item(), wanted.abs().max().item()
    assert error < TOLERANCE * max(1.0, largest / 10), f"{what}: {error:.2g} of {largest:.2g}"


def by_session(steps: list[Tensor]) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in PROMPTS]
    for step, rows in zip(STEPS, steps, strict=True):
        for (session, _, _), own in zip(step, rows.split([end - start for _, start, end in step]), strict=True):
            parts[session].append(own)
    return [torch.cat(own) for own in parts]


def test_a_probe_that_only_reads_changes_nothing(family: Driven) -> None:
    """Logits and KV have the same bytes with a probe at all points together, and at each point alone."""
    alone = family.run()
    pages = family.model.pool.clone()
    points = all_points(family.points)
    for wanted in [points, *([point] for point in points)]:
        probed = family.run(lambda step: Looking(wanted))  # noqa: B023
        assert all(same_bytes(got, own) for got, own in zip(probed, alone, strict=True)), wanted
        assert same_bytes(family.model.pool, pages), wanted


# --- changes ----------------------------------------------------------------------------------------------------------

KINDS = {
    "embed": Point("resid", 0),
    "resid": Point("resid", 2),
    "last resid": Point("resid", 4),
    "attn": Point("attn", 1),
    "mlp": Point("mlp", 2),
    "norm": Point("norm"),
    "logits": Point("logits"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_edits_do_what_hooks_do(family: Driven, kind: str) -> None:
    check_edits(family, KINDS[kind])


@pytest.mark.parametrize("kind", ["embed", "attn", "mlp", "last resid"])
def test_edits_of_a_streamed_model_do_what_hooks_do(streamed: Driven, kind: str) -> None:
    check_edits(streamed, KINDS[kind])


def check_edits(model: Driven, point: Point) -> None:
    """Edits with all ops at one point, at positions of two sessions, in one call a step."""
    width = model.points.width_at(point)
    bank = torch.randn(len(EDITED), width, generator=torch.Generator().manual_seed(0))

    def edit(step: int) -> Change:
        where, chosen, row = [], [], 0
        for session, start, end in STEPS[step]:
            for number, (of, at, _) in enumerate(EDITED):
                if of == session and start <= at < end:
                    where.append(row + at - start)
                    chosen.append(number)
            row += end - start
        codes = torch.tensor([CODES[EDITED[number][2]] for number in chosen], dtype=torch.int32)
        limits = [torch.full((len(where),), each) for each in (SCALE, LOW, HIGH)]
        rows = EditRows(codes, *limits, torch.tensor(chosen, dtype=torch.int64), bank)
        return lambda value: apply(value, torch.tensor(where, dtype=torch.int64), rows)

    got = model.run(lambda step: Looking((), {point: edit(step)}))
    for session, prompt in enumerate(PROMPTS):

        def plainly(value: Tensor, session: int = session) -> None:
            for values, (of, at, op) in zip(bank, EDITED, strict=True):
                if of == session:
                    value[at : at + 1] = ops.act(op, values, SCALE, LOW, HIGH)(value[at : at + 1])

        _, wanted = by_hooks(model.folder, model.points, prompt, (), {point: plainly})
        torch.testing.assert_close(got[session], wanted, rtol=0, atol=TOLERANCE)
        unedited = torch.from_numpy(reference.logits(model.folder, prompt))
        assert (wanted - unedited).abs().max().item() > 100 * TOLERANCE


def test_an_edit_of_one_session_does_not_reach_another(family: Driven) -> None:
    """No byte changes if all rows are multiplied in one product. Experts multiply in groups, whose sizes depend on the
    router's choice for NaN."""
    alone = family.run()
    has_experts = any(parameter.dim() == 3 for parameter in family.model.adapter.blocks[0].parameters())
    bad = torch.tensor([1])  # a row of step 0: a position of the first session

    def spoil(value: Tensor) -> None:
        value[bad] = math.nan

    for point in KINDS.values():
        got = family.run(lambda step: Looking((), {point: spoil}) if step == 0 else None)  # noqa: B023
        assert not bool(got[0].isfinite().all())
        if has_experts:
            assert_close(got[1], alone[1], str(point))
        else:
            assert same_bytes(got[1], alone[1]), point


# --- hooks ------------------------------------------------------------------------------------------------------------


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x * 2, "beside"


def test_the_first_of_a_tuple_is_passed_to_the_probe() -> None:
    module, point = _Pair(), Point("attn", 1)
    probe = Looking((), {point: lambda value: value.add_(1)})
    with watching(probe, {point: module, Point("mlp", 1): nn.Identity()}):
        out, beside = module(torch.ones(1, 3, 4))
    assert torch.equal(out, torch.full((1, 3, 4), 3.0)) and beside == "beside"
    assert probe.order == [point]


def test_an_output_without_a_batch_dimension_gets_one() -> None:
    module, point = nn.Identity(), Point("mlp")
    probe = Looking((), {point: lambda value: value.mul_(0)})
    with watching(probe, {point: module}):
        assert not bool(module(torch.ones(3, 4)).any())
    assert probe.seen[point][0].shape == (3, 4)


def test_hooks_are_removed_after_an_exception() -> None:
    module, point = nn.Identity(), Point("attn")

    def refuse(value: Tensor) -> None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"), watching(Looking((), {point: refuse}), {point: module}):
        module(torch.ones(1, 3, 4))
    assert not module._forward_hooks


def test_a_probe_that_fails_in_a_step_leaves_no_hook(family: Driven) -> None:
    def refuse(value: Tensor) -> None:
        raise RuntimeError("refused")

    alone = family.run()
    with pytest.raises(RuntimeError, match="refused"):
        family.run(lambda step: Looking(all_points(family.points), {Point("mlp", 1): refuse}))
    family.weights.placement.restart()
    assert all(same_bytes(got, own) for got, own in zip(family.run(), alone, strict=True))
    for root in (family.model.adapter.model, *family.model.adapter.blocks):
        assert not any(module._forward_hooks for module in root.modules())
