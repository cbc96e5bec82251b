"""Subjects too small for meaningful timings."""

from nvium_core.bench.harness import Subject
from tests.random_models import random_model


def tiny_subject(context: int = 256) -> Subject:
    return Subject("tiny", random_model([1, 2, 4], vocab_size=61, context=context), [1, 2, 3, 4, 5])
