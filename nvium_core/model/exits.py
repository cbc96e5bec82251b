"""Exits and their routers. At an exit, the model may emit a token before it computes the remaining layers.

Shapes: X any row dimensions, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from nvium_core.model.config import NviumConfig
from nvium_core.model.llama import RMSNorm

CONTINUE, EXIT = 0, 1  # indices of the router's logits


class Router(nn.Module):
    """w(x) = softmax(W · RMSNorm(MLP(x)) + b) over {continue, exit} (paper, section on routers)."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.router_hidden_size or 0
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.head = nn.Linear(width, 2)
        self.temperature = config.router_temperature

    def forward(self, x_XD: Tensor) -> Tensor:
        """Return log w [X, 2]: the log-probabilities of continuing and of exiting, in float32 or better."""
        inner_XD = wide_linear(self.fc2, F.gelu(wide_linear(self.fc1, x_XD)))
        with maybe_autocast(x_XD.device.type, enabled=False):
            precise_XD = inner_XD.to(torch.promote_types(inner_XD.dtype, torch.float32))
            logits_X2 = precise_linear(self.head, self.norm(precise_XD))
            return F.log_softmax(logits_X2 / self.temperature, dim=-1)


class Gate(nn.Module):
    """A linear router: w(x) = sigmoid(W · x + b) (Ouro, arXiv 2510.25741)."""

    temperature = 1.0

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(self, x_XD: Tensor) -> Tensor:
        """Return log w [X, 2] like `Router`."""
        with maybe_autocast(x_XD.device.type, enabled=False):
            logit_X1 = precise_linear(self.head, x_XD)
            return F.logsigmoid(torch.cat([-logit_X1, logit_X1], dim=-1))


def wide_linear(layer: nn.Linear, x_XD: Tensor) -> Tensor:
    """Apply the layer in float32 or better. In training, under autocast, apply it in autocast's precision."""
    device = x_XD.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return precise_linear(layer, x_XD)
    product_XD: Tensor = layer(x_XD)
    return product_XD


def precise_linear(layer: nn.Linear, x_XD: Tensor) -> Tensor:
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    return F.linear(x_XD.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


class Adapter(nn.Module):
    """o = x + down(SiLU(up(x))), before the shared head. It is initialised to the identity."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__()
        inner = config.adapter_hidden_size or 0
        self.up = nn.Linear(config.hidden_size, inner, bias=False)
        self.down = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x_XD: Tensor) -> Tensor:
        return x_XD + self.down(F.silu(self.up(x_XD)))


class Head(nn.Linear):
    """The head W_lm, which all exits share. Logits are s · W x, or c · tanh(s · W x / c) if they have a cap c."""

    def __init__(self, config: NviumConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.scale, self.cap = config.logit_scale, config.logit_cap

    def forward(self, o_XD: Tensor) -> Tensor:
        logits_XV = super().forward(o_XD)
        if self.scale != 1:
            logits_XV = logits_XV * self.scale
        return logits_XV if self.cap is None else (logits_XV / self.cap).tanh() * self.cap


class Exit(nn.Module):
    """Norm, adapter and router. The shared head W_lm belongs to the model.

    Without a router, w is 1 at the last exit, and 0 at the others, which routing then never chooses. If the model norms
    its loops (`norms_loops`), an exit has no norm of its own.
    """

    def __init__(self, config: NviumConfig, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.norm = nn.Identity() if config.norms_loops else RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.router = None if is_last else Gate(config) if config.router == "linear" else Router(config)
        self.adapter = Adapter(config) if config.adapter_hidden_size else nn.Identity()

    def forward(self, h_XD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log w [X, 2] and the head's input o [X, D]."""
        x_XD = self.norm(h_XD)
        return self.route(x_XD), self.adapter(x_XD)

    def route(self, x_XD: Tensor) -> Tensor:
        """Return log w [X, 2] of normalised rows."""
        if self.router is not None:
            log_w_X2: Tensor = self.router(x_XD)
            return log_w_X2
        dtype = torch.promote_types(x_XD.dtype, torch.float32)
        log_w_X2 = x_XD.new_zeros(*x_XD.shape[:-1], 2, dtype=dtype)
        log_w_X2[..., CONTINUE if self.is_last else EXIT] = -torch.inf
        return log_w_X2
