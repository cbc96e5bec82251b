"""The sweeps of the paper's figures, and the same sweeps of `small`: each point is a recipe and its settings.

    python -m research.paper.sweeps

prints the commands. Add `--data`, and `-dense` to a recipe's name for its twin.
"""

import argparse

from nvium_core.model.config import even_exit_layers

Sweep = dict[str, tuple[str, ...]]
"""A recipe's name and its settings, by the name of the run's folder."""

ISOFLOP = {26: 39_646, 33: 50_729}
"""Training steps of dense models by layers. The paper compares these models with 4-viums of 36 and 48 layers."""

TOKENS_PER_STEP = 2**18


def spaced(num_layers: int, num_exits: int) -> str:
    return "shape.exit_layers=" + ",".join(map(str, even_exit_layers(num_layers, num_exits)))


def paper() -> Sweep:
    """Return the points of the quality-speed figure, and the dense models of the isoFLOP and isoSpeed table."""
    base, beta, rate = "paper-24x768", "beta.initial=", "learning_rate.maximum="
    tokens, fewer_tokens = "total_tokens=4522997880", "total_tokens=4444180520"  # 20 a parameter with 4 and 2 exits
    exits = (1, 2, 3, 4, 6, 8, 12)
    dense = ("shape.num_exits=1", "shape.adapter_width=0", f"{beta}0")
    return {
        **{f"paper-beta-{b:g}": (base, f"{beta}{b:g}", f"{rate}6e-4") for b in (0.0, 0.1, 0.2, 0.3, 0.4)},
        **{f"paper-exits-{n}": (base, spaced(24, n), f"{beta}0.1", f"{rate}6e-4", tokens) for n in exits},
        **{
            f"paper-exit-at-{n}": (base, f"shape.exit_layers={n},24", f"{beta}0", f"{rate}5e-4", fewer_tokens)
            for n in (2, 6, 10, 14, 18, 22)
        },
        **{
            f"paper-isoflop-{n}": (f"paper-{n}x768", *dense, f"total_tokens={steps * TOKENS_PER_STEP}")
            for n, steps in ISOFLOP.items()
        },
    }


def small() -> Sweep:
    """Return sweeps of `small` over depth, width, β and exits."""
    beta = "beta.initial="
    return {
        **{f"small-{n}x96": (f"small-{n}x96",) for n in (4, 8, 24)},
        **{f"small-12x{width}": (f"small-12x{width}",) for width in (64, 128)},
        **{f"small-beta-{b:g}": ("small", f"{beta}{b:g}") for b in (0.0, 0.01, 0.02, 0.04, 0.08)},
        **{f"small-exits-{n}": ("small", f"shape.num_exits={n}") for n in (1, 2, 3, 4, 6, 12)},
        **{f"small-exit-at-{n}": ("small", f"shape.exit_layers={n},12", f"{beta}0") for n in (1, 3, 5, 7, 9, 11)},
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for run, (recipe, *settings) in (small() | paper()).items():
        print(" ".join(["nvium train", recipe, f"--folder runs/{run}", *(f"--set {each}" for each in settings)]))


if __name__ == "__main__":
    main()
