"""The modules that `import djinn_client` imports. They determine the start-up time, which is not measured here."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "transformers", "numpy", "asyncio", "djinnd"}


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_the_import_is_light() -> None:
    assert not HEAVY & modules_after("import djinn_client")


def test_the_asyncio_client_comes_when_asked_for_without_numpy() -> None:
    loaded = modules_after("import djinn_client; djinn_client.AsyncSession")
    assert "asyncio" in loaded
    assert not (HEAVY - {"asyncio"}) & loaded


def test_every_public_name_is_there() -> None:
    modules_after(
        "import djinn_client; found = [getattr(djinn_client, name) for name in dir(djinn_client)]\n"
        "assert djinn_client.AsyncSession in found and djinn_client.Session in found"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    modules_after("import djinn_client; assert not hasattr(djinn_client, 'sesion')")


def test_without_numpy_calls_that_return_numbers_say_what_to_install() -> None:
    """`None` in sys.modules makes an import fail as it does where the package is not installed."""
    modules_after(
        "sys.modules['numpy'] = None\n"
        "import djinn_client.api.client\n"
        "from djinn_client.tensors.values import values_of\n"
        "try: values_of([1.0, 2.0])\n"
        "except ImportError as error: assert \"pip install 'djinn-client[tensors]'\" in str(error)\n"
        "else: raise AssertionError"
    )
