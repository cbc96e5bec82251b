"""Renders an evaluation as Markdown."""

from collections.abc import Callable, Iterable, Sequence

from nvium_core.bench.harness import Figures, shown
from nvium_core.evaluation.paired import with_interval
from nvium_core.evaluation.perplexity import QUANTILES

Row = Sequence[object]


def markdown(figures: Figures) -> str:
    """Render the heading, and each section whose figures exist."""
    parts = [heading(figures), *(section(figures) for key, section in SECTIONS if key in figures)]
    return "\n\n".join(parts) + "\n"


def table(columns: Row, rows: Iterable[Row]) -> str:
    """Render a table. Floats get four significant digits, and None becomes a dash."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join("–" if value is None else shown(value) for value in line) + " |" for line in lines
    )


def heading(figures: Figures) -> str:
    depths = ", ".join(map(str, figures["exit_layers"]))
    text = (
        f"# {figures['model']}\n\n{size(figures)}, exits after layers {depths}; {figures['dtype']} on "
        f"{figures['device']}."
    )
    return f"{text} Its dense twin {figures['twin']['model']}: {size(figures['twin'])}." if "twin" in figures else text


def size(figures: Figures) -> str:
    """Describe the model's parameters and shape, and its training tokens if known."""
    tokens = figures["training_tokens"]
    trained = f" trained on {tokens:,} tokens" if tokens else ""
    return (
        f"{figures['num_parameters']:,} parameters{trained}, {figures['num_layers']} layers of width {figures['width']}"
    )


def quality(figures: Figures) -> str:
    """Render the perplexities of π_mix, each exit, an oracle router and the twin. Add the exit shares."""
    columns = ["distribution", "perplexity", "mean p_k", "posterior"]
    exits = zip(
        figures["exit_layers"],
        figures["exit_perplexities"],
        figures["exit_shares"],
        figures["exit_posteriors"],
        strict=True,
    )
    rows: list[Row] = [["**π_mix**", figures["perplexity"], None, None]]
    rows += [[f"exit {k} (layer {layer})", *rest] for k, (layer, *rest) in enumerate(exits, 1)]
    rows += [["oracle router", figures["oracle_perplexity"], None, None]]
    if "twin" in figures:
        rows += [[f"dense twin, {figures['twin']['model']}", figures["twin"]["perplexity"], None, None]]
    return f"## Quality\n\n{table(columns, rows)}\n\n{certainty(figures)}"


def certainty(figures: Figures) -> str:
    gain = ""
    if "twin" in figures:
        bounds = figures.get("perplexity_gain_interval_percent")
        percentage = with_interval(f"{figures['perplexity_gain_percent']:.2f}%", bounds, level=0)
        works = figures.get("document_works")
        drawn = f"{len(set(works))} works" if works else f"{len(figures['document_tokens'])} documents"
        gain = f"Perplexity is {percentage} below the dense twin's (95% interval, resampling {drawn}). "
    return (
        f"{gain}bits per character: {figures['bits_per_character']:.4g}, over {figures['num_tokens']:,} tokens "
        f"({figures['num_characters']:,} characters). Top-1 accuracy {figures['accuracy']:.1%}; expected calibration "
        f"error {figures['calibration_error']:.3f}. Tokens outside min ℓ_k ≤ ℓ_mix ≤ max ℓ_k: "
        f"{figures['bound_violations']}; tokens where π_mix does not sum to 1: {figures['mass_violations']}."
    )


def rounding(figures: Figures) -> str:
    found = figures["rounding"]
    price = with_interval(f"{found['price_percent']:.2f}%", found["price_interval_percent"], level=0)
    exact = found["unrounded_perplexity"]
    return f"## Quantized weights\n\nPerplexity is {price} above that of the unquantized weights, {exact:.4f}."


def by_position(figures: Figures) -> str:
    """Render mean log π_mix for each part of the context. If the twin has the same part, add the twin's value."""
    twins = {extent(part): part["mean_logprob"] for part in figures.get("twin", {}).get("by_position", [])}
    columns = ["positions", "tokens", "mean log π_mix", "dense twin", "difference"]
    rows = []
    for part in figures["by_position"]:
        ours, dense = part["mean_logprob"], twins.get(extent(part))
        rows.append([extent(part), part["num_tokens"], ours, dense, None if dense is None else ours - dense])
    if not twins:
        columns, rows = columns[:3], [row[:3] for row in rows]
    return f"## By position\n\nPositions are those of the preceding token in its window.\n\n{table(columns, rows)}"


def extent(part: Figures) -> str:
    return f"{part['first']:,}–{part['last']:,}"


def routing(figures: Figures) -> str:
    """Render the mean depth and the statistics of the routers."""
    text = (
        f"## Routing\n\nMean depth {figures['mean_depth']:.3f}: the speed-up would be "
        f"{figures['theoretical_speed_up_percent']:.1f}% if only layers took time. Entropy of p "
        f"{figures['routing_entropy']:.3f} nats."
    )
    spread = zip(
        figures["exit_layers"],
        figures["router_means"],
        figures["router_deviations"],
        figures["router_quantiles"],
        strict=False,
    )
    rows = [[f"layer {layer}", mean, deviation, *row] for layer, mean, deviation, row in spread]
    columns = ["router", "mean w_k", "deviation", *(f"{q:.0%}" for q in QUANTILES)]
    return f"{text}\n\n{table(columns, rows)}" if rows else text


def flops(figures: Figures) -> str:
    """Render the MFLOPs per token by part of the model."""
    names = {
        "all_exits": "all exits (scoring)",
        "spoken": "generated token",
        "before_speaking": "until it is emitted",
    }
    rows = {text: figures["flops"][name] for name, text in names.items()}
    if "twin" in figures:
        rows["dense twin"] = figures["twin"]["flops"]
    parts = list(figures["flops"]["all_exits"])
    cells = [[text, *(f"{of[part] / 1e6:.4g}" for part in parts)] for text, of in rows.items()]
    text = f"## MFLOPs per token, {figures['flops']['positions']:,} positions attended\n\n{table(['', *parts], cells)}"
    if "twin" not in figures:
        return text
    tokens = figures["flops"]["all_exits"]["total"] / figures["twin"]["flops"]["total"]
    return f"{text}\n\nFor equal training FLOPs, the dense twin would be trained on {tokens:.3f} times the tokens."


SECTIONS: Sequence[tuple[str, Callable[[Figures], str]]] = (
    ("perplexity", quality),
    ("rounding", rounding),
    ("by_position", by_position),
    ("exit_shares", routing),
    ("flops", flops),
)
"""(figure that the section requires, function that renders the section)"""
