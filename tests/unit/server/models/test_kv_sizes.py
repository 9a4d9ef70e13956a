from __future__ import annotations

from djinnd import config
from djinnd.server.models.kv_sizes import AS_CONFIGURED, KvSizes

GIVEN = KvSizes(1, 2, 3)


def test_explicit_sizes_override_earlier_ones_and_0_means_no_tier() -> None:
    assert AS_CONFIGURED.over(GIVEN) == GIVEN == GIVEN.over(KvSizes(4, 5, 6))
    assert KvSizes(0, 0, None).over(GIVEN) == (1, 0, 3)
    assert KvSizes(7, None, 0).over(GIVEN) == (7, 2, 0)


def test_sizes_come_from_the_configuration_and_go_into_a_load() -> None:
    sizes = KvSizes.configured(config.Model(path="/x", kv=1, host_kv=0))
    assert sizes.fields == {"kv_bytes": 1, "host_kv_bytes": 0, "disk_kv_bytes": None}
