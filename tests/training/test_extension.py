from pathlib import Path

import pytest

from nvium_core.training.errors import TrainingError
from tests.docs import pages
from tests.training.small_runs import finished, options, small_recipe, start

NAMES = "optimizer.name=mine.Lion", "router=mine.Linear", "objective=mine.objective"


def test_the_pages_optimiser_router_and_loss_train_by_name(tmp_path, monkeypatch):
    [example] = [block.text for block in pages.blocks("docs/training.md") if block.text.startswith("# mine.py")]
    (tmp_path / "mine.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    run = start(small_recipe(*NAMES, "optimizer.muon_rate=0"), options(tmp_path / "run"))
    assert type(run.optimizers[0]).__name__ == "Lion" and type(run.model.exits[0].router).__name__ == "Linear"
    before = run.model.exits[0].router.weight.clone()
    finished(run)
    assert not run.model.exits[0].router.weight.equal(before)
    assert "exits.0.router.weight" in run.model.state_dict() and Path(run.export(), "model.safetensors").exists()


@pytest.mark.parametrize("name", ["torch.optim.Nothing", "nowhere.at_all.Class", "torch", "..."])
def test_a_name_that_cannot_be_imported_is_refused_before_the_text_is_read(name, tmp_path):
    run_options = options(tmp_path / "run")
    run_options.data.unlink()
    with pytest.raises(TrainingError, match=r"cannot be imported|must name a class or function"):
        start(small_recipe(f"optimizer.name={name}"), run_options)
