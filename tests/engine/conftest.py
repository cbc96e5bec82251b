"""Whatever a test does to an engine, its accounts hold when the test is over."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from nvium_core import Engine


@pytest.fixture(autouse=True)
def every_engine_keeps_its_accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the accounts are held on to; caches may go as they come."""
    accounts = list[Engine]()
    make = Engine.__init__

    def make_and_note(engine: Engine, *args: Any, **options: Any) -> None:
        make(engine, *args, **options)
        accounts.append(copy(engine))
        del accounts[-1].runner

    monkeypatch.setattr(Engine, "__init__", make_and_note)
    yield
    for engine in accounts:
        engine.check_integrity()
