"""The memory for the pages of a model's sessions, for each tier."""

from __future__ import annotations

from typing import Any, NamedTuple

from djinnd import config


class KvSizes(NamedTuple):
    """Sizes in bytes."""

    device: int = 0  # 0: the engine decides
    host: int | None = None  # None: the engine decides; 0: the tier is not used
    disk: int | None = None  # None: the engine decides; 0: the tier is not used

    @classmethod
    def configured(cls, model: config.Model) -> KvSizes:
        return cls(model.kv, model.host_kv, model.disk_kv)

    def over(self, others: KvSizes) -> KvSizes:
        """These sizes; for sizes that leave the choice to the engine, those of `others`."""
        return KvSizes(
            self.device or others.device,
            others.host if self.host is None else self.host,
            others.disk if self.disk is None else self.disk,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of messages.Load."""
        return {"kv_bytes": self.device, "host_kv_bytes": self.host, "disk_kv_bytes": self.disk}


AS_CONFIGURED = KvSizes()
