"""First tokens of prompts of several lengths, beside the rate of large products and contiguous attention.

    python -m tools.bench.engine.prefill CHECKPOINT [--tokens 512 --tokens 8000 --tokens 32000] [--memory 80GiB]

The limit is the time of the prompt's products at the rate of one large product, and of attention to contiguous keys and
values by torch, a block after the other. Both are measured in the same run. The share of products is the rate that the
prompt's products would have if nothing else took time.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.engine.ceilings import Ceilings, measured_apart
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.prompts import prompt

GIB = 1 << 30
RUNS = 4  # of each length; the first one does not count
OUTSIDE = ("embed", "lm_head", "wte", "wpe")  # in the names of matrices that a prompt's tokens are not multiplied by


def multiplied_weights(checkpoint: Path) -> int:
    """The weights of a dense model that each token of a prompt is multiplied by. The head sees only the last one."""
    total = 0
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as read:
            header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__" and len(entry["shape"]) == 2 and not any(part in name for part in OUTSIDE):
                total += entry["shape"][0] * entry["shape"][1]
    return total


def first_tokens_s(address: str, model: str, tokens: int, vocab: int) -> list[float]:
    """Seconds of fresh sessions, one after another. Each has a prompt of its own, so none is found in the cache."""
    times = []
    for run in range(RUNS):
        with djinn.Session(model, address=address) as session:
            began = time.perf_counter()
            session.generate(prompt(tokens, vocab, tokens + run), max_tokens=1, ignore_eos=True)
            times.append(time.perf_counter() - began)
    return times[1:]


def row(tokens: int, seconds: float, weights: int, blocks: int, ceilings: Ceilings) -> dict[str, float]:
    """A length's figures. `products`: the share of the rate of large products."""
    products = 2 * weights * tokens / ceilings.products
    attention = blocks * ceilings.attention[tokens]
    return {
        "first_token_s": seconds,
        "tokens_per_s": tokens / seconds,
        "products": products / seconds,
        "limit_s": products + attention,
        "attention_s": attention,
    }


@command.bench("prefill", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv_gib
@click.option("--tokens", default=(512, 8000, 32000), show_default=True, multiple=True)
def main(checkpoint: Path, device: str, memory: str, kv_gib: float, tokens: tuple[int, ...]) -> Result:
    config = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    ceilings = measured_apart(device, heads, config.get("num_key_value_heads", heads), head_dim, tokens)
    weights = multiplied_weights(checkpoint)
    with private_daemon({"device": device, "memory": memory}) as address:
        model = str(checkpoint)
        info = djinn.load(model, kv_bytes=round(kv_gib * GIB), host_kv_bytes=0, disk_kv_bytes=0, address=address)
        found: dict[int, dict[str, float]] = {}
        for count in tokens:
            seconds = statistics.median(first_tokens_s(address, model, count, info.vocab))
            found[count] = row(count, seconds, weights, info.blocks, ceilings)
            say(f"{count} tokens: {seconds * 1e3:.1f} ms")
        results = {"device": device_name(address), "products_per_s": ceilings.products, "lengths": found}
    table = Table("tokens", "first token, ms", "tokens/s", "share of products", "times the limit")
    for count, each in found.items():
        table.add_row(
            f"{count:,}",
            f"{each['first_token_s'] * 1e3:.1f}",
            f"{each['tokens_per_s']:,.0f}",
            f"{each['products']:.2f}",
            f"{each['first_token_s'] / each['limit_s']:.2f}",
        )
    parameters: dict[str, Any] = {"model": checkpoint.name, "memory": memory, "kv_gib": kv_gib, "tokens": list(tokens)}
    return Result(parameters, results, summary(found), [table])


def summary(found: dict[int, dict[str, float]]) -> str:
    return "; ".join(
        f"{count:,} tokens in {each['first_token_s'] * 1e3:.1f} ms, {each['products']:.2f} of the rate of large "
        f"products, {each['first_token_s'] / each['limit_s']:.2f} times the limit"
        for count, each in found.items()
    )


if __name__ == "__main__":
    main()
