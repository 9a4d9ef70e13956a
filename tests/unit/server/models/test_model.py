from __future__ import annotations

from djinn_client.protocol.fields.placing import Placing
from djinnd import config
from djinnd.server.models.model import ServedModel

CONFIGURED = config.Model(
    path="/m", slots=2, adapter_memory=1 << 30, cpu_beside_bus=True, prefetch=False, piece=1 << 20
)


def test_a_load_without_a_wish_is_as_configured() -> None:
    model = ServedModel.of("m", CONFIGURED)
    assert model.placed(None) == model.placing == CONFIGURED.placing


def test_a_wish_keeps_what_only_the_configuration_sets() -> None:
    placing = ServedModel.of("m", CONFIGURED).placed(Placing(resident=3, adapter_bytes=7))
    of_configuration = {"cpu_beside_bus": True, "adapter_bytes": 1 << 30, "prefetch": False, "piece_bytes": 1 << 20}
    assert placing == Placing(resident=3, **of_configuration)  # type: ignore[arg-type]


def test_a_wish_changes_nothing_about_the_place_of_a_head() -> None:
    model = ServedModel.of("m", config.Model(path="/m", part="heads"))
    assert model.placed(Placing(resident=0, speculation=True, draft="x")) == Placing(resident=1.0, part="heads")


def test_a_wish_as_configured_is_no_other_setting() -> None:
    model = ServedModel.of("m", CONFIGURED)
    assert model.placed(Placing(slots=2)) == model.placing
    assert model.placed(Placing(slots=3)) != model.placing
