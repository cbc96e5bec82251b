"""`nvium train`, which gets the signal `SIGNAL` of the environment after its fifth step."""

import os

from nvium_core.cli import main
from nvium_core.training.train import TrainingRun

update = TrainingRun.update


def last_update(run: TrainingRun) -> None:
    update(run)
    if run.step == 5:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))


if __name__ == "__main__":
    TrainingRun.update = last_update
    main()
