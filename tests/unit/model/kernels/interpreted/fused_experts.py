"""Kernels in the place of families' experts, on the CPU with interpreted kernels. Run by test_interpreted.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from djinnd.device.cpu import CpuDevice
from djinnd.model.fast import experts as fast
from djinnd.model.fast.experts import FusedExperts, codes_suffice, fused_experts_of, kind_of
from djinnd.model.kernels.experts.gating import CLAMPED, RELU_SQUARED, SILU
from djinnd.model.kernels.experts.matrices import Matrices
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.launches import KernelUnavailable
from djinnd.model.placing.loader import Weights
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.plan import BlockPlace
from tests.support import quantised as by
from tests.support.checkpoints import random_model
from tests.support.expert_fetches import FetchCounter
from tests.support.loaded import MEMORY, load_weights
from tests.support.placed import plan_of

assert INTERPRETED

# exp of a large number is infinite on the GPU, and its inverse 0, which is intended; numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
EXPERTS, PICKS, HIDDEN, WIDTH = 4, 2, 32, 16
KINDS = [
    *((MixtralExperts, SILU), (GptOssExperts, CLAMPED), (NemotronHExperts, RELU_SQUARED), (LongcatFlashExperts, SILU)),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def module_of(of: type[nn.Module], **changed: object) -> nn.Module:
    names = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "n_routed_experts": EXPERTS}
    widths = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH}
    config = AutoConfig.for_model("gpt_oss" if of is GptOssExperts else "mixtral", **names | widths | changed)
    others = {"moe_latent_size": None, "mlp_hidden_act": "relu2", "zero_expert_num": 0, "expert_ffn_hidden_size": WIDTH}
    for name, value in (others | changed).items():  # fields of Nemotron-H and LongCat-Flash
        setattr(config, name, value)
    config._experts_implementation = "grouped_mm"
    module = of(config)
    for parameter in module.parameters():
        parameter.requires_grad_(False).normal_()
    return module


def call(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    picked = torch.stack([torch.randperm(EXPERTS)[:PICKS] for _ in range(rows)])
    return torch.randn(rows, HIDDEN), picked, torch.rand(rows, PICKS)


def nothing() -> None:
    return None


def assert_near(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("of", "kind", "rows"),
    [
        *((of, kind, 5) for of, kind in KINDS),
        *((of, kind, 1) for of, kind in KINDS[:2]),
        *(pytest.param(of, kind, 1, marks=pytest.mark.long) for of, kind in KINDS[2:]),
    ],
)
def test_the_forward_is_the_familys(of: type[nn.Module], kind: object, rows: int) -> None:
    module, (x, picked, weights) = module_of(of), call(rows)
    wanted = module(x, picked, weights)
    fused = fused_experts_of(module, nothing)
    assert fused is not None and fused.kind.activation.kind == kind.value  # type: ignore[attr-defined]
    assert_near(module(x, picked, weights), wanted)
    names = list(fused._signature.parameters)
    assert_near(module(**dict(zip(names[::-1], (weights, picked, x), strict=True))), wanted)
    assert fused_experts_of(module, nothing) is None


class Normed(MixtralExperts):
    """Multiplies the results by a factor that no kernel has."""

    def forward(self, *args: Tensor) -> Tensor:
        return 1.01 * super().forward(*args)


@pytest.mark.parametrize(
    "module",
    [
        module_of(MixtralExperts, hidden_act="relu"),
        module_of(Normed),
        module_of(NemotronHExperts, mlp_hidden_act="silu"),  # an activation without a gate, but not its own
        module_of(LongcatFlashExperts, zero_expert_num=2),
        nn.Linear(4, 4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_that_compute_something_else_keep_their_forward(module: nn.Module) -> None:
    assert kind_of(module) is None and fused_experts_of(module, nothing) is None
    assert "forward" not in vars(module)


def unavailable(*_: object) -> Tensor:
    raise KernelUnavailable(None, "no compiler")  # type: ignore[arg-type]


def test_the_family_computes_where_a_kernel_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x, picked, weights) = module_of(MixtralExperts), call(3)
    wanted = module(x, picked, weights)
    fused, fetched = fused_experts_of(module, nothing), []

    def fetch(picked: Tensor) -> Tensor:
        fetched.append(picked)
        return picked

    assert fused is not None
    monkeypatch.setattr(fast, "experts_forward", unavailable)
    fused.bind(dict.fromkeys(fused.kind.stacks, fused._plain(0)), fetch)
    assert torch.equal(module(x, picked, weights), wanted) and len(fetched) == 1


@contextmanager
def loaded(
    folder: Path, place: BlockPlace, *, decodes_experts: bool = True
) -> Iterator[tuple[Weights, FusedExperts, nn.Module]]:
    """Loads a checkpoint with all blocks at `place`. → its weights, and the first block's fused experts and module."""
    with closing(CpuDevice(MEMORY)) as device:
        weights = load_weights(folder, device, "bfloat16")
        _mark_codes(weights)
        weights.placement.fuse_experts()
        places = [place] * weights.skeleton.num_blocks
        weights.placement.move(plan_of(weights, places, decodes_experts=decodes_experts))
        block = weights.placement._blocks[0]
        assert block.fused is not None and block.experts is not None
        yield weights, block.fused, block.experts.module
        weights.release(device)


