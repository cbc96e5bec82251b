"""On which core a mask process runs."""

import os
from multiprocessing import Pipe
from weakref import WeakSet

import pytest

from server.generation import constraints
from server.generation.compiler import Compiled
from server.generation.constraints import TOKENS_APART, MaskClient
from server.generation.grammar_process import ANY_CORE, COMMAND, GOES_ON, REPLY, MaskServer


def test_the_mask_process_of_a_lone_choice_shares_the_engine_s_core_unless_it_was_late(monkeypatch):
    monkeypatch.setattr(constraints, "current_core", lambda: 3)
    monkeypatch.setattr(MaskClient, "clients", WeakSet())
    ours, theirs = Pipe()
    client = MaskClient(ours)

    def core_of_token(*, is_late=False):
        client.send(0, 65)
        core = COMMAND.unpack(theirs.recv_bytes())[3]
        if is_late:
            assert client.reply(0, 0) is None
        theirs.send_bytes(REPLY.pack(0, GOES_ON))
        assert client.reply(0, 1) is not None
        return core

    assert core_of_token() == 3
    assert core_of_token(is_late=True) == 3
    assert [core_of_token() for _ in range(TOKENS_APART)] == [ANY_CORE] * TOKENS_APART
    assert core_of_token() == 3
    other = MaskClient(theirs)
    assert core_of_token() == ANY_CORE
    del other
    assert core_of_token() == 3
    for choice in range(3):
        assert client.begin() == choice
        theirs.recv_bytes()
        theirs.send_bytes(REPLY.pack(choice, GOES_ON))
    assert core_of_token() == ANY_CORE


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_mask_process_moves_to_a_core_and_back():
    before = os.sched_getaffinity(0)
    masks = MaskServer(Pipe()[0], Compiled(None, []))
    try:
        masks._move_to(min(before))
        assert os.sched_getaffinity(0) == {min(before)}
        masks._move_to(ANY_CORE)
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
