"""When mask processes start, on which core they run, and what replaces a fork server that stands still."""

import os
import resource
import signal
from multiprocessing import Pipe
from weakref import WeakSet

from nvium_core.text import sandbox
from nvium_core.text.sandbox import HELPERS, Helper, size_of
from server.structured_outputs import constraints
from server.structured_outputs.constraints import TOKENS_APART, Constraints, MaskClient
from server.structured_outputs.grammar_process import (
    ANY_CORE,
    COMMAND,
    CORES,
    GOES_ON,
    MEMORY_BYTES,
    REPLY,
    MaskServer,
)
from server.structured_outputs.grammars import Regex
from tests.byte_model import token_ids
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


def test_a_fork_server_that_stands_still_is_replaced(monkeypatch):
    model, engine, _ = loaded("bytes")
    constraints = Constraints(model.tokenizer, engine.limits.end_token_ids)
    constraints.compile("f", Regex("a"))
    stopped = constraints._fork_server
    assert stopped is not None
    assert stopped._pid is not None
    os.kill(stopped._pid, signal.SIGSTOP)
    monkeypatch.setattr(sandbox, "PATIENCE_SECONDS", 3.0)
    constraint = constraints.compile("f", Regex("b")).constraint
    assert constraint is not None
    assert allows(constraint, *token_ids("b"))
    assert constraints._fork_server is not stopped


def test_the_processes_of_a_grammar_have_limited_memory():
    model, engine, _ = loaded("bytes")
    constraints = Constraints(model.tokenizer, engine.limits.end_token_ids)
    constraints.compile("f", Regex("m"))
    helpers = [constraints._fork_server, *(process.helper for process in constraints._cached.values())]
    for helper in helpers:
        assert helper is not None and helper._pid is not None
        limit, _ = resource.prlimit(helper._pid, resource.RLIMIT_AS)
        assert 0 < limit < size_of(str(helper._pid)) + 2 * MEMORY_BYTES


def test_a_constraint_starts_no_process_before_its_first_mask():
    constraint = compiled(Regex("c"))
    choices = [constraint.fork() for _ in range(3)]
    before = len(HELPERS)
    assert all(allows(choice, *token_ids("c")) for choice in choices)
    assert len(HELPERS) == before + 1
