"""JSON in pieces equals JSON in one string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from server.writers import pieces
from server.writers.pieces import json_pieces

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(st.dictionaries(st.text(), inner)) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), values), st.lists(values))
def test_pieces_are_the_json_of_the_whole(value, items):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "PIECE_BYTES", 10)
        made = json_pieces({**value, "": iter(items)})
        short = json_pieces({"a": iter(range(1_000))})
    assert b"".join(made) == to_json({**value, "": items})
    assert max(map(len, short)) < 20
