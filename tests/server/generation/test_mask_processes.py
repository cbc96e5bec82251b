"""On which core a mask process runs."""

import os
from multiprocessing import Pipe
from weakref import WeakSet

from server.generation import constraints
from server.generation.compiler import Compiled
from server.generation.constraints import TOKENS_APART, MaskClient
from server.generation.grammar_process import ANY_CORE, COMMAND, CORES, GOES_ON, REPLY, MaskServer


def test_the_mask_process_of_a_lone_choice_shares_the_engine_s_core_unless_it_was_late(monkeypatch):
    monkeypatch.setattr(constraints, "current_core", lambda: 3)
    monkeypatch.setattr(MaskClient, "clients", WeakSet())
    ours, theirs = Pipe()
    client = MaskClient(ours)

    def core_of_token(*, is_late=False):
        client.send(0, 65)
        assert not is_late or client.reply(0, 0) is None
        theirs.send_bytes(REPLY.pack(0, GOES_ON))
        assert client.reply(0, 1) is not None
        return COMMAND.unpack(theirs.recv_bytes())[3]

    assert [core_of_token(), core_of_token(is_late=True)] == [3, 3]
    assert [core_of_token() for _ in range(TOKENS_APART + 1)] == [ANY_CORE] * TOKENS_APART + [3]
    other = MaskClient(theirs)
    assert core_of_token() == ANY_CORE
    del other
    client._num_choices = 3
    assert core_of_token() == ANY_CORE


def test_a_mask_process_moves_to_a_core_and_back(monkeypatch):
    moves = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: moves.append(cores), raising=False)
    masks = MaskServer(Pipe()[0], Compiled(None, []))
    for core in (2, 2, ANY_CORE):
        masks._move_to(core)
    assert moves == [{2}, CORES]
