import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.replicas.routing import (
    BLOCK_CHARACTERS,
    MAX_AHEAD,
    MAX_BLOCKS,
    SEQUENCES,
    BySequences,
    PrefixHolders,
    preferred,
    prefix_digests,
)

TEXT = "".join(chr(ord("a") + number % 26) for number in range(3 * BLOCK_CHARACTERS))
LOADS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 20), min_size=1)


def of_prompt(prompt: object) -> list[bytes]:
    return prefix_digests(json.dumps({"prompt": prompt}).encode())


@given(st.text(max_size=600), st.text(max_size=300), st.text(max_size=300))
def test_prompts_share_the_digests_of_their_common_blocks(common: str, one: str, other: str) -> None:
    first, second = of_prompt(common + one), of_prompt(common + other)
    num_shared = len([a for a, b in zip(first, second, strict=False) if a == b])
    assert num_shared >= len(common) // BLOCK_CHARACTERS
    assert len(first) == len(common + one) // BLOCK_CHARACTERS
    assert first[:num_shared] == second[:num_shared]
    assert not set(first[num_shared:]) & set(second[num_shared:])


def test_a_prompt_in_a_list_has_the_digests_of_the_prompt_alone() -> None:
    assert of_prompt([TEXT, "other"]) == of_prompt(TEXT)
    assert of_prompt([[1] * 500, [2]]) == of_prompt([1] * 500)
    assert of_prompt([1] * 500) != of_prompt([2] * 500)


def test_chats_with_the_same_tools_and_system_prompt_share_digests() -> None:
    def of_chat(question: str, tools: object = None) -> list[bytes]:
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
        return prefix_digests(json.dumps({"messages": messages, "tools": tools}).encode())

    one, other = of_chat("x" * 400), of_chat("y" * 400)
    assert one[:3] == other[:3]
    assert one[-1] != other[-1]
    assert of_chat("x", tools=[1])[0] != one[0]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000, b'{"prompt": {}}', b'{"prompt": []}', b"{}"]
)
def test_a_body_without_a_prompt_has_no_digests(body: bytes) -> None:
    assert prefix_digests(body) == []


def test_the_number_of_digests_is_bounded() -> None:
    assert len(of_prompt("x" * 1_000_000)) == MAX_BLOCKS
    assert len(of_prompt([7] * 100_000)) == MAX_BLOCKS


@given(LOADS)
def test_a_request_with_an_unknown_prefix_goes_to_the_least_loaded_replica(loads: dict[str, int]) -> None:
    assert loads[preferred([b"1"], {}, loads)] == min(loads.values())
    assert loads[preferred([], {b"1": "a"}, loads)] == min(loads.values())


@given(LOADS, st.dictionaries(st.sampled_from([b"1", b"2", b"3"]), st.sampled_from("abcdefg")))
def test_the_holder_of_the_longest_prefix_is_chosen_unless_it_is_overloaded(
    loads: dict[str, int], holders: dict[bytes, str]
) -> None:
    chosen = preferred([b"1", b"2", b"3"], holders, loads)
    idle = [name for name, load in loads.items() if load <= min(loads.values()) + MAX_AHEAD]
    known = [holders[digest] for digest in (b"3", b"2", b"1") if holders.get(digest) in idle]
    assert chosen == known[0] if known else loads[chosen] == min(loads.values())


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    assert preferred([b"1"], {b"1": "gone"}, {"a": 3}) == "a"


@given(st.lists(st.tuples(st.binary(max_size=1), st.sampled_from("ab"))), st.integers(1, 5))
def test_only_the_latest_digests_are_kept(noted: list[tuple[bytes, str]], capacity: int) -> None:
    holders = PrefixHolders(capacity)
    for digest, replica in noted:
        holders.note([digest], replica)
    latest: dict[bytes, str] = {}
    for digest, replica in reversed(noted):
        if len(latest) < capacity:
            latest.setdefault(digest, replica)
    assert dict(holders.by_digest) == latest


@pytest.mark.parametrize(("counts", "wanted"), [({}, 0), ({"a": 16}, 1), ({"a": 17}, 2), ({"a": 1, "b": 40}, 3)])
def test_the_number_of_replicas_follows_the_number_of_sequences(counts: dict[str, float], wanted: int) -> None:
    context = SimpleNamespace(aggregated_metrics={SEQUENCES: counts} if counts else None)
    assert BySequences(sequences_per_replica=16)(context) == (wanted, {})
