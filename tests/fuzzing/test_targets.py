"""Runs all targets on their seeds and the corpus, without a fuzzer."""

import random
from importlib import import_module
from pathlib import Path

import pytest
from transformers.utils.logging import disable_progress_bar

from tests.fuzzing.campaign import CORPUS, TARGETS
from tests.fuzzing.choices import Choices


@pytest.mark.parametrize("name", TARGETS)
def test_no_known_input_breaks_its_target(name):
    disable_progress_bar()
    module = import_module(f"tests.fuzzing.targets.{name}")
    check, known = module.target(), sorted((CORPUS / name).iterdir())
    assert known
    for data in [*module.seeds(), *map(Path.read_bytes, known)]:
        check(data)


def test_choices_depend_only_on_the_bytes():
    data = random.Random(0).randbytes(40)
    chances = map(Choices, (data, data, data[::-1]))
    first, again, other = ([chance.choice("abcdefgh") for _ in range(20)] for chance in chances)
    assert first == again != other
    assert Choices(b"").sample(range(10), 10) == Choices(b"").sample(range(10), 10)