def _mark_codes(weights: Weights) -> None:
    """Notes for each buffer of experts whether its codes suffice, as a load on a GPU does."""
    blocks, store = weights.skeleton.adapter.blocks, weights.store
    for index, number in store.experts.items():
        layout, form = store.buffers[number].layout, store.forms[number]
        assert isinstance(form, CodedForm)
        module = blocks[index].get_submodule(next(iter(layout.entries)).rpartition(".")[0])
        suffice = codes_suffice(module, layout, form.codes)
        store.buffers[number] = replace(store.buffers[number], codes_suffice=suffice)


@pytest.fixture(scope="module", params=[pytest.param("qwen3-moe, fp8", marks=pytest.mark.long), "gpt-oss, mxfp4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "head_dim": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": PICKS}
    folder = tmp_path_factory.mktemp("m")
    if request.param.startswith("gpt-oss"):
        own = GptOssConfig(**sizes, **heads, num_local_experts=EXPERTS, intermediate_size=32)
        told = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        return by.write_quantised(folder / "q", by.mxfp4_experts, told, random_model(folder / "m", own), "_proj")
    own = Qwen3MoeConfig(**sizes, **heads, num_experts=EXPERTS, intermediate_size=64, moe_intermediate_size=32)
    told = by.FP8 | {"weight_block_size": [16, 16]}
    return by.write_quantised(folder / "q", by.fp8_blocks(16, 16), told, random_model(folder / "m", own))


def test_codes_are_read_where_they_are_resident_and_rows_are_few(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = call(3), call(5)
    few, many = ((x.bfloat16(), picked, weights.bfloat16()) for x, picked, weights in (few, many))
    monkeypatch.setattr(fast, "reads_codes", lambda rows, picks, experts: rows < 5)
    fetches, found = FetchCounter(monkeypatch), {}
    for place in BlockPlace:
        with loaded(checkpoint, place) as (weights, fused, module):
            assert weights.placement.turning_rows[:2] == [1, 2]
            assert (fused._stored is not None) == (place is BlockPlace.PACKED)
            if place is BlockPlace.PACKED:
                assert all(isinstance(each, Matrices) and not each.is_plain for each in fused._stored or ())
            assert not module._forward_pre_hooks
            before = fetches.total()
            for name, given in (("few", few), ("many", many)):
                weights.placement.tokens.real = torch.tensor([len(given[0])], dtype=torch.int32)
                weights.placement.begin(0)
                weights.placement.prepare(0, len(given[0]))
                found[place, name] = module(*given).float()
                weights.placement.end(0)
            picked = len(few[1].unique()), len(many[1].unique())
            wanted = {BlockPlace.PLAIN: 0, BlockPlace.PACKED: picked[1], BlockPlace.STREAMED: sum(picked)}
            assert fetches.total() - before == wanted[place]
    for name in ("few", "many"):
        plain = found[BlockPlace.PLAIN, name]
        assert plain.abs().max() > 0
        torch.testing.assert_close(found[BlockPlace.STREAMED, name], plain, rtol=0, atol=0)
        torch.testing.assert_close(found[BlockPlace.PACKED, name], plain, rtol=2e-2, atol=1e-2 * float(plain.max()))


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("place", [BlockPlace.PACKED, BlockPlace.STREAMED])
def test_without_scratch_for_decoded_experts_every_batch_reads_codes(
    checkpoint: Path, place: BlockPlace, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, picked, given = call(5)
    x, given = x.bfloat16(), given.bfloat16()
    with loaded(checkpoint, BlockPlace.PLAIN) as (_, _, module):
        wanted = module(x, picked, given)
    monkeypatch.setattr(fast, "reads_codes", lambda rows, picks, experts: False)
    if not has_kernel:
        monkeypatch.setattr(fast, "experts_forward", unavailable)
    fetches = FetchCounter(monkeypatch)
    with loaded(checkpoint, place, decodes_experts=False) as (weights, fused, module):
        plan, experts = weights.placement.plan, weights.store.sizes(weights.dtype)[0].experts
        assert plan is not None and experts is not None
        codes = experts.least if place is BlockPlace.STREAMED else 0
        assert plan.scratch_bytes + experts.plain == plan_of(weights, plan.places).scratch_bytes + codes
        assert all(module.get_parameter(name).is_meta for name in fused.kind.stacks)
        weights.placement._scratch.fill_(float("nan"))  # type: ignore[union-attr]  # codes of no expert
        weights.placement.begin(0)
        weights.placement.prepare(0, len(x))
        found = module(x, picked, given)
        weights.placement.end(0)
    assert fetches.total() == (len(picked.unique()) if place is BlockPlace.STREAMED else 0)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2 * float(wanted.max()))
