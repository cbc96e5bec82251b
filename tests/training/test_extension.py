import pytest

from nvium_core.errors import TrainingError
from tests.docs import pages
from tests.training.small_runs import finished, options, small_recipe, start


def test_the_pages_loss_trains_by_name(tmp_path, monkeypatch):
    [example] = [block.text for block in pages.blocks("docs/training.md") if block.text.startswith("# mine.py")]
    (tmp_path / "mine.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    plain, other = (
        finished(start(small_recipe(*names), options(tmp_path / str(len(names)))))
        for names in ((), ("objective=mine.objective",))
    )
    assert not plain["lm_head.weight"].equal(other["lm_head.weight"])


@pytest.mark.parametrize("name", ["torch.optim.Nothing", "nowhere.at_all.Class", "torch", "..."])
def test_a_name_that_cannot_be_imported_is_refused_before_the_text_is_read(name, tmp_path):
    run_options = options(tmp_path / "run")
    run_options.data.unlink()
    with pytest.raises(TrainingError, match=r"cannot be imported|must name a class or function"):
        start(small_recipe(f"objective={name}"), run_options)
