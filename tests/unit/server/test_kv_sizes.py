from __future__ import annotations

from djinnd import config
from djinnd.server.kv_sizes import AS_CONFIGURED, KvSizes

GIVEN = KvSizes(1, 2, 3)


def test_what_is_said_goes_before_what_was_and_none_of_a_tier_is_said() -> None:
    assert AS_CONFIGURED.over(GIVEN) == GIVEN == GIVEN.over(KvSizes(4, 5, 6))
    assert KvSizes(0, 0, None).over(GIVEN) == (1, 0, 3)
    assert KvSizes(7, None, 0).over(GIVEN) == (7, 2, 0)


def test_they_are_the_configuration_s_and_a_load_s() -> None:
    sizes = KvSizes.configured(config.Model(path="/x", kv=1, host_kv=0))
    assert sizes.fields == {"kv_bytes": 1, "host_kv_bytes": 0, "disk_kv_bytes": None}
