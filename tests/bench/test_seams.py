"""The stopwatch on the engine's parts."""

import time
from functools import partial

import pytest

from nvium_core import Engine, SamplingParams
from nvium_core.bench.seams import KERNELS, PARTS, Stopwatch, watched
from nvium_core.engine.device import native
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.runner import Runner
from tests.bench.tiny import tiny_subject


def test_a_part_is_not_charged_for_what_it_calls() -> None:
    watch = Stopwatch()
    inner = watch.around("inner", lambda: time.sleep(0.05))
    outer = watch.around("outer", lambda: [inner(), inner()])
    started = time.perf_counter()
    outer()
    whole = time.perf_counter() - started
    assert watch.calls == {"outer": 1, "inner": 2}
    assert 0.1 <= watch.seconds["inner"] <= whole
    assert watch.seconds["outer"] + watch.seconds["inner"] <= whole
    assert watch.seconds["outer"] <= whole - 0.1


def test_a_part_that_fails_gives_the_clock_back() -> None:
    watch = Stopwatch()
    failing = watch.around("failing", lambda: 1 / 0)

    def careful() -> None:
        try:
            failing()
        except ZeroDivisionError:
            time.sleep(0.05)

    watch.around("careful", careful)()
    assert watch.seconds["careful"] >= 0.05


@pytest.mark.parametrize("is_native", [True, False])
def test_every_part_of_an_engine_is_seen_and_nothing_is_changed(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(native, "knows", lambda *_: False)
    subject = tiny_subject()
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    plain = subject.engine().generate([subject.prompt], params)
    engine = subject.engine()
    before = {id(module): dict(vars(module)) for module in subject.model.modules()}
    with watched(engine) as watch:
        assert engine.generate([subject.prompt], params) == plain
    in_native_calls = {"attention", "draw"} if is_native else set()
    assert {part for part in PARTS if watch.seconds[part] > 0} >= set(PARTS) - in_native_calls
    assert set(KERNELS) < set(PARTS)
    assert before == {id(module): dict(vars(module)) for module in subject.model.modules()}
    assert "step" not in vars(engine)


def test_an_engine_is_its_own_again_after_a_failure() -> None:
    engine = tiny_subject().engine()
    try:
        with watched(engine):
            engine.add("a", [10**9])
    except ValueError:
        pass
    assert "step" not in vars(engine)


def test_what_is_replayed_on_a_gpu_counts_as_layers() -> None:
    subject = tiny_subject()
    engine = Engine(subject.model, make_runner=partial(Runner, make_backend=GraphsBackend))
    backend = engine.runner.backend
    assert isinstance(backend, GraphsBackend)
    with watched(engine) as watch:
        backend.replay.run("nothing", lambda: None)
        assert watch.calls == {"layers": 1}
    assert "run" not in vars(backend.replay)
