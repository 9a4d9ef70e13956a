"""Blocks to pack: units of some shapes, and weights with the distribution of a model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from djinn_client.handover.packed import PackedForm, Unit

ODD = [0.0, -0.0, 1e-40, -3e-39, 1e-20, 1.0, -3.0, 5e4, 3e38]  # outside any window of small weights


def form_of(shapes: Sequence[tuple[int, int]], vectors: int = 0) -> PackedForm:
    units: list[Unit] = []
    for rows, cols in shapes:
        units.append(Unit(units[-1].offset + units[-1].numel if units else 0, rows, cols))
    return PackedForm(units, units[-1].offset + units[-1].numel + vectors)


def weights(form: PackedForm, odd: Sequence[float] = (), device: str = "cpu") -> Tensor:
    """A plain block of normally distributed weights. Each unit has the `odd` values somewhere."""
    plain = torch.randn(form.numel).mul_(0.02).to(torch.bfloat16)
    for unit in form.units:
        at = unit.offset + torch.randperm(unit.weights)[: len(odd)]
        plain[at] = torch.tensor(odd, dtype=torch.bfloat16)[: len(at)]
    return plain.to(device)


def tame(form: PackedForm, device: str = "cpu") -> Tensor:
    """A plain block with all weights in one window."""
    return torch.rand(form.numel).mul_(0.02).add_(0.01).to(torch.bfloat16).to(device)


def packed(form: PackedForm, plain: Tensor) -> Tensor:
    out = torch.full((form.nbytes,), 0xA5, dtype=torch.uint8, device=plain.device)
    form.pack(plain, out)
    return out


def matrix(form: PackedForm, number: int, plain: Tensor) -> Tensor:
    unit = form.units[number]
    return plain[unit.offset :][: unit.weights].view(unit.rows, unit.cols)


def same_weights(form: PackedForm, a: Tensor, b: Tensor) -> bool:
    """Compares bit for bit, except for elements that pad a unit."""
    pairs = [(matrix(form, n, a), matrix(form, n, b)) for n in range(len(form.units))]
    pairs.append((a[form.matrices :], b[form.matrices :]))
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)


def cancelling(form: PackedForm, number: int, plain: Tensor, x: Tensor) -> Tensor:
    """A bias that leaves of the product of the first token only what bf16 cannot hold, so that it shows whether the
    product was rounded before the bias was added."""
    return -(x[0].double() @ matrix(form, number, plain).double().T).nan_to_num(0, 0, 0).to(torch.bfloat16)


def check_product(
    form: PackedForm, number: int, plain: Tensor, x: Tensor, y: Tensor, bias: Tensor | None = None
) -> None:
    """Compares y with the product, plus the bias, in double precision. The tolerance is a unit in the last place of
    bf16, because Triton's interpreter truncates where a GPU rounds, plus the error of such a sum in float32."""
    weight = matrix(form, number, plain).double()
    wanted, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    wanted = wanted if bias is None else wanted + bias.double()
    rounded = wanted.to(torch.bfloat16)
    assert y.dtype == torch.bfloat16 and y.shape == wanted.shape
    near = (y.double() - wanted).abs() <= 2.0**-7 * wanted.abs() + 1e-5 * size
    alike = (y == rounded) | (y.isnan() & rounded.isnan())
    assert bool((near | alike).all()), float((y.double() - wanted).abs().max())
