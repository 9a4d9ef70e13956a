"""Finds the targets of adapters by a rehearsal: a pass over the first blocks with two rows.

An adapter adds to the result of a module for each token of the step. That is right only if the module is called once in
a pass, with exactly the step's tokens. Some are not: a latent attention expands the keys of the whole context, a state
module runs one session at a time, and some forwards read a module's weights instead of calling it. No family is known
by name here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from djinnd.model.lora.targets import Target
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import KINDS

log = logging.getLogger("djinnd.engine")

_COUNTS, _LENGTHS = (3, 1), (3, 5)  # tokens of the rows, and of their sessions: keys and tokens differ in number


def served_targets(model: PagedModel, targets: Sequence[Target]) -> list[Target]:
    """The targets among `targets` that adapters may change; none if the rehearsal fails. Called between two steps;
    writes to the scratch page only."""
    calls: Counter[tuple[tuple[str, ...], str]] = Counter()  # by names and block
    fitting: Counter[tuple[tuple[str, ...], str]] = Counter()

    def note(target: Target, x: Tensor, y: Tensor) -> None:
        key = target.names, target.prefix
        calls[key] += 1
        fitting[key] += x.numel() == sum(_COUNTS) * target.inputs and y.shape[:-1] == x.shape[:-1]

    removers: list[Callable[[], None]] = [target.add(partial(note, target)) for target in targets]
    try:
        _run(model)
    except Exception as fault:  # a family that needs more than two rows: its adapters are refused by their names
        log.warning("adapters_not_rehearsed family=%s error=%r", model.skeleton.family, fault)
        model.placement.restart()
        return []
    finally:
        for remove in removers:
            remove()
    wrong = {names for (names, prefix), count in calls.items() if count != 1 or fitting[names, prefix] != 1}
    right = {names for names, _ in calls} - wrong
    served = [target for target in targets if target.names in right]
    if left_out := {name for target in targets if target.names not in right for name in target.names}:
        log.info("adapters_cannot_change family=%s modules=%s", model.skeleton.family, sorted(left_out))
    return served


@torch.inference_mode()
def _run(model: PagedModel) -> None:
    tokens = sum(_COUNTS)
    inputs = StepInputs(model.device, tokens, len(_COUNTS), -(-max(_LENGTHS) // model.page_size))
    inputs.clear()  # all pages of the table are the scratch page
    host = inputs.host
    host["positions"][:] = [*range(_COUNTS[0]), _LENGTHS[1] - 1]
    host["slots"][:] = host["positions"] % model.page_size
    host["starts"][:] = [0, _COUNTS[0], tokens]
    host["lengths"][:] = _LENGTHS
    with model.device.computing(), model.placement.by_the_bus():  # MLPs on the host do not call their products
        inputs.send()
        batch = inputs.paged_batch(max_query=max(_COUNTS), max_kv=max(_LENGTHS), fresh=False)
        model.forward(inputs, batch, blocks=range(min(KINDS, model.num_blocks)))
        model.device.synchronize()
    model.zero_pages([0])
