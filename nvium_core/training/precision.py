"""The precision that a device multiplies matrices in fastest."""

import torch


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has it, else float32: a CPU that must imitate it takes three times as long."""
    if device.type != "cpu":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32
