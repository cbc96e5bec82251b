"""The compiled decisions equal the reference, on a CPU in C++ and on a GPU in Triton."""

import importlib
import math
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_core.engine.device.decide import EMITTED, EXIT_TAKEN, GOES_ON, LOG_CONTINUE, LOG_P, decide
from nvium_core.engine.device.graphs import capture
from nvium_core.engine.device.graphs.capture import Compiler
from nvium_core.engine.device.inputs import Inputs, InputViews, Variant
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.sampling_params import Draw, ExitRule
from tests.random_models import random_model

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # PyTorch's own use
]
GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
anywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])

VOCAB_SIZE = 300
"""More than one chunk of weights."""

PLAIN = Variant(0, has_original=True)
RANKED = PLAIN._replace(is_ranked=True)
MASKED = RANKED._replace(num_changes=32, has_masks=True)
GREEDY = PLAIN._replace(mixes=True)
ALL = MASKED._replace(mixes=True)


def kernels() -> Any:
    return importlib.import_module("torch._inductor.metrics")  # takes seconds


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    kernels().reset()
    yield
    torch.compiler.reset()


class Case:
    """A model with states, and inputs of front rows of every kind that a variant serves."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.model = random_model([1, 2], dtype=dtype, vocab_size=VOCAB_SIZE).to(device)
        self.cache = PagedCache(self.model.config, num_pages=4, page_size=16, like=self.model.lm_head.weight)
        self.generator = torch.Generator().manual_seed(0)
        states = self.cache.states_NSD
        states.copy_(torch.randn(states.shape, generator=self.generator, dtype=torch.float64))
        self.inputs = Inputs(self.cache, self.model.config)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def some(self, top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=self.generator)

    def views(self, variant: Variant, blocks: range) -> InputViews:
        views = self.inputs.views(torch.full((self.inputs.num_words(variant),), 2**40), variant)
        rows, count, is_last = views.rows, variant.num_rows, blocks.stop == self.model.config.num_exits
        served = [ExitRule.EXITS, ExitRule.THRESHOLD, *[ExitRule.ORIGINAL] * is_last]
        served += [ExitRule.ARGMAX] * variant.mixes + [ExitRule.MIXTURE] * (variant.mixes and is_last)
        draws = [self.draw(served[number % len(served)], variant) for number in range(count)]
        for name in Draw._fields:
            rows[name].copy_(torch.tensor([getattr(draw, name) for draw in draws]))
        rows["front_slot"].copy_(torch.arange(count))
        rows["first"].copy_(self.some(2, count) * blocks.start)
        rows["log_reached"].copy_(-self.random(count))
        rows["uniform"].copy_(self.random(count, 2, self.model.config.num_exits))
        views.masks_RM.copy_(self.some(2**62, *views.masks_RM.shape))
        views.used.fill_(variant.num_changes // 2)  # the other entries are of an earlier call
        for number in range(variant.num_changes // 2):
            views.entries_C5[number, 0], views.entries_C5[number, 1] = number % count, 7 * number
            views.values_C5[number, 2:].copy_(self.random(3) + 0.5)
        return InputViews(*(self.moved(part) for part in views))

    def moved(self, part: Any) -> Any:
        device = self.model.device
        return {name: x.to(device) for name, x in part.items()} if isinstance(part, dict) else part.to(device)

    def draw(self, rule: ExitRule, variant: Variant) -> Draw:
        heat = 0.0 if rule is ExitRule.ORIGINAL and self.random(1) < 0.3 else 0.7
        ranks = (int(self.some(40, 1)), float(self.random(1))) if variant.is_ranked else (0, 1.0)
        return Draw(rule, 0.5, heat, math.log(0.01) if self.random(1) < 0.5 else -math.inf, *ranks)


def check(case: Case, variant: Variant, blocks: range, sizes: tuple[int, ...]) -> int:
    """Compare for these numbers of rows. Return the number of kernels of all that was compiled."""
    compiler, model, states_NSD = Compiler(math.inf), case.model, case.cache.states_NSD
    near = {"rtol": 1e-5, "atol": 1e-5} if model.dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for number, size in enumerate(sizes):
        asked = variant._replace(num_rows=size)
        given = model, states_NSD, blocks, case.views(asked, blocks), asked
        with torch.inference_mode():
            found, routed = (compiler.decide(*given, emits=emits) for emits in (True, False))
            expected = decide(*given)
        assert not compiler.failed
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert num_graphs == 2 * (1 + (number > 0 and sizes[0] == 1))
        assert torch.equal(found[: EMITTED + 1], expected[: EMITTED + 1])
        torch.testing.assert_close(found, expected, **near)
        assert (routed[EMITTED] == GOES_ON).all()
        assert torch.equal(routed[KNOWN_BEFORE], found[KNOWN_BEFORE])
    return kernels().generated_kernel_count


MANY = (24, 7, 2)
KNOWN_BEFORE = [EXIT_TAKEN, LOG_P, LOG_CONTINUE]
VARIANTS = {"plain": PLAIN, "ranked": RANKED, "masked": MASKED, "greedy": GREEDY, "all": ALL}
MOST = {"plain": 24, "ranked": 34, "masked": 36, "greedy": 31, "all": 48}
"""Kernels of a whole pass, beside products and sorts. These numbers may only fall."""


@anywhere
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "all")) for each in VARIANTS])
def test_a_whole_pass_decides_in_few_kernels_as_the_reference_does(name, device):
    num_kernels = check(Case(torch.float64, device), VARIANTS[name], range(2), MANY)
    assert 0 < num_kernels <= MOST[name] or device == "cuda"


@anywhere
@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "sizes"), [(range(2), (1, *MANY)), (range(1), MANY)], ids=["whole", "first"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_pass_decides_as_the_reference_does_in_float32(name, blocks, sizes, device):
    check(Case(torch.float32, device), VARIANTS[name], blocks, sizes)


def test_what_does_not_compile_says_so_once_and_runs_as_it_is(monkeypatch, caplog):
    def fails(*_: Any) -> Any:
        calls.append(1)
        raise RuntimeError("no such compiler")

    calls = list[int]()
    monkeypatch.setattr(capture, "compile_once", lambda function: fails)
    case, compiler = Case(torch.float64), Compiler(math.inf)
    for size in (2, 2, 1):
        asked = PLAIN._replace(num_rows=size)
        given = case.model, case.cache.states_NSD, range(2), case.views(asked, range(2)), asked
        assert torch.equal(compiler.decide(*given, emits=True), decide(*given))
    assert len(calls) == 4
    (record,) = caplog.records
    assert record.getMessage() == "decisions that do not compile run in PyTorch's operators: no such compiler"


def test_nothing_is_compiled_once_the_time_is_over():
    case, compiler = Case(torch.float64), Compiler(-math.inf)
    asked = PLAIN._replace(num_rows=2)
    given = case.model, case.cache.states_NSD, range(2), case.views(asked, range(2)), asked
    assert torch.equal(compiler.decide(*given, emits=True), decide(*given))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
