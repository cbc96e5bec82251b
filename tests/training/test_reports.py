import io

import pytest
from rich.console import Console

from nvium_core.training import reports
from nvium_core.training.reports import describe, follow, progress_bar

REPORT = {"mix_loss": 3.1234, "tokens_per_second": 12_345, "mean_depth": 0.684, "beta": 0.0234}
REPORT |= {"exit_probs": [0.0512, 0.2, 0.3488, 0.4]}


class Counted:
    """A run of three steps."""

    step, num_steps = 0, 3

    def steps(self):
        while self.step < self.num_steps:
            self.step += 1
            yield REPORT

    def advice(self, report):
        return "Warning: it collapses" if self.step == 2 else ""

    def save(self):
        raise AssertionError("it was not interrupted")


def test_without_a_terminal_lines_have_the_time_left(monkeypatch):
    monkeypatch.setattr(reports, "LINE_SECONDS", 0)
    console = Console(file=io.StringIO(), width=40)
    follow(Counted(), console)
    lines = console.file.getvalue().splitlines()
    assert [line[:8] for line in lines] == ["step 1/3", "Warning:", "step 2/3", "step 3/3"]
    assert lines[2].endswith("40% · 0:00:01 left") and not lines[3].endswith("left")


def shown(width: int, description: str) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with progress_bar(console) as bar:
        bar.add_task(description, total=3906, completed=1234)
        table = bar.make_tasks_table(bar.tasks)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@pytest.mark.parametrize("num_exits", [4, 12])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_line_starts_with_the_step_and_the_time_left(width, num_exits):
    [line] = shown(width, describe(REPORT | {"exit_probs": [1 / num_exits] * num_exits}))
    assert line.startswith("1234/3906 -:--:-- loss 3.123")


def test_four_exits_fit_into_eighty_columns():
    [line] = shown(80, describe(REPORT))
    assert line.rstrip().endswith("loss 3.123 · 12,345 tok/s · depth 0.68 · β 0.023 · 5 20 35 40%")
