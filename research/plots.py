"""Shared helpers of the figures: empty sheets and labelled panels."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nvium_core.bench.figures import Figures
from nvium_core.training.caveats import warnings

SIZE_INCHES = (8, 4.5)
DOTS_PER_INCH = 120


def sheet(figures: Figures, num_panels: int = 1, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """Create an empty figure with panels side by side, titled with the measured model."""
    figure = Figure(SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    title = f"{figures['model']}, {figures['dtype']}, {figures['device']}"
    figure.suptitle("\n".join([title, *warnings(figures)]), fontsize="medium")
    panels = figure.subplots(1, num_panels, squeeze=False, sharey=share_y)[0]
    for panel in panels:
        panel.tick_params(labelleft=True)
    return figure, list(panels)


def label(panel: Axes, x: str, y: str) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend()
