import torch

from nvium_core.engine.device.arena import CACHE_LINE, PIECE_BYTES, Arena


def test_copies_are_equal_aligned_and_do_not_overlap():
    originals = [torch.randn(size) for size in (1, 64, 100, PIECE_BYTES // 4, PIECE_BYTES, 3)]
    arena = Arena()
    copies = [arena.copy(original) for original in originals]
    assert all(torch.equal(*pair) for pair in zip(originals, copies, strict=True))
    assert all(copy.data_ptr() % CACHE_LINE == 0 for copy in copies)
