"""The training loop of djinn-tiny: next-token prediction on one long row of tokens, best validation loss kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers of one run. Exactly one of `seconds` and `steps` ends it; with `steps`, batches and rates repeat."""

    seconds: float | None
    steps: int | None
    rows: int
    row_tokens: int
    seed: int
    peak_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.03
    validations: int = 40
    validation_windows: int = 256  # of `row_tokens` each, while training; the last figure is over all of them

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError("give either seconds or steps")
        if not (self.seconds or self.steps or 0) > 0:
            raise ValueError("a run lasts more than 0 seconds or steps")

    @property
    def step_tokens(self) -> int:
        return self.rows * self.row_tokens


@dataclass(frozen=True, slots=True)
class Trained:
    """The figures of a run. The model has its best weights, rounded to bf16."""

    steps: int
    tokens: int
    seconds: float
    compiled: bool
    held_out_loss: float  # nats a token, over all held-out windows


def train(model: nn.Module, tokens: Tensor, held_out: Tensor, recipe: Recipe, device: torch.device) -> Trained:
    """Train `model` in place on `tokens` [n]; leave it in eval mode with the weights that did best on `held_out` [m].

    Both hold more than one row of tokens. On CUDA the products run in bf16 and the loss is compiled where torch can;
    weights and moments stay float32.
    """
    model.to(device).train()
    held_out = held_out.to(device)
    sample = held_out[: recipe.validation_windows * recipe.row_tokens + 1]
    batches = _batches(tokens.to(device), recipe)
    loss_of = _next_token_loss(model, device)
    step_loss, compiled = _compiled_if_possible(loss_of, next(batches), device)
    optimizer = _adamw(model, recipe, device)
    best = _Best(model)
    started = time.monotonic()
    step, validations = 0, 0
    for step, progress in _steps(recipe):
        if progress * recipe.validations >= validations:
            validations += 1
            _report(step, recipe, started, best.offer(_mean_loss(loss_of, sample, recipe)))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(step_loss(*next(batches)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_rate * _rate(progress, recipe.warmup)
        optimizer.step()
    step += 1
    _report(step, recipe, started, best.offer(_mean_loss(loss_of, sample, recipe)))
    seconds = time.monotonic() - started
    best.restore()
    model.eval()
    return Trained(step, step * recipe.step_tokens, seconds, compiled, _mean_loss(loss_of, held_out, recipe))


def _steps(recipe: Recipe) -> Iterator[tuple[int, float]]:
    """The number of steps done and the fraction of the run that is over, before each step."""
    started = time.monotonic()
    step, progress = 0, 0.0
    while progress < 1.0:
        yield step, progress
        step += 1
        progress = step / recipe.steps if recipe.steps else (time.monotonic() - started) / (recipe.seconds or math.inf)


def _report(step: int, recipe: Recipe, started: float, loss: float) -> None:
    seconds, tokens = time.monotonic() - started, step * recipe.step_tokens / 1e6
    print(f"step {step:6,}  {seconds:6.1f} s  {tokens:8.2f} M tokens  held-out loss {loss:.3f}", flush=True)


class _Best:
    """The weights with the lowest held-out loss so far, in host memory as bf16."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._loss = math.inf
        self._weights: dict[str, Tensor] = {}

    def offer(self, loss: float) -> float:
        if loss < self._loss:
            self._loss = loss
            state = self._model.state_dict()
            self._weights = {name: tensor.to("cpu", torch.bfloat16, copy=True) for name, tensor in state.items()}
        return loss

    def restore(self) -> None:
        if not self._weights:
            raise RuntimeError("training diverged: no validation gave a finite loss; lower the peak rate")
        self._model.load_state_dict(self._weights)


def _next_token_loss(model: nn.Module, device: torch.device) -> Loss:
    """Mean cross entropy in nats of predicting `targets` [rows, tokens] from `inputs` [rows, tokens]."""

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=inputs, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return loss


def _compiled_if_possible(loss_of: Loss, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Loss, bool]:
    """The compiled loss if it compiles and runs here on `batch`, else `loss_of` itself."""
    if device.type != "cuda":
        return loss_of, False
    compiled: Loss = torch.compile(loss_of, dynamic=False)
    try:
        torch.autograd.backward(compiled(*batch))  # the gradients are the caller's to clear
    except Exception as error:  # eager training gives the same result, only slower
        print(f"torch.compile is not available ({type(error).__name__}); training eagerly", flush=True)
        return loss_of, False
    return compiled, True


def _adamw(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def _rate(progress: float, warmup: float) -> float:
    """Linear warm-up, then half a cosine down to 2 % of the peak."""
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def _batches(tokens: Tensor, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows at random offsets: (inputs, targets), each [rows, row_tokens], targets one token on."""
    generator = torch.Generator(tokens.device).manual_seed(recipe.seed)
    window = torch.arange(recipe.row_tokens + 1, device=tokens.device)
    last_offset = len(tokens) - len(window)
    while True:
        offsets = torch.randint(last_offset + 1, (recipe.rows, 1), generator=generator, device=tokens.device)
        rows = tokens[offsets + window]
        yield rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def _mean_loss(loss_of: Loss, held_out: Tensor, recipe: Recipe) -> float:
    """Over consecutive windows of `row_tokens`, each from an empty context; the remainder is left out."""
    count = (len(held_out) - 1) // recipe.row_tokens
    inputs = held_out[: count * recipe.row_tokens].view(count, recipe.row_tokens)
    targets = held_out[1 : count * recipe.row_tokens + 1].view(count, recipe.row_tokens)
    total = 0.0
    for start in range(0, count, recipe.rows):
        rows = slice(start, start + recipe.rows)
        total += loss_of(inputs[rows], targets[rows]).item() * len(inputs[rows])
    return total / count
