"""The paper's start of a retrofit: exits are put on a pretrained Llama as they are, and no answer of its changes.

What training does to it is another matter. The paper finds that all early exits die (section on retrofitting), and
its objective says why. Router heads start near zero, so 1 − 2^(1−N) of the mass is on early exits, whose π_k, a
middle layer's rows through the last layer's norm and head, give next to nothing to the token that comes. Moving it
all to the last exit lowers L_mix by (N − 1) log 2, 2.08 nats for four exits; what β asks for that is β (1 − l_1 / L)
at most, 0.075 at β 0.1. From then on, a little for exit k pays only where the router may expect
π_k / π_N > 1 − β (1 − l_k / L), and what exit k learns is in proportion to p_k π_k / π_mix: without mass it does not
learn. Balancing routers first would not hold them: it prices the collapse at Σ 1 / (N − k + 1)² = 0.42, less than the
collapse gains.
"""

from collections.abc import Sequence
from os import PathLike

import torch

from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.retrofitting.shape import require_plain, with_exits


def retrofit(llama_folder: str | PathLike[str], exit_layers: Sequence[int]) -> NviumForCausalLM:
    """The N-vium, in float32, of a Llama (folder or Hub name) that may speak after `exit_layers`, the last at its end.

    The early exits' norms start as the final one, adapters as the identity, routers as in any new N-vium (drawn from
    torch's generator). The head, tied to the embedding or not, serves all exits. Raises `CheckpointError` for a folder
    that cannot be read and `RetrofitError` for what cannot be retrofitted.
    """
    llama = NviumForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    require_plain(llama.config, llama_folder)
    model = NviumForCausalLM(with_exits(llama.config, exit_layers))
    model.model.load_state_dict(llama.model.state_dict())
    model.lm_head.load_state_dict(llama.lm_head.state_dict())
    final_norm = llama.get_parameter("exits.0.norm.weight")
    for number in range(model.config.num_exits):
        model.get_parameter(f"exits.{number}.norm.weight").data.copy_(final_norm)
    model.generation_config = llama.generation_config
    return model
