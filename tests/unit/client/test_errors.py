from __future__ import annotations

import pickle

import pytest

from djinn_client import errors
from djinn_client.errors import DjinnError, from_code


def tree(cls: type[DjinnError]) -> list[type[DjinnError]]:
    """The subclasses in the wire contract; the daemon has some of its own."""
    ours = (sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__)
    return [cls, *(leaf for sub in ours for leaf in tree(sub))]


@pytest.mark.parametrize("cls", tree(DjinnError), ids=lambda cls: cls.code)
def test_every_class_comes_back_from_its_code(cls: type[DjinnError]) -> None:
    error = from_code(cls.code, "too long", {"limit": 3})
    assert type(error) is cls
    assert (error.message, error.data, str(error)) == ("too long", {"limit": 3}, "too long")


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in tree(DjinnError)]
    assert len(codes) == len(set(codes))


def test_every_class_is_in_the_drawn_tree() -> None:
    assert errors.__doc__ is not None
    assert all(cls.__name__ in errors.__doc__ for cls in tree(DjinnError))


def test_a_newer_daemon_s_code_is_still_an_error() -> None:
    error = from_code("from_the_future", "new", {})
    assert type(error) is DjinnError
    assert error.message == "new"


def test_data_may_use_any_name() -> None:
    assert from_code("retry", "m", {"message": 1, "self": 2}).data == {"message": 1, "self": 2}


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.PromptTooLong("long", limit=7)))
    assert (type(error), error.message, error.data) == (errors.PromptTooLong, "long", {"limit": 7})
