"""tools/make_model.py: transformers reads its checkpoints, which have the hub's layout."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from djinn_client.protocol import Placing
from djinnd.device.cpu import CpuDevice
from djinnd.weights.forms.codings import Float4
from tests.support.daemon import clean_environ, warm_python
from tests.support.loaded import MEMORY, load_weights
from tests.support.models import FAMILIES, REPOSITORY, reduced_model, tiny_model
from tests.support.parameters import FEW_FAMILIES
from tools.checkpoints.corpus import Corpus, standard_library
from tools.checkpoints.random_models.layout import StoredTensor, shards, stored_tensors
from tools.checkpoints.random_models.model import make_random, prepare_folder
from tools.checkpoints.shapes.named import SHAPES, config_of, shape_of
from tools.checkpoints.shapes.shape import REDUCED_VOCABULARY
from tools.checkpoints.tiny.model import MAX_FOLDER_BYTES, make_tiny
from tools.checkpoints.tiny.training import Recipe, train
from tools.checkpoints.tokenizer import END_OF_TEXT_ID

PROMPT = "async def main(loop):\n\tprint('§ 1 → 2 🧞')\n\n    return None\n"

# Parameters of the published models, tied weights once.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gpt-j-6b": 6_050_882_784,
    "gpt2": 124_439_808,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "gpt-neox-20b": 20_554_567_680,
    "opt-6.7b": 6_658_473_984,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "glm-4.5-air": 110_468_824_832 - 2 * 151_552 * 4_096,  # without its head's copies of embedding and lm_head
}

LEFTOVERS = (".rotary_emb.inv_freq", ".attn.bias", ".attention.bias")


def load(folder: Path) -> Any:
    """transformers' model of the folder; no key of it missing, unexpected or of another shape."""
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, loading = from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return model


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", SHAPES)
def test_full_shapes_have_the_published_number_of_parameters(name: str) -> None:
    config = config_of(name, dtype="bfloat16")
    tensors = stored_tensors(shape_of(name), config, torch.bfloat16)
    sizes = [torch.Size(t.size).numel() for t in tensors if not t.name.endswith(LEFTOVERS)]
    assert sum(sizes) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "form", "coded"),
    [
        ("qwen3.6-35b-a3b", "fp8", "model.layers.3.self_attn.k_proj.weight"),
        ("llama-2-7b", "fp8", "model.layers.0.mlp.up_proj.weight"),
        ("gpt-oss-120b", "mxfp4", "model.layers.1.mlp.experts.gate_up_proj_blocks"),
    ],
)
def test_a_form_is_read_and_its_weights_have_the_deviation_of_plain_ones(
    name: str, form: str, coded: str, tmp_path: Path
) -> None:
    make_random(name, tmp_path / "m", reduced=True, form=form)
    with closing(CpuDevice(MEMORY)) as device:
        load_weights(tmp_path / "m", device, "bfloat16").release(device)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    if form == "fp8":
        codes, scales = stored[coded], stored[f"{coded}_scale_inv"]
        weights = codes.float() * scales.repeat_interleave(128, 0)[: len(codes), :1]
    else:
        codes, scales = stored[coded].flatten(2)[0], stored[coded.replace("_blocks", "_scales")][0]
        weights = Float4().decoded([codes, scales], 2 * codes.shape[1])
    assert 0.7 < weights.std() * weights.shape[1] ** 0.5 / shape_of(name).reduced_gain < 1.4


@pytest.mark.parametrize(("part", "blocks"), [(None, 4), ("heads", 1)])
def test_a_head_behind_the_last_block_is_a_part_of_the_checkpoint(
    part: str | None, blocks: int, tmp_path: Path
) -> None:
    make_random("glm-4.5-air", tmp_path / "m", reduced=True)
    with closing(CpuDevice(MEMORY)) as device:
        weights = load_weights(tmp_path / "m", device, placing=Placing(part=part))
        assert weights.skeleton.num_blocks == blocks
        weights.release(device)


def test_a_form_that_no_weight_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights of this shape have the form mxfp4"):
        make_random("llama-2-7b", tmp_path / "m", reduced=True, form="mxfp4")


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_family_and_misses_nothing(family: str) -> None:
    load(reduced_model(family))


@pytest.mark.parametrize("family", FEW_FAMILIES)
@torch.no_grad()
def test_greedy_output_of_reduced_models_is_varied_and_does_not_end(family: str) -> None:
    model = load(reduced_model(family))
    prompt = torch.arange(1, 41)[None]
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, do_sample=False)
    new = out[0, prompt.shape[1] :]
    assert len(new) == 64
    assert len(new.unique()) >= 10


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_choices_of_reduced_models_are_clear_in_float32(family: str) -> None:
    model = load(reduced_model(family))
    best, next_best = model(torch.arange(1, 301)[None]).logits[0].topk(2).values.unbind(-1)
    assert (best - next_best).median() > 0.1
    assert best.abs().max() < 30


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_give_any_text_back(family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reduced_model(family))
    ids = tokenizer(PROMPT).input_ids
    assert max(ids) < REDUCED_VOCABULARY
    assert tokenizer.decode(ids) == PROMPT
    assert tokenizer.eos_token_id == END_OF_TEXT_ID


