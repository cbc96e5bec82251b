"""A place in the device's queue that the host can wait for."""

import torch


class Fence:
    """Without CUDA there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Behind all that is queued now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has come to the place that was set last."""
        if self._event is not None:
            self._event.synchronize()
