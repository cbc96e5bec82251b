import pytest

from nvium_core.errors import TrainingError
from nvium_core.training.run_folder import STATE, read_state
from tests.training.small_runs import advance, options, small_recipe, start


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\x80\x02}u.", b"\x80\x02X\x01\x00\x00\x00\x99."])
def test_a_file_that_is_no_checkpoint_is_reported_as_damaged(tmp_path, content):
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(TrainingError, match=r"state\.pt: damaged"):
        read_state(tmp_path)


def test_a_run_does_not_resume_with_another_recipe(tmp_path):
    run_options = options(tmp_path / "run")
    advance(start(small_recipe(), run_options), 5)
    for setting in ("optimizer.weight_decay=0.2", "beta.initial=0.5"):
        with pytest.raises(TrainingError, match=f"belongs to a run with another {setting.partition('=')[0]};"):
            start(small_recipe(setting), run_options)
