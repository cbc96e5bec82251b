"""Times per token without an engine: the arithmetic on made-up times, who speaks when, and what prompts are cut to."""

import random
from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerFast

from nvium_core.evaluation.plain_speed import Generate, beside_dense, early_share, measure
from nvium_core.evaluation.turns import Questions, questions
from nvium_core.training.baselines.decoding import Generated
from tests.byte_model import END_OF_TEXT, byte_tokenizer, token_ids


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END_OF_TEXT)


def taking(milliseconds: float, *, num_tokens: int = 4, exit_layer: int = 4) -> Generated:
    """An answer of so many milliseconds per token."""
    return Generated([0] * num_tokens, [exit_layer] * num_tokens, milliseconds * num_tokens / 1000)


def test_the_speed_up_is_of_medians_over_pairs_on_average_over_categories() -> None:
    ours = {"qa": [taking(2), taking(2, num_tokens=9), taking(2)], "math": [taking(4)]}
    dense = {"qa": [taking(3), taking(900), taking(2.5)], "math": [taking(10, num_tokens=1)]}
    figures = beside_dense(ours, dense)
    assert figures["speed_up_percent"] == pytest.approx(100 * ((1.5 + 2.5) / 2 - 1))
    assert figures["milliseconds"]["qa"] == {"ours": pytest.approx(2), "dense": pytest.approx(3)}
    assert figures["speed_up_over"] == "dense"


def test_early_tokens_are_those_said_before_the_last_layer() -> None:
    answers = {"qa": [taking(1, num_tokens=3)], "math": [taking(1, num_tokens=1, exit_layer=2)]}
    assert early_share(answers, num_layers=4) == 1 / 4


def test_all_take_turns_at_every_prompt_with_the_same_draws_and_every_other_time_in_reverse() -> None:
    said = list[tuple[str, list[int], int, float]]()

    def speaker(name: str) -> Generate:
        def generate(prompt_ids: Sequence[int], max_tokens: int, *, rng: random.Random) -> Generated:
            said.append((name, list(prompt_ids), max_tokens, rng.random()))
            return taking(1)

        return generate

    asked = Questions(prompts={"qa": [[1], [2]], "math": [[3]]}, max_new_tokens=5, prompts_cut=0)
    answers = measure({name: speaker(name) for name in "abc"}, asked, trials=2)
    counted = said[3:]
    assert "".join(name for name, *_ in said) == "abc" + "abccba" * 3
    assert [prompt for _, prompt, *_ in counted[::3]] == [[1], [2], [3]] * 2
    assert all(len({(*prompt, draw) for _, prompt, _, draw in counted[n : n + 3]}) == 1 for n in range(0, 18, 3))
    assert len({draw for *_, draw in counted}) == 6
    assert {num_tokens for _, _, num_tokens, _ in said} == {5}
    assert {name: [len(of_category) for of_category in answers[name].values()] for name in answers} == {
        name: [4, 2] for name in "abc"
    }


def test_answers_take_at_most_half_of_the_context_and_prompts_lose_their_beginning(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = questions(tokenizer, {"qa": ["hen", "x" * 10 + "y" * 9, ""]}, context=16)
    assert asked.prompts == {"qa": [token_ids("hen"), token_ids("y" * 8), [0]]}
    assert (asked.max_new_tokens, asked.prompts_cut) == (8, 1)
    assert questions(tokenizer, {}, context=4096).max_new_tokens == 128


def test_the_papers_prompts_lose_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = questions(tokenizer, {"qa": ["hen", "y" * 9 + "x" * 10]}, context=18, cut_end=True)
    assert asked.prompts == {"qa": [token_ids("hen"), token_ids("y" * 9)]}
    assert asked.prompts_cut == 1
