"""What schedules would give, and how many replicas a load needs."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import Doc

from nvium_core.commands.options import show, takes
from nvium_core.engine.params import EngineConfig, require

if TYPE_CHECKING:
    from rich.table import Table

    from nvium_core.planning.machine import Machine


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Raises `InvalidRequest`, naming the option, for options that contradict each other."""

    routing: Annotated[str, Doc("Probability of each exit, p_1,p_2,….")] = ".146,.26,.345,.247"
    sequences: Annotated[str, Doc("Sequences at once, one or several numbers.")] = "1,2,4,8,16"
    fixed: Annotated[str | None, Doc("Milliseconds of a block, however few its rows [1].")] = None
    per_row: Annotated[str | None, Doc("Milliseconds a block takes more for every row [0].")] = None
    head: Annotated[float, Doc("Milliseconds of the head, per token.")] = 0.0
    costs: Annotated[Path | None, Doc("Measured costs (JSON), instead of --fixed and --per-row.")] = None
    rate: Annotated[float | None, Doc("Requests per second, to plan how many replicas they need.")] = None
    prompt_tokens: Annotated[str, Doc("With --rate: N, or N:N.")] = "64"
    output_tokens: Annotated[str, Doc("With --rate: N, or N:N.")] = "128"
    target_ttft_ms: Annotated[float | None, Doc("With --rate: first token within.")] = None
    target_itl_ms: Annotated[float | None, Doc("With --rate: between tokens, on average.")] = None
    percentile: Annotated[float, Doc("With --rate: of requests that keep the targets.")] = 95
    max_sequences: Annotated[int, Doc("With --rate: at once in a replica.")] = 32
    http_share: Annotated[float, Doc("With --rate: of its pace that the engine keeps, serving.")] = 1.0
    http_request_ms: Annotated[float, Doc("With --rate: of its time that a request takes.")] = 0.0
    http_token_ms: Annotated[float, Doc("With --rate: of its time that sending a token takes.")] = 0.0
    against: Annotated[Path | None, Doc("A load test's report, to plan its requests beside what was measured.")] = None
    fit: Annotated[bool, Doc("With --against: find what HTTP takes from it.")] = False
    plot: Annotated[Path | None, Doc("With --against: draw it, into a .png.")] = None

    def __post_init__(self) -> None:
        has_report, has_rate, plot = self.against is not None, self.rate is not None, self.plot
        require(not (has_rate and has_report), "against", "cannot be given together with rate")
        require(plot is None or has_report, "plot", "there is something to draw only with against")
        require(plot is None or plot.suffix == ".png", "plot", f"must be a .png, got {plot}")
        require(not self.fit or has_report, "fit", "needs a report: against")
        are_schedules = not (has_rate or has_report)
        require(are_schedules or not self.head, "head", "is part of measured costs: means nothing with rate or against")


@takes(PlanOptions)
def plan(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None, **given: Any
) -> None:
    """What each schedule would give, simulated: tokens per second, waits, and gaps between tokens. Needs no model.

    --fixed and --per-row take one number, or one for each block. With --rate: how many replicas so many requests need,
    what their clients would see, and what saturates a replica. With --against: the same requests as those of a load
    test (`python -m loadtest --rate … --json FILE`) with the exits that it saw, planned beside measured, and
    with --fit the --http-… with which that is nearest.
    """
    options = PlanOptions(**given)
    if options.against is not None:
        table, figures = forecast(options, options.against)
    elif options.rate is not None:
        table, figures = capacity(options, options.rate)
    else:
        table, figures = schedules(options)
    show(table)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        from nvium_core.bench import plots

        plots.forecast(figures).savefig(options.plot)


def schedules(options: PlanOptions) -> "tuple[Table, dict[str, Any]]":
    """Each schedule at each number of sequences."""
    from nvium_core.planning import plan

    inputs = options.routing, options.sequences, options.fixed, options.per_row, options.head, options.costs
    machines = plan.machines(*inputs)
    rows = plan.compare(machines)
    return plan.table(rows), plan.as_dict(machines, rows)


def capacity(options: PlanOptions, rate: float) -> "tuple[Table, dict[str, Any]]":
    """Replicas for `rate` requests per second."""
    from nvium_core.planning import capacity, plan

    prompts = capacity.span(options.prompt_tokens, "prompt-tokens")
    answers = capacity.span(options.output_tokens, "output-tokens")
    demand = capacity.Demand(rate=rate, prompt_tokens=prompts, output_tokens=answers)
    first, between = (math.inf if ms is None else ms / 1000 for ms in (options.target_ttft_ms, options.target_itl_ms))
    target = capacity.Target(first_token=first, between_tokens=between, percentile=options.percentile)
    replica = machine(options, plan.numbers(options.routing, "routing"))
    outlooks = capacity.look_ahead(replica, demand, target)
    return capacity.table(outlooks, demand, target), capacity.as_dict(replica, demand, target, outlooks)


def forecast(options: PlanOptions, report: Path) -> "tuple[Table, dict[str, Any]]":
    """A load test's requests, planned and measured."""
    from nvium_core.planning import forecast

    loads, exits = forecast.read(report)
    replica = machine(options, exits)
    if options.fit:
        replica = forecast.fit(replica, loads)
    forecasts = forecast.forecasts(replica, loads)
    return forecast.table(replica, forecasts), forecast.as_dict(replica, forecasts)


def machine(options: PlanOptions, routing: tuple[float, ...]) -> "Machine":
    from nvium_core.planning import plan
    from nvium_core.planning.machine import Machine

    return Machine(
        costs=plan.costs_of(len(routing), options.fixed, options.per_row, options.costs),
        routing=routing,
        config=EngineConfig(max_sequences=options.max_sequences),
        http_share=options.http_share,
        http_request_seconds=options.http_request_ms / 1000,
        http_token_seconds=options.http_token_ms / 1000,
    )
