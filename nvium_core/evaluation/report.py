"""Shows an evaluation: the main figures in one line, a table of the distributions, and details. The JSON has more."""

from rich.box import SIMPLE
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import count, shown
from nvium_core.evaluation.paired import MIN_PAIRS, with_interval
from nvium_core.model.config import exit_places
from nvium_core.training.caveats import caveats, warnings


def report(figures: Figures) -> Group:
    by_threshold = [threshold_table(figures)] if figures["thresholds"] else []
    main_lines, details = [main_line(figures), *warnings(figures)], [size(figures), certainty(figures)]
    return Group(*map(Text, main_lines), table(figures), *by_threshold, *map(Text, details))


def main_line(figures: Figures) -> str:
    gain = ""
    if "twin" in figures:
        bounds, percentage = figures.get("perplexity_gain_interval_percent"), figures["perplexity_gain_percent"]
        gain = f", {with_interval(f'{percentage:.2f}%', bounds, level=0)} below the dense twin's"
        gain += " (see the warning)" if caveats(figures) else ""
    return f"{figures['model']}: perplexity {figures['perplexity']:.4g}{gain}; mean depth {figures['mean_depth']:.3f}"


def table(figures: Figures) -> Table:
    """List the perplexities of π_mix, each exit, an oracle router and the twin, with the shares of the exits."""
    made = Table("distribution", "perplexity", "mean p_k", "posterior", box=SIMPLE)
    made.add_row("π_mix", shown(figures["perplexity"]))
    columns = (figures[name] for name in ("exit_perplexities", "exit_shares", "exit_posteriors"))
    for number, (place, *rest) in enumerate(zip(places(figures), *columns, strict=True), 1):
        made.add_row(f"exit {number} ({place})", *map(shown, rest))
    made.add_row("oracle router", shown(figures["oracle_perplexity"]))
    if "twin" in figures:
        made.add_row(f"dense twin, {figures['twin']['model']}", shown(figures["twin"]["perplexity"]))
    return made


def threshold_table(figures: Figures) -> Table:
    """List perplexity, mean depth and shares of the exits that each threshold chooses."""
    made = Table("threshold", "perplexity", "mean depth", *places(figures), box=SIMPLE)
    for row in figures["thresholds"]:
        made.add_row(f"{row['threshold']:g}", *map(shown, (row["perplexity"], row["mean_depth"], *row["exit_shares"])))
    return made


def places(figures: Figures) -> list[str]:
    return exit_places(figures["exit_layers"], figures["num_layers"], figures["num_loops"])


def size(figures: Figures) -> str:
    tokens = figures["training_tokens"]
    trained = f" trained on {tokens:,} tokens" if tokens else ""
    loops = f" run {figures['num_loops']} times" if figures["num_loops"] > 1 else ""
    return (
        f"{figures['num_parameters']:,} parameters{trained}, {figures['num_layers']} layers{loops} of width "
        f"{figures['width']}; {figures['dtype']} on {figures['device']}."
    )


def certainty(figures: Figures) -> str:
    number = len(figures["document_tokens"])
    drawn = "which 95% intervals resample" if number >= MIN_PAIRS else "too few for intervals"
    return (
        f"{figures['num_tokens']:,} tokens ({figures['num_characters']:,} characters) of {count(number, 'document')}, "
        f"{drawn}; bits per character: {figures['bits_per_character']:.4g}; entropy of p: "
        f"{figures['routing_entropy']:.3f} nats."
    )
