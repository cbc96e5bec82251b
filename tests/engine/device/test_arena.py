from nvium_core.engine.device.arena import CACHE_LINE, PIECE_BYTES, Arena


def test_pieces_are_zero_aligned_and_do_not_overlap():
    arena = Arena()
    pieces = [arena.zeros(size) for size in (1, 64, 100, PIECE_BYTES // 4, PIECE_BYTES, 3)]
    for number, piece in enumerate(pieces, start=1):
        assert not piece.any()
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces, start=1))
    assert all(piece.data_ptr() % CACHE_LINE == 0 for piece in pieces)
