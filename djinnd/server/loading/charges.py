"""Charges models that users brought to their owners. A model counts from its load until it is forgotten."""

from __future__ import annotations

from collections.abc import Callable

from djinnd.server.models.model import ServedModel
from djinnd.server.quotas.ledger import MODELS, Ledger


class ModelCharges:
    """`ledger_of` returns a user's ledger."""

    def __init__(self, is_admin: Callable[[int], bool], ledger_of: Callable[[int], Ledger]) -> None:
        self._is_admin = is_admin
        self._ledger_of = ledger_of

    def payer_of(self, user: int | None) -> Ledger | None:
        """The ledger that is charged for this user's models. None for administrators and for configured models."""
        return None if user is None or self._is_admin(user) else self._ledger_of(user)

    def charge(self, model: ServedModel) -> None:
        """Charges the model to its owner before the load. Raises QuotaExceeded."""
        payer = self.payer_of(model.owner)
        if payer is not model.payer:
            if payer is not None:
                payer.charge(MODELS)
            self.release(model)
            model.payer = payer

    def adopt(self, model: ServedModel) -> None:
        """Charges an adopted model to its owner even beyond the limits, because its memory is already in use."""
        payer = self.payer_of(model.owner)
        if payer is not None:
            payer.add(MODELS, 1)
            model.payer = payer

    def release(self, model: ServedModel) -> None:
        if model.payer is not None:
            model.payer.release(MODELS)
        model.payer = None
