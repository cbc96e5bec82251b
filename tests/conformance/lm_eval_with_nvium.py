"""lm_eval's own command line, in a process where transformers' AutoModelForCausalLM knows N-vium."""

from lm_eval.__main__ import cli_evaluate

import nvium_core.model.nvium  # noqa: F401 registers itself

if __name__ == "__main__":
    cli_evaluate()
