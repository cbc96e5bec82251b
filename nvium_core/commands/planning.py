"""What schedules would give, and how many machines a load needs."""

import json
from pathlib import Path
from typing import Annotated

import typer


def plan(
    routing: Annotated[str, typer.Option(help="Probability of each exit, p_1,p_2,…")] = ".146,.26,.345,.247",
    sequences: Annotated[str, typer.Option(help="Sequences at once, one or several numbers.")] = "1,2,4,8,16",
    fixed: Annotated[str | None, typer.Option(help="Milliseconds of a block, however few its rows [1].")] = None,
    per_row: Annotated[str | None, typer.Option(help="Milliseconds a block takes more for every row [0].")] = None,
    head: Annotated[float, typer.Option(help="Milliseconds of the head, per token.")] = 0.0,
    costs: Annotated[Path | None, typer.Option(help="Measured costs (JSON), instead of --fixed and --per-row.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second: how many replicas do they need?")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="With --rate: N, or N:N.")] = "64",
    output_tokens: Annotated[str, typer.Option(help="With --rate: N, or N:N.")] = "128",
    target_ttft_ms: Annotated[float, typer.Option(help="With --rate: first token within.")] = float("inf"),
    target_itl_ms: Annotated[float, typer.Option(help="With --rate: between tokens, on average.")] = float("inf"),
    percentile: Annotated[float, typer.Option(help="With --rate: of requests that keep the targets.")] = 95,
    max_sequences: Annotated[int, typer.Option(help="With --rate: at once in a replica.")] = 32,
    http_share: Annotated[float, typer.Option(help="With --rate: of its pace that the engine keeps, serving.")] = 1.0,
    http_request_ms: Annotated[float, typer.Option(help="With --rate: of its time that a request takes.")] = 0.0,
    http_token_ms: Annotated[float, typer.Option(help="With --rate: of its time that telling a token takes.")] = 0.0,
    against: Annotated[Path | None, typer.Option(help="A load test's report: what was foreseen of it?")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="With --against: find what HTTP takes from it.")] = False,
    plot: Annotated[Path | None, typer.Option(help="With --against: draw it, into a .png.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """What each schedule would give, simulated: tokens per second, waits, and gaps between tokens. Needs no model.

    --fixed and --per-row take one number, or one for each block. With --rate: how many replicas so many requests need,
    what their clients would see, and what saturates a replica. With --against: the same requests as those of a load
    test (`python -m loadtest --rate … --json FILE`) with the exits that it saw, planned beside measured, and
    with --fit the --http-… with which that is nearest.
    """
    from rich.console import Console

    from nvium_core.bench import capacity, forecast
    from nvium_core.bench import plan as planning
    from nvium_core.engine.params import EngineConfig, require

    require(rate is None or against is None, "against", "cannot be given together with rate")
    require(plot is None or against is not None, "plot", "there is something to draw only with against")
    is_of_schedules = rate is None and against is None
    require(is_of_schedules or not head, "head", "is part of measured costs: means nothing with rate or against")
    require(not fit or against is not None, "fit", "needs a report: against")
    require(plot is None or plot.suffix == ".png", "plot", f"must be a .png, got {plot}")

    def machine(exits: tuple[float, ...]) -> capacity.Machine:
        return capacity.Machine(
            costs=planning.costs_of(",".join(map(str, exits)), fixed, per_row, costs),
            routing=exits,
            config=EngineConfig(max_sequences=max_sequences),
            http_share=http_share,
            http_request_seconds=http_request_ms / 1000,
            http_token_seconds=http_token_ms / 1000,
        )

    if against is not None:
        loads, exits = forecast.read(against)
        replica = forecast.fit(machine(exits), loads) if fit else machine(exits)
        found = forecast.forecasts(replica, loads)
        shown, figures = forecast.table(replica, found), forecast.as_dict(replica, found)
    elif rate is not None:
        demand = capacity.Demand(
            rate=rate,
            prompt_tokens=capacity.span(prompt_tokens, "prompt-tokens"),
            output_tokens=capacity.span(output_tokens, "output-tokens"),
        )
        target = capacity.Target(
            first_token=target_ttft_ms / 1000, between_tokens=target_itl_ms / 1000, percentile=percentile
        )
        replica = machine(planning.numbers(routing, "routing"))
        seen = capacity.look_ahead(replica, demand, target)
        shown, figures = capacity.table(seen, demand, target), capacity.as_dict(replica, demand, target, seen)
    else:
        simulated = planning.loads(routing, sequences, fixed, per_row, head, costs)
        rows = planning.compare(simulated)
        shown, figures = planning.table(rows), planning.as_dict(simulated, rows)
    Console().print(shown)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if plot:
        from nvium_core.bench import plots

        plots.forecast(figures).savefig(plot)
