"""The helpers that render chat templates."""

import os
import signal

import pytest

from nvium_core.text.renderer import Renderer
from nvium_core.text.sandbox import PATIENCE_SECONDS, Helper


@pytest.fixture
def renderer() -> Renderer:
    renderer = Renderer()
    renderer.prepare()
    return renderer


def test_a_prepared_helper_that_ends_while_it_starts_is_replaced(renderer: Renderer) -> None:
    renderer._idle.append(lost := Helper.spawn("json:has_no_such_function"))
    assert renderer.render(template="{{ messages[0].content }}", messages=[{"content": "a"}]) == "a"
    assert lost not in renderer._idle


def test_a_prepared_helper_that_was_killed_is_replaced(renderer: Renderer) -> None:
    (prepared,) = renderer._idle
    assert prepared._pipe.poll(PATIENCE_SECONDS) and prepared.pid
    os.kill(prepared.pid, signal.SIGKILL)
    os.waitid(os.P_PID, prepared.pid, os.WEXITED | os.WNOWAIT)
    assert renderer.render(template="{{ messages[0].content }}", messages=[{"content": "a"}]) == "a"
    assert prepared not in renderer._idle


def test_only_helpers_that_have_rendered_nothing_are_ended(renderer: Renderer) -> None:
    (used,) = renderer._idle
    renderer.render(template="", messages=[])
    renderer.prepare()
    assert len(renderer._idle) == 2
    renderer.end_unused()
    assert renderer._idle == [used]
