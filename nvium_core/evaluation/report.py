"""An evaluation as Markdown, on the terminal and in a file: a section for each part. Knows figures only."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from nvium_core.bench.harness import Figures, shown
from nvium_core.evaluation import paper
from nvium_core.evaluation.paired import resolved
from nvium_core.evaluation.perplexity import QUANTILES

Row = Sequence[object]


def markdown(figures: Figures, plots: Iterable[str] = ()) -> str:
    """Sections for the figures present, and images of the named plots."""
    parts = [heading(figures)]
    parts += [section(figures) for key, section in SECTIONS if key in figures]
    parts += [f"![{name}]({name}.png)" for name in plots]
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
        gain = f"Perplexity is {percentage} below the dense twin's. "
    return (
        f"{gain}bits per character: {figures['bits_per_character']:.4g}, over {figures['num_tokens']:,} tokens "
        f"({figures['num_characters']:,} characters). The most probable token came {percent(figures['accuracy'])} of "
        f"the time; expected calibration error {figures['calibration_error']:.3f}. Tokens outside "
        f"min ℓ_k ≤ ℓ_mix ≤ max ℓ_k: {figures['bound_violations']}; where π_mix does not add up to 1: "
        f"{figures['mass_violations']}."
    )


def rounding(figures: Figures) -> str:
    """What rounded weights cost."""
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
    return f"{text}\n\n{table(columns, rows)}{papers_routing(figures)}" if rows else text


def papers_routing(figures: Figures) -> str:
    """Compared with the paper's model, for a run of its recipe."""
    if figures.get("recipe") != paper.RECIPE:
        return ""
    ours = (figures["exit_shares"], figures["exit_perplexities"])
    columns = ["exit", "mean p_k", "paper's", "perplexity", "paper's"]
    rows: list[Row] = [["π_mix", None, None, figures["perplexity"], paper.PERPLEXITY]]
    rows += zip(range(1, 5), ours[0], paper.EXIT_SHARES, ours[1], paper.EXIT_PERPLEXITIES, strict=True)
    rows += [["dense twin", None, None, figures.get("twin", {}).get("perplexity"), paper.DENSE_PERPLEXITY]]
    return f"\n\nBeside the paper's 24 × 768 4-vium:\n\n{table(columns, rows)}"


def greedy(figures: Figures) -> str:
    early, agreeing = percent(figures["greedy_early_share"]), percent(figures["greedy_agreement"])
    return (
        f"## Temperature 0\n\n{early} of tokens are certain before the last exit, at a mean depth of "
        f"{figures['greedy_mean_depth']:.3f}; {agreeing} are the argmax of π_mix."
    )


def flops(figures: Figures) -> str:
    """By part, in millions."""
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


def latency(figures: Figures) -> str:
    """Milliseconds by category, and the ratios."""
    measured = figures["latency"]
    names = ["early exits", *measured["ratios"]]
    rows = [
        [category, each["prompts"], *(f"{each['milliseconds'][name]:.3f}" for name in names)]
        for category, each in measured["categories"].items()
    ]
    rows += [
        [title, None, None, *ratios_shown(measured[f"{name}s"], measured.get(f"{name}_intervals", {}))]
        for title, name in (("**over early exits**", "ratio"), ("after the first token", "decoding_ratio"))
    ]
    protocol = (
        f"Milliseconds per token{clock_of(measured)}, prompts included; {measured['max_new_tokens']} new tokens, "
        f"{measured['trials']} trials, in turns; medians over answers. Ratios are medians of answers spoken in turn, "
        "on average over categories, in brackets where they are in 95% of bootstrap samples of the pairs. "
        f"{measured['prompts_cut']} prompts were too long and lost their beginning."
    )
    columns = ["category", "prompts", *names]
    steps = [[s["exit"], s["layer"], s["tokens"], s["low"], s["median"], s["high"]] for s in measured["staircase"]]
    stairs = table(["exit", "layer", "tokens", "ms, 25%", "median", "75%"], steps)
    return f"## Speed\n\n{protocol}\n\n{table(columns, rows)}\n\nTime since the token before, by exit:\n\n{stairs}"


