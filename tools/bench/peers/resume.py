"""Continuing a session without djinnd: transformers recomputes the KV, or the KV is copied back by hand.

    python -m tools.bench.peers.resume CHECKPOINT --device cuda:0 --dtype bfloat16 --tokens 512,2048 --rounds 7

It prints JSON. The copied KV lies in torch's pinned memory, one tensor for the keys and one for the values of each
block, and each tensor comes back by one call.

With `--blocks 1,10` it measures sessions that stopped after so many blocks. The KV of these blocks and the last one's
output are kept. nnsight is measured too; its trace runs all blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from tools.bench.harness.prompts import prompt
from tools.bench.peers.nnsight import Traced
from tools.transformers_cache import cache_argument


class Resuming(msgspec.Struct):
    """Figures of one session: seconds to the next token, one for each round."""

    tokens: int
    nbytes: int  # bytes of its KV
    recompute: list[float]
    manual: list[float]
    same_token: bool  # in both ways and in all rounds


class ResumingInside(msgspec.Struct):
    """Figures of a prompt that stopped inside the model."""

    blocks: int  # blocks that had run
    nbytes: int  # bytes of their KV and of the last one's output
    recompute: list[float]
    manual: list[float]
    same_token: bool
    nnsight: list[float] = []
    nnsight_note: str = ""  # the reason why it is missing


class Peer:
    def __init__(self, checkpoint: Path, device: str, dtype: str) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
        self._model = self._model.to(device)

    @torch.inference_mode()
    def resume(self, tokens: int, rounds: int) -> Resuming:
        """The first round of each kind warms up and does not count."""
        ids = self._prompt(tokens)
        cache: Any = DynamicCache()
        token = self._next(ids, cache)
        kept = [(self._kept(layer.keys), self._kept(layer.values)) for layer in cache.layers]
        last = torch.tensor([[token]], device=self._device)
        whole = torch.cat([ids, last], dim=1)

        def recompute() -> int:
            return self._next(whole, DynamicCache())

        def manual() -> int:
            for layer, (keys, values) in zip(cache.layers, kept, strict=True):
                layer.keys = keys.to(self._device, non_blocking=True, copy=True)
                layer.values = values.to(self._device, non_blocking=True, copy=True)
            return self._next(last, cache)

        computed, copied = (self._timed(way, rounds) for way in (recompute, manual))
        return Resuming(
            tokens,
            sum(keys.nbytes + values.nbytes for keys, values in kept),
            [seconds for seconds, _ in computed],
            [seconds for seconds, _ in copied],
            len({token for _, token in computed + copied}) == 1,
        )

    @torch.inference_mode()
    def resume_inside(self, tokens: int, blocks: int, rounds: int) -> ResumingInside:
        ids = self._prompt(tokens)
        layers, given = self._layers(), list[Tensor]()
        cache: Any = DynamicCache()
        handle = layers[blocks - 1].register_forward_hook(lambda _module, _args, output: given.append(output))
        self._next(ids, cache)
        handle.remove()
        kept = [self._kept(part) for layer in cache.layers[:blocks] for part in (layer.keys, layer.values)]
        kept.append(self._kept(given[0]))

        def manual() -> int:
            *_kv, hidden = [tensor.to(self._device, non_blocking=True, copy=True) for tensor in kept]
            with _replaced(layers[:blocks], hidden):
                return self._next(ids, DynamicCache())

        computed = self._timed(lambda: self._next(ids, DynamicCache()), rounds)
        copied = self._timed(manual, rounds)
        return ResumingInside(
            blocks,
            sum(tensor.nbytes for tensor in kept),
            [seconds for seconds, _ in computed],
            [seconds for seconds, _ in copied],
            len({token for _, token in computed + copied}) == 1,
        )

    @torch.inference_mode()
    def trace(self, tokens: int, found: Sequence[ResumingInside], rounds: int) -> None:
        """Adds nnsight's times, with an edit that changes nothing. The process must have no other work afterwards: see
        Traced."""
        try:
            traced = Traced(self._model, self._checkpoint)
        except ModuleNotFoundError as error:
            for one in found:
                one.nnsight_note = f"{error.name} is not installed"
            return
        ids = self._prompt(tokens)
        for one in found:
            timed = self._timed(lambda: traced.next_token(ids, one.blocks, 1.0), rounds)  # noqa: B023 - called at once
            one.nnsight = [seconds for seconds, _ in timed]
            one.same_token &= {token for _, token in timed} == {self._next(ids, DynamicCache())}

    def _prompt(self, tokens: int) -> Tensor:
        return torch.tensor([prompt(tokens, self._model.config.vocab_size, tokens)], device=self._device)

    def _layers(self) -> nn.ModuleList:
        count = self._model.config.num_hidden_layers
        return next(one for one in self._model.modules() if isinstance(one, nn.ModuleList) and len(one) == count)

    def _next(self, ids: Tensor, cache: Any) -> int:
        logits = self._model(ids, **cache_argument(self._model, cache), use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax().item())

    def _kept(self, tensor: Tensor) -> Tensor:
        """Copies the tensor to host memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device != "cpu")
        return host.copy_(tensor)

    def _timed(self, way: Callable[[], int], rounds: int) -> list[tuple[float, int]]:
        found = []
        for _ in range(rounds + 1):
            if self._device != "cpu":
                torch.cuda.synchronize()
            began = time.perf_counter()
            token = way()
            found.append((time.perf_counter() - began, token))
        return found[1:]


@contextmanager
def _replaced(layers: Iterable[nn.Module], hidden: Tensor) -> Iterator[None]:
    """The layers compute nothing and return `hidden`, as long as the context lasts."""
    for layer in layers:
        layer.forward = lambda *_args, **_kwargs: hidden
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def measure(checkpoint: Path, device: str, dtype: str, tokens: Sequence[int], rounds: int) -> list[Resuming]:
    peer = Peer(checkpoint, device, dtype)
    return [peer.resume(length, rounds) for length in tokens]


def measure_inside(peer: Peer, tokens: int, blocks: Sequence[int], rounds: int) -> list[ResumingInside]:
    return [peer.resume_inside(tokens, depth, rounds) for depth in blocks]


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", required=True)
@click.option("--dtype", required=True)
@click.option("--tokens", required=True)
@click.option("--rounds", type=int, required=True)
@click.option("--blocks", default="")
def main(checkpoint: Path, device: str, dtype: str, tokens: str, rounds: int, blocks: str) -> None:
    lengths, depths = ([int(number) for number in numbers.split(",") if number] for numbers in (tokens, blocks))
    found: list[Any]
    if depths:
        peer = Peer(checkpoint, device, dtype)
        found = measure_inside(peer, max(lengths), depths, rounds)
        peer.trace(max(lengths), found, rounds)
    else:
        found = measure(checkpoint, device, dtype, lengths, rounds)
    click.echo(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
