from dataclasses import dataclass, field, replace

import pytest

from nvium_core import ConstraintLimit, Engine, EngineConfig, FailureEvent, SamplingParams, TokenEvent, TooCostly
from nvium_core.engine.device.runner import Runner
from tests.engine.automaton import Automaton, Rule, packed
from tests.engine.driving import events_of
from tests.random_models import random_model

VOCAB_SIZE = 17
END_OF_TEXT = 0
MODEL = random_model([1, 2, 4], seed=1, vocab_size=VOCAB_SIZE, context=64)


@dataclass
class Script:
    """Allows a set of tokens per position, then is over. Records its calls and tokens."""

    turns: list[set[int]]
    ends: bool = True
    calls: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.ends and len(self.tokens) == len(self.turns)

    def is_ready(self, seconds: float) -> bool:
        return True

    def allowed(self) -> bytes:
        self.calls.append("allowed")
        return packed(self.turns[len(self.tokens)], 4)

    def advance(self, token_id: int) -> None:
        self.calls.append("advance")
        assert token_id in self.turns[len(self.tokens)]
        self.tokens.append(token_id)

    def fork(self) -> "Script":
        self.calls.append("fork")
        return type(self)(self.turns, self.ends, self.calls, list(self.tokens))


def breaking(where: str, error: BaseException | None = None) -> Script:
    """Create a script that raises in one of its methods; in `allowed` after the first token."""

    def method(script: Script, *given: object) -> bytes:
        if where == "allowed" and not script.tokens:
            return Script.allowed(script)
        raise error or RuntimeError("injected fault")

    kind = type("Breaking", (Script,), {where: property(method) if where == "is_over" else method})
    return kind([{1, 2, 3}] * 9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["exits", "mixture"])
def test_each_token_is_allowed_and_its_mask_is_computed_once(temperature, sampling):
    script = Script([{3, 5}, {16}, {1, 2, 8}, {4}])
    params = SamplingParams(seed=2, temperature=temperature, sampling=sampling, constraint=script)
    (completion,) = Engine(MODEL).generate([[1, 2]], params)
    assert all(token in turn for token, turn in zip(completion.token_ids, script.turns, strict=True))
    assert script.calls == ["fork"] + 4 * ["allowed", "advance"]
    assert completion.finish_reason == "stop"


def test_the_prototype_is_not_advanced_and_each_choice_has_its_own_state():
    script = Script([{3, 5, 9}, {2, 4, 6}, {1}])
    completions = Engine(MODEL).generate([[1, 2], [3]], SamplingParams(seed=0, n=3, best_of=4, constraint=script))
    assert script.tokens == []
    assert script.calls.count("fork") == 8
    assert len({tuple(completion.token_ids) for completion in completions}) > 1
    assert {completion.finish_reason for completion in completions} == {"stop"}


@pytest.mark.parametrize(
    ("turns", "wishes", "reason"),
    [
        ([5, END_OF_TEXT], {"ignore_eos": True}, "stop"),
        ([5, 7], {"ignore_eos": True}, "stop"),
        ([5, 9, 6], {"stop_token_ids": (9,)}, "stop"),
        ([5, 5], {"max_tokens": 2}, "stop"),
        ([5, 5, 5], {"max_tokens": 2}, "length"),
    ],
)
def test_output_ends_with_its_constraint_a_stop_token_or_max_tokens(turns, wishes, reason):
    params = SamplingParams(seed=0, constraint=Script([{token} for token in turns]), **wishes)
    (completion,) = Engine(MODEL).generate([[1]], params)
    assert (completion.token_ids, completion.finish_reason) == (turns[:2], reason)


def test_an_event_distinguishes_a_stop_token_from_the_last_token_of_constrained_output():
    engine = Engine(MODEL)
    engine.add("satisfied", [1], SamplingParams(seed=0, constraint=Script([{5}, {6}])))
    engine.add("stopped", [1], SamplingParams(seed=0, constraint=Script([{5}, {END_OF_TEXT}])))
    told = [event for event in events_of(engine) if isinstance(event, TokenEvent)]
    stops = {name: [event.is_stop for event in told if event.request_id == name] for name in ("satisfied", "stopped")}
    assert stops == {"satisfied": [False, False], "stopped": [False, True]}


def company() -> dict[str, SamplingParams]:
    """Requests that share Steps with the failing one."""
    free = SamplingParams(max_tokens=8, seed=4, ignore_eos=True)
    constrained = replace(free, constraint=Automaton(Rule(seed=3, vocab_size=VOCAB_SIZE, length=7)))
    return {"free": free, "greedy": replace(free, temperature=0), "constrained": constrained}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", ["exits", "mixture"])