def test_names_are_those_of_the_hub() -> None:
    mixtral = names_in(reduced_model("mixtral"))
    moe = "model.layers.0.block_sparse_moe"
    assert {name for name in mixtral if name.startswith(moe)} == {f"{moe}.gate.weight"} | {
        f"{moe}.experts.{expert}.{matrix}.weight" for expert in range(4) for matrix in ("w1", "w2", "w3")
    }
    gpt2 = names_in(reduced_model("gpt2"))
    assert {"wte.weight", "h.0.attn.bias", "h.3.mlp.c_proj.weight"} <= gpt2
    assert "lm_head.weight" not in gpt2
    assert {"lm_head.weight", "lm_head.bias"} <= names_in(reduced_model("gpt-j"))
    assert "model.layers.3.self_attn.rotary_emb.inv_freq" in names_in(reduced_model("llama-2"))
    neox = names_in(reduced_model("gpt-neox"))
    assert {"embed_out.weight", "gpt_neox.layers.3.attention.bias"} <= neox
    experts = {name for name in names_in(reduced_model("qwen3-moe")) if ".experts." in name}
    assert len(experts) == 3 * 4 * 3  # blocks (the fourth is dense), experts, matrices
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in experts
    gpt_oss = names_in(reduced_model("gpt-oss"))
    assert {"model.layers.0.self_attn.sinks", "model.layers.0.mlp.experts.gate_up_proj_bias"} <= gpt_oss


def test_as_many_blocks_as_asked_for_have_kinds() -> None:
    config = config_of("gpt-oss-20b", dtype="bfloat16", blocks=3)
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]


def test_shards_hold_every_tensor_once_and_stay_under_the_limit(tmp_path: Path) -> None:
    make_random("llama-3-8b", tmp_path / "one", reduced=True)
    make_random("llama-3-8b", tmp_path / "many", reduced=True, shard_bytes=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "many" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(part)
        assert sum(tensor.nbytes for tensor in part.values()) <= 100_000
        found |= part
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own() -> None:
    small, large = (StoredTensor(name, (size,), torch.int8) for name, size in (("small", 4), ("large", 20)))
    assert shards([small, large, small, small], 8) == [[small], [large], [small, small]]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        make_random("gpt2", tmp_path / str(number), reduced=True, seed=seed, blocks=1)
        weights.append(load_file(tmp_path / str(number) / "model.safetensors")["wte.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_blocks_dtype_and_end_of_text_are_as_asked(tmp_path: Path) -> None:
    make_random("gpt-j-6b", tmp_path, reduced=True, blocks=2, dtype=torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["n_layer"], config["torch_dtype"], config["eos_token_id"]) == (2, "float16", END_OF_TEXT_ID)
    weights = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert not weights["lm_head.weight"][END_OF_TEXT_ID].any()
    assert weights["lm_head.weight"][END_OF_TEXT_ID + 1 :].any(dim=1).all()


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [warm_python(), str(REPOSITORY / "tools" / "make_model.py"), *map(str, arguments)]
    return subprocess.run(line, env=clean_environ(), capture_output=True, text=True, check=False)


def test_command_writes_a_folder_and_refuses_to_write_into_it_again(tmp_path: Path) -> None:
    line = ("random", "mistral-7b", tmp_path / "model", "--reduced", "--dtype", "fp32", "--blocks", "1")
    first, second = command(*line), command(*line)
    assert first.returncode == 0, first.stderr
    assert json.loads((tmp_path / "model" / "config.json").read_text())["sliding_window"] == 64
    assert second.returncode == 1
    assert "is not empty" in second.stderr


def test_wrong_numbers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        make_random("gpt2", tmp_path / "out", reduced=True, blocks=0)
    with pytest.raises(ValueError, match=r"'gpt3'.*llama-2-13b"):
        make_random("gpt3", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_with_the_figures(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"need 1000000000\.0 GB, .* has \d+\.\d GB free"):
        prepare_folder(tmp_path, 10**18)


class Bigram(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Logits:
        return Logits(self.table(input_ids))


class Logits:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def test_training_learns_and_reports_the_loss_of_the_weights_that_it_leaves() -> None:
    text = torch.arange(8).repeat(100)
    model = Bigram(8)
    recipe = Recipe(None, steps=150, rows=4, row_tokens=16, seed=0, peak_rate=0.1)
    trained = train(model, text, text[:161], recipe, torch.device("cpu"))
    assert (trained.steps, trained.tokens) == (150, 150 * 64)
    assert trained.held_out_loss < 0.1
    loss = nn.functional.cross_entropy(model.table(text[:160]), text[1:161]).item()
    assert loss == pytest.approx(trained.held_out_loss, rel=1e-4)
    assert torch.equal(model.table.weight, model.table.weight.bfloat16().float())


@pytest.mark.parametrize("limits", [(None, None), (10.0, 10), (None, 0), (0.0, None)])
def test_a_run_needs_exactly_one_limit(limits: tuple[float | None, int | None]) -> None:
    with pytest.raises(ValueError, match=r"seconds or (more than 0 )?"):
        Recipe(*limits, rows=1, row_tokens=1, seed=0)


def test_tiny_is_written_whole_and_says_how_it_was_made(tmp_path: Path) -> None:
    source = Path(__file__).read_text()
    make_tiny(tmp_path, Corpus((source,), (source[:2000],)), device="cpu", seconds=None, steps=1, seed=3)
    model = load(tmp_path)
    assert model.dtype == torch.bfloat16
    card = (tmp_path / "README.md").read_text()
    assert "tiny OUT --device cpu --steps 1 --seed 3" in card
    assert "nats a token" in card


def test_the_corpus_holds_out_whole_distinct_files() -> None:
    corpus = standard_library()
    assert len(corpus.train) > 10 * len(corpus.held_out) > 0
    files = corpus.train + corpus.held_out
    assert len(set(files)) == len(files)


def test_the_shipped_model_fits_and_predicts_python_better_than_chance() -> None:
    folder = tiny_model()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_FOLDER_BYTES
    model = load(folder)
    ids = AutoTokenizer.from_pretrained(folder)(Path(__file__).read_text(), return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 6.0  # of ln 2,048 = 7.6 nats; token frequencies alone reach about 6.3
