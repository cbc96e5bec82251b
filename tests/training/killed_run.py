"""`nvium train`, killed after its fifth step."""

import os
import signal

from torch import Tensor

from nvium_core.cli import main
from nvium_core.training.train import TrainingRun

update = TrainingRun.update


def last_update(run: TrainingRun, mix_loss: Tensor) -> None:
    update(run, mix_loss)
    if run.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    TrainingRun.update = last_update
    main()
