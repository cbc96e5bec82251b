"""What schedules would give, and how many machines a load needs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from nvium_core.planning.machine import Machine


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

    from nvium_core.engine.params import EngineConfig
    from nvium_core.planning import capacity
    from nvium_core.planning import plan as planning
    from nvium_core.planning.machine import Machine

    check(rate=rate, against=against, fit=fit, plot=plot, head=head)

    def machine(exits: tuple[float, ...]) -> "Machine":
        return Machine(
            costs=planning.costs_of(",".join(map(str, exits)), fixed, per_row, costs),
            routing=exits,
            config=EngineConfig(max_sequences=max_sequences),
            http_share=http_share,
            http_request_seconds=http_request_ms / 1000,
            http_token_seconds=http_token_ms / 1000,
        )

    if against is not None:
        shown, figures = beside_a_report(against, machine, fits=fit)
    elif rate is not None:
        prompts, answers = capacity.span(prompt_tokens, "prompt-tokens"), capacity.span(output_tokens, "output-tokens")
        demand = capacity.Demand(rate=rate, prompt_tokens=prompts, output_tokens=answers)
        seconds = target_ttft_ms / 1000, target_itl_ms / 1000
        target = capacity.Target(first_token=seconds[0], between_tokens=seconds[1], percentile=percentile)
        replica = machine(planning.numbers(routing, "routing"))
        seen = capacity.look_ahead(replica, demand, target)
        shown, figures = capacity.table(seen, demand, target), capacity.as_dict(replica, demand, target, seen)
    else:
        simulated = planning.machines(routing, sequences, fixed, per_row, head, costs)
        rows = planning.compare(simulated)
        shown, figures = planning.table(rows), planning.as_dict(simulated, rows)
    Console().print(shown)
    save(figures, json_file, plot)


def check(*, rate: float | None, against: Path | None, fit: bool, plot: Path | None, head: float) -> None:
    """Raise `InvalidRequest`, naming the option, for those that do not go together."""
    from nvium_core.engine.params import require

    require(rate is None or against is None, "against", "cannot be given together with rate")
    require(plot is None or against is not None, "plot", "there is something to draw only with against")
    require(plot is None or plot.suffix == ".png", "plot", f"must be a .png, got {plot}")
    require(not fit or against is not None, "fit", "needs a report: against")
    is_of_schedules = rate is None and against is None
    require(is_of_schedules or not head, "head", "is part of measured costs: means nothing with rate or against")


def beside_a_report(
    report: Path, machine: "Callable[[tuple[float, ...]], Machine]", *, fits: bool
) -> "tuple[Table, dict[str, Any]]":
    """What was foreseen of a load test by a machine of the exits that it saw."""
    from nvium_core.planning import forecast

    loads, exits = forecast.read(report)
    replica = forecast.fit(machine(exits), loads) if fits else machine(exits)
    found = forecast.forecasts(replica, loads)
    return forecast.table(replica, found), forecast.as_dict(replica, found)


def save(figures: "dict[str, Any]", json_file: Path | None, plot: Path | None) -> None:
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if plot:
        from nvium_core.bench import plots

        plots.forecast(figures).savefig(plot)