@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Script([{5}, set()], ends=False), "allows no token"),
        (Script([{5}, {VOCAB_SIZE, VOCAB_SIZE + 3}], ends=False), "allows no token"),
        *((breaking(where), "failed") for where in ("fork", "allowed", "advance", "is_over")),
    ],
)
def test_a_failing_constraint_ends_its_own_sequence_and_no_step_is_repeated(
    constraint, message, temperature, sampling, monkeypatch
):
    expected = {name: Engine(MODEL).generate([[1, 2]], params)[0] for name, params in company().items()}
    monkeypatch.setattr(Runner, "_run_alone", lambda engine, step: engine.runner.run(step))
    engine = Engine(MODEL)
    wish = SamplingParams(temperature=temperature, sampling=sampling, constraint=constraint, seed=0)
    engine.add("guilty", [1, 2], wish)
    for name, params in company().items():
        engine.add(name, [1, 2], params)
    told: dict[str, list[int]] = {name: [] for name in expected}
    failures = []
    for event in events_of(engine):
        if isinstance(event, FailureEvent):
            failures.append((event.request_id, message in str(event.error)))
        elif isinstance(event, TokenEvent) and event.request_id in told:
            told[event.request_id].append(event.token_id)
    assert failures == [("guilty", True)]
    assert told == {name: completion.token_ids for name, completion in expected.items()}


@pytest.mark.parametrize("where", ["fork", "allowed", "is_over"])
def test_the_error_of_a_constraint_is_its_first(where):
    engine = Engine(MODEL)
    engine.add("x", [1, 2], SamplingParams(seed=0, constraint=breaking(where, TooCostly("too complex"))))
    failure = list(events_of(engine))[-1]
    assert isinstance(failure, FailureEvent) and isinstance(failure.error, ConstraintLimit)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["fork", "allowed", "advance", "is_over"])
def test_running_out_of_memory_and_an_interrupt_are_no_failures_of_a_constraint(where, error):
    with pytest.raises(error):
        Engine(MODEL).generate([[1, 2]], SamplingParams(seed=0, constraint=breaking(where, error())))


def test_a_prompt_stays_cached_after_its_constraint_has_failed():
    engine = Engine(MODEL, EngineConfig(page_size=4))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add("x", prompt, SamplingParams(sampling="mixture", constraint=Script([{5}, set()], ends=False)))
    assert [type(event) for event in events_of(engine)] == [TokenEvent, FailureEvent]
    engine.generate([prompt], SamplingParams(max_tokens=1))
    assert engine.pool.num_rows_found == 8


class Late(Script):
    """Is ready at the fifth call of `is_ready` after each token."""

    def is_ready(self, seconds: float) -> bool:
        self.calls.append("is ready?")
        return self.calls[-5:] == ["is ready?"] * 5


def test_a_slow_constraint_is_not_asked_before_its_sequence_has_a_seat():
    engine = Engine(MODEL, EngineConfig(max_sequences=1))
    engine.add("seated", [1], SamplingParams(max_tokens=4, seed=0, ignore_eos=True))
    waiting = Late([{3}, {4}])
    engine.add("waiting", [1], SamplingParams(seed=0, constraint=waiting))
    asked = [(event.request_id, "is ready?" in waiting.calls) for event in events_of(engine)]
    assert asked == [("seated", False)] * 4 + [("waiting", True)] * 2


@pytest.mark.parametrize("schedule", ["sweep", "whole"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_slow_constraint_delays_no_other_sequence_and_changes_no_token(schedule, logprobs):
    turns = [{3, 5, 9}, {2, 4, 6}, {1, 7}, {8, 9}]
    told: dict[type, list[TokenEvent]] = {}
    for kind in (Script, Late):
        engine = Engine(MODEL, EngineConfig(schedule=schedule))
        engine.add("constrained", [1, 2], SamplingParams(seed=0, logprobs=logprobs, constraint=kind(turns)))
        engine.add("free", [1, 2], SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
        events = [event for event in events_of(engine) if isinstance(event, TokenEvent)]
        told[kind] = [event for event in events if event.request_id == "constrained"]
    assert [event.token_id for event in told[Script]] == [event.token_id for event in told[Late]]
    assert [event.finish_reason for event in told[Late]] == [None, None, None, "stop"]
    assert [event.score is None for event in told[Late]] == [logprobs is None] * 4
    assert events[-1].request_id == "constrained"
    assert [event.request_id for event in events].index("constrained") > 0
