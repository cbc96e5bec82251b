"""When mask processes start, on which core they run, and what replaces a fork server that stands still."""

import os
import resource
import signal
from contextlib import suppress
from multiprocessing import Pipe
from weakref import WeakSet

import pytest

from nvium_core.text.sandbox import HELPERS, Helper, size_of
from server.structured_outputs import constraints
from server.structured_outputs.constraints import TOKENS_APART, Constraints, MaskClient
from server.structured_outputs.grammar_process import ANY_CORE, COMMAND, CORES, GOES_ON, MEMORY_BYTES, REPLY, MaskServer
from server.structured_outputs.grammars import Regex
from tests.byte_model import NAME, token_ids
from tests.server.forked_server import forked_server
from tests.server.server_process import descendants
from tests.server.structured_outputs.test_constraints import allows, compiled, loaded


def test_the_mask_process_of_a_lone_choice_shares_the_engine_s_core_unless_it_was_late(monkeypatch):
    monkeypatch.setattr(constraints, "current_core", lambda: 3)
    monkeypatch.setattr(MaskClient, "clients", WeakSet())
    ours, theirs = Pipe()
    theirs.send_bytes(b"1")  # the id that a process sends first
    client = MaskClient(lambda: Helper(ours))

    def core_of_token(*, is_late=False):
        client.send(0, 65)
        assert not is_late or client.reply(0, 0) is None
        theirs.send_bytes(REPLY.pack(0, GOES_ON))
        assert client.reply(0, 1) is not None
        return COMMAND.unpack(theirs.recv_bytes())[3]

    assert [core_of_token(), core_of_token(is_late=True)] == [3, 3]
    assert [core_of_token() for _ in range(TOKENS_APART + 1)] == [ANY_CORE] * TOKENS_APART + [3]
    other = MaskClient(lambda: Helper(theirs))
    assert core_of_token() == ANY_CORE
    del other
    client._num_choices = 3
    assert core_of_token() == ANY_CORE


def test_a_mask_process_moves_to_a_core_and_back(monkeypatch):
    moves = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moves.append(cores), raising=False)
    masks = MaskServer(Pipe()[0], None)
    for core in (2, 2, ANY_CORE):
        masks._move_to(core)
    assert moves == [{2}, CORES]


REQUEST_SECONDS = 15
"""Less than the time that a helper has to answer."""

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "seed": 1}


@pytest.mark.parametrize("other", ["a", "b"])
def test_stopped_helpers_are_replaced_and_reaped_within_a_request(model_folder, tmp_path, other):
    """Whether the next request has the same grammar or another."""
    with forked_server(model_folder, tmp_path / "log") as server:

        def status(pattern: str) -> int:
            body = {**CHAT, "structured_outputs": {"regex": pattern}}
            return server.http.post("/v1/chat/completions", json=body, timeout=REQUEST_SECONDS).status_code

        assert status("a") == 200
        stopped = set(descendants(server.process.pid))
        assert len(stopped) >= 2
        for pid in stopped:
            with suppress(ProcessLookupError):  # the mask process, whose request has ended
                os.kill(pid, signal.SIGSTOP)
        assert status(other) == 200
        assert not stopped & set(descendants(server.process.pid))


def test_the_processes_of_a_grammar_have_limited_memory():
    model, engine, _ = loaded("bytes")
    constraints = Constraints(model.tokenizer, engine.limits.end_token_ids)
    constraints.compile("f", Regex("m"))
    helpers = [constraints._fork_server, *(process.helper for process in constraints._cached.values())]
    for helper in helpers:
        assert helper is not None and helper.pid is not None
        limit, _ = resource.prlimit(helper.pid, resource.RLIMIT_AS)
        assert 0 < limit < size_of(str(helper.pid)) + 2 * MEMORY_BYTES


def test_a_constraint_starts_no_process_before_its_first_mask():
    constraint = compiled(Regex("c"))
    choices = [constraint.fork() for _ in range(3)]
    before = len(HELPERS)
    assert all(allows(choice, *token_ids("c")) for choice in choices)
    assert len(HELPERS) == before + 1