def clock_of(measured: Figures) -> str:
    return " of the processor's time" if measured.get("clock") == "processor" else ""


def latency_as_paper(figures: Figures) -> str:
    """Tokens per second by category, and the ratios."""
    measured = figures["latency_as_paper"]
    names, rates = list(measured["tokens"]), measured["tokens_per_second"]
    rows: list[Row] = [[category, *(of[name] for name in names)] for category, of in rates.items()]
    for title, kind in (("**early exits over it, all tokens**", "ratio"), ("mean over categories", "category_ratio")):
        ratios = measured[f"{kind}s"]
        shown_of = dict(zip(ratios, ratios_shown(ratios, measured[f"{kind}_intervals"]), strict=True))
        rows.append([title, *(shown_of.get(name) for name in names)])
    protocol = (
        f"Tokens per second{clock_of(measured)} as the authors' scripts measure: the first {measured['prompt_tokens']} "
        f"tokens of a prompt, the {measured['top_k']} most probable tokens, at most {measured['max_new_tokens']} new "
        f"ones up to an end of text, {measured['trials']} trials; all tokens over all seconds. "
        "In brackets is where a ratio is in 95% of bootstrap samples of the answers."
    )
    return f"## Speed as the paper measures it\n\n{protocol}\n\n{table(['category', *names], rows)}"


def ratios_shown(ratios: Mapping[str, float], intervals: Mapping[str, Sequence[float] | None]) -> list[str]:
    return [resolved(f"{ratio:.3f}", intervals.get(name), nothing=1) for name, ratio in ratios.items()]


def temperatures(figures: Figures) -> str:
    """A row for each way; people's text first."""
    found = figures["temperatures"]
    columns = ["", "temperature", "mean log π_mix", "±", "entropy", "repeated 4-grams", "distinct words", "mean depth"]
    rows = [temperature_row("people", None, found["people"])]
    rows += [temperature_row(row["sampling"], row["temperature"], row) for row in found["rows"]]
    worst = max(row["deviation"] for row in found["rows"] if row["sampling"] == "exits")
    texts = (
        f"{found['num_texts']} openings of documents, {found['prompt_tokens']} tokens each, continued by "
        f"{found['tokens_per_text']} tokens."
    )
    drawn = f"Exits spoke as often as p_k says, to within {worst:.1f} standard deviations."
    return f"## Temperature\n\n{texts} {drawn}\n\n{table(columns, rows)}\n\n{found['advice']}"


def temperature_row(name: str, temperature: float | None, found: Mapping[str, float]) -> Row:
    shares = [percent(found[share]) for share in ("repeated_grams", "distinct_words")]
    measures = [found[measure] for measure in ("mean_logprob", "mean_logprob_error", "entropy")]
    return [name, temperature, *measures, *shares, found.get("mean_depth")]


def tasks(figures: Figures) -> str:
    rows = [
        [task, metric, value, scores.get(f"{metric}_stderr")]
        for task, scores in figures["tasks"].items()
        for metric, value in scores.items()
        if not metric.endswith("_stderr")
    ]
    return f"## Tasks\n\n{table(['task', 'metric', 'value', '±'], rows)}"


SECTIONS: Sequence[tuple[str, Callable[[Figures], str]]] = (
    ("perplexity", quality),
    ("rounding", rounding),
    ("by_position", by_position),
    ("exit_shares", routing),
    ("greedy_agreement", greedy),
    ("flops", flops),
    ("latency", latency),
    ("latency_as_paper", latency_as_paper),
    ("temperatures", temperatures),
    ("tasks", tasks),
)
"""The figure a section needs, and its function."""
