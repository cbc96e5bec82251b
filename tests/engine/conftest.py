"""Checks the integrity of every engine at the end of each test."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from nvium_core import Engine


@pytest.fixture(autouse=True)
def every_engine_ends_consistent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep a copy of each engine without its runner, so caches can be freed."""
    engines = list[Engine]()
    make = Engine.__init__

    def make_and_note(engine: Engine, *args: Any, **options: Any) -> None:
        make(engine, *args, **options)
        engines.append(copy(engine))
        del engines[-1].runner

    monkeypatch.setattr(Engine, "__init__", make_and_note)
    yield
    for engine in engines:
        engine.check_integrity()
