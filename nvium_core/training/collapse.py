"""Warns when the routers send nearly all tokens to one exit. The other exits then hardly learn any more."""

from dataclasses import dataclass

from nvium_core.training.caveats import MAX_SHARE
from nvium_core.training.loggers import Report
from nvium_core.training.recipes.recipe import Recipe

NUM_STEPS = 10  # consecutive ones before the warning


@dataclass
class Collapse:
    """Counts the consecutive steps, after the router warm-up, in which one exit has nearly all tokens."""

    num_steps: int = 0

    def advice(self, report: Report, recipe: Recipe) -> str:
        """Return a warning at the last of `NUM_STEPS` such steps, else nothing."""
        shares, warmup = report.get("exit_probs", []), recipe.router_warmup
        is_collapsed = len(shares) > 1 and max(shares) > MAX_SHARE
        self.num_steps += 1
        if not is_collapsed or warmup.active(report["step"], recipe.num_steps):
            self.num_steps = 0
        if self.num_steps != NUM_STEPS:
            return ""
        exit_ = shares.index(max(shares)) + 1
        change = "raise" if exit_ == len(shares) else "lower"
        return (
            f"Warning: for {NUM_STEPS} steps, over {MAX_SHARE:.0%} of the tokens have left at exit {exit_}, so the "
            f"others hardly learn. Start again in another folder: {change} β (beta.initial={recipe.beta.initial:g}) or "
            f"lengthen the router warm-up (router_warmup.share={warmup.share:g}, min_steps={warmup.min_steps})"
        )
