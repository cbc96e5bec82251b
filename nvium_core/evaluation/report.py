"""An evaluation as Markdown: a section for each part. Knows figures only."""

from collections.abc import Callable, Iterable, Sequence

from nvium_core.bench.harness import Figures, shown
from nvium_core.evaluation.paired import resolved
from nvium_core.evaluation.perplexity import QUANTILES

Row = Sequence[object]


def markdown(figures: Figures) -> str:
    """Sections for the figures present."""
    parts = [heading(figures), *(section(figures) for key, section in SECTIONS if key in figures)]
    return "\n\n".join(parts) + "\n"


def table(columns: Row, rows: Iterable[Row]) -> str:
    """Numbers have four digits; unknown is a dash."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines)


def cell(value: object) -> str:
    return "–" if value is None else shown(value)


def percent(share: float) -> str:
    return f"{share:.1%}"


def heading(figures: Figures) -> str:
    depths = ", ".join(map(str, figures["exit_layers"]))
    text = (
        f"# {figures['model']}\n\n{size(figures)}, exits after layers {depths}; {figures['dtype']} on "
        f"{figures['device']}."
    )
    return f"{text} Its dense twin {figures['twin']['model']}: {size(figures['twin'])}." if "twin" in figures else text


def size(figures: Figures) -> str:
    """Parameters, training text as far as known, and shape."""
    tokens = figures["training_tokens"]
    trained = f" trained on {tokens:,} tokens" if tokens else ""
    return (
        f"{figures['num_parameters']:,} parameters{trained}, {figures['num_layers']} layers of width {figures['width']}"
    )


def quality(figures: Figures) -> str:
    """Each distribution's perplexity and share."""
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
        percentage = resolved(f"{figures['perplexity_gain_percent']:.2f}%", bounds, nothing=0)
        works = figures.get("document_works")
        drawn = f"{len(set(works))} works" if works else f"{len(figures['document_tokens'])} documents"
        gain = f"Perplexity is {percentage} below the dense twin's (95%, resampling {drawn}). "
    return (
        f"{gain}bits per character: {figures['bits_per_character']:.4g}, over {figures['num_tokens']:,} tokens "
        f"({figures['num_characters']:,} characters). The most probable token came {percent(figures['accuracy'])} of "
        f"the time; expected calibration error {figures['calibration_error']:.3f}. Tokens outside "
        f"min ℓ_k ≤ ℓ_mix ≤ max ℓ_k: {figures['bound_violations']}; where π_mix does not add up to 1: "
        f"{figures['mass_violations']}."
    )


def rounding(figures: Figures) -> str:
    """The price of rounded weights."""
    found = figures["rounding"]
    price = resolved(f"{found['price_percent']:.2f}%", found["price_interval_percent"], nothing=0)
    exact = found["unrounded_perplexity"]
    return f"## Rounded weights\n\nPerplexity is {price} above that of the weights as they are, {exact:.4f}."


def by_position(figures: Figures) -> str:
    """A row for each part of the context, with the dense twin's where its parts are the same."""
    twins = {extent(part): part["mean_logprob"] for part in figures.get("twin", {}).get("by_position", [])}
    columns = ["positions", "tokens", "mean log π_mix", "dense twin's", "ours less the twin's"]
    rows = []
    for part in figures["by_position"]:
        ours, dense = part["mean_logprob"], twins.get(extent(part))
        rows.append([extent(part), part["num_tokens"], ours, dense, None if dense is None else ours - dense])
    if not twins:
        columns, rows = columns[:3], [row[:3] for row in rows]
    return f"## By position\n\nOf the token before, in its window.\n\n{table(columns, rows)}"


def extent(part: Figures) -> str:
    return f"{part['first']:,}–{part['last']:,}"


def routing(figures: Figures) -> str:
    """Depth, and the routers' statistics."""
    text = (
        f"## Routing\n\nmean depth {figures['mean_depth']:.3f}: if only layers cost time, speed would be "
        f"{figures['theoretical_speed_up_percent']:.1f}% higher. Entropy of p {figures['routing_entropy']:.3f} nats."
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
    """FLOPs by part, in millions."""
    names = {"all_exits": "all exits evaluated", "spoken": "a token emitted", "before_speaking": "of that, before it"}
    rows = {text: figures["flops"][name] for name, text in names.items()}
    if "twin" in figures:
        rows["dense twin"] = figures["twin"]["flops"]
    parts = list(figures["flops"]["all_exits"])
    cells = [[text, *(f"{of[part] / 1e6:.4g}" for part in parts)] for text, of in rows.items()]
    text = f"## MFLOPs per token, {figures['flops']['positions']:,} positions attended\n\n{table(['', *parts], cells)}"
    if "twin" not in figures:
        return text
    tokens = figures["flops"]["all_exits"]["total"] / figures["twin"]["flops"]["total"]
    return f"{text}\n\nFor equal training FLOPs the dense twin would be given {tokens:.3f} times the tokens."


SECTIONS: Sequence[tuple[str, Callable[[Figures], str]]] = (
    ("perplexity", quality),
    ("rounding", rounding),
    ("by_position", by_position),
    ("exit_shares", routing),
    ("flops", flops),
)
"""The figure a section needs, and its function."""
