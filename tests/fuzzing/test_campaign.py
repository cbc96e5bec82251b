from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzzing import campaign
from tests.fuzzing.targets.connection import seeds


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
def test_only_what_covers_something_new_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    monkeypatch.setattr(campaign, "CORPUS", kept)
    hunted = campaign.Campaign("connection", folder)
    seed = next(iter(seeds()))
    for name in ("first", "again"):
        (folder / "corpus" / name).write_bytes(seed)
    hunted.keep()
    assert [file.read_bytes() for file in (kept / "connection").iterdir()] == [seed]
