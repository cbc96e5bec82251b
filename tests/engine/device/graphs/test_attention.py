"""The check of attention kernels at the start refuses faulty ones."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from nvium_core.engine.device.attention import RunAttention, kernels_agree, ragged, works
from nvium_core.engine.device.paged_cache import PagedCache, Read, positions
from nvium_core.model.config import NviumConfig
from nvium_core.model.plan import LayerCall
from tests.engine.device.graphs.engines import gathered
from tests.random_models import small_config

SMALL = small_config([2], width=32)
WINDOWED = small_config([2], width=32, windows=[None, 20], attention_scale=0.2)
"""Heads of size 8."""


def empty_cache(num_pages: int = 3, config: NviumConfig = SMALL, dtype: torch.dtype = torch.float32) -> PagedCache:
    return PagedCache(config, num_pages=num_pages, page_size=8, like=torch.zeros(1, dtype=dtype))


def of_runs(of_rows: Callable[[PagedCache, Tensor, Tensor], Read]) -> RunAttention:
    def kernel(cache, runs):
        table_RW = cache.tables(runs).repeat([len(run.rows) for run in runs], 0)
        return of_rows(cache, torch.from_numpy(table_RW), torch.from_numpy(positions(runs)))

    return kernel


@pytest.mark.parametrize("config", [SMALL, WINDOWED])
@pytest.mark.parametrize("num_pages", [1, 2, 3, 40])
def test_the_kernel_agrees_with_gathering(num_pages, config):
    assert kernels_agree(empty_cache(num_pages, config), config, gathered, of_runs(gathered))


def faulty_inputs(
    fault: str | None, cache: PagedCache, table_RW: Tensor, position_R: Tensor
) -> tuple[PagedCache, Tensor, Tensor]:
    table_RW, width, last_R = table_RW.clone(), table_RW.shape[1], position_R // cache.page_size
    if fault == "table width mistaken":
        table_RW = table_RW.flatten()[: len(table_RW)][:, None].repeat(1, width)
    if fault == "page 2":
        table_RW[:, 1:2] = cache.null_page
    if fault == "last page":
        table_RW[torch.arange(len(table_RW)), last_R] = cache.null_page
    if fault == "split 2 of 4":
        table_RW[:, width // 4 : width // 2] = cache.null_page
    if fault == "newest key":
        position_R = (position_R - 1).clamp(min=0)
    if fault == "no causal mask":
        position_R = torch.full_like(position_R, int(position_R.max()))
    return cache, table_RW, position_R


def faulty(fault: str | None, cache: PagedCache, table_RW: Tensor, position_R: Tensor) -> Read:
    read = gathered(*faulty_inputs(fault, cache, table_RW, position_R))

    def attend(q_RHP: Tensor, call: LayerCall) -> Tensor:
        if fault == "own scale forgotten":
            call = call._replace(scale=None)
        if call.window is not None:
            more = {"window too small": -1, "window too large": 1}.get(fault or "", 0)
            call = call._replace(window=call.window + more)
        out_RHP = read(q_RHP * (q_RHP.shape[-1] ** 0.5 if fault == "scale forgotten" else 1), call)
        if fault == "rows unwritten":
            out_RHP[1:] = 0
        return out_RHP

    return attend


FAULTS = ["rows unwritten", "table width mistaken", "scale forgotten", "newest key", "page 2", "last page"]
FAULTS += ["split 2 of 4"]
FAULTS_OF_WINDOWS = ["own scale forgotten", "window too small", "window too large"]
CASES = [(SMALL, fault) for fault in (None, *FAULTS)]
CASES += [(WINDOWED, fault) for fault in (None, *FAULTS, *FAULTS_OF_WINDOWS)]


@pytest.mark.parametrize(("config", "fault"), CASES)
def test_a_faulty_kernel_is_refused(config, fault):
    cache = empty_cache(40, config, torch.bfloat16)
    assert kernels_agree(cache, config, partial(faulty, fault), ragged) == (fault is None)


@pytest.mark.parametrize(("config", "fault"), [*CASES, (SMALL, "no causal mask")])
def test_a_faulty_kernel_is_refused_for_long_runs(config, fault):
    cache = empty_cache(40, config, torch.bfloat16)
    assert kernels_agree(cache, config, gathered, of_runs(partial(faulty, fault))) == (fault is None)


def test_a_missing_kernel_is_logged_in_one_line(caplog):
    """Errors of compilers have many lines."""

    def fail() -> NoReturn:
        raise RuntimeError("no such operator\n" * 60)

    assert not works("attention in Triton", fail)
    (record,) = caplog.records
    assert record.getMessage().startswith("attention in Triton is not available: ")
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 300
