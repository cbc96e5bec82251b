"""`nvium serve`."""

import gc
import os
import signal
from typing import Any

from nvium_core.commands.options import ModelArgument, takes
from nvium_core.options import ServerOptions


@takes(ServerOptions)
def serve(model: ModelArgument = None, **given: Any) -> None:
    """Serve a model over HTTP. Every option may also be set as NVIUM_… in the environment."""
    # Exit on SIGTERM until the server installs its own handler, because PID 1 of a container ignores SIGTERM by
    # default. Exit with `os._exit`, because a module that is being imported may swallow an exception.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    gc.disable()  # until the server is ready: collections take a tenth of its start
    try:
        from nvium_core.text.renderer import RENDERER
        from server.settings import read_settings
        from server.telemetry.logs import configure_logs, logged_if_slow

        settings = read_settings(given if model is None else given | {"model": model})
        configure_logs(settings.log_level)
        if settings.model and not settings.replicas:  # its chat template is probably not ours
            RENDERER.prepare()  # takes as long as the imports below
        with logged_if_slow("starting"):
            if settings.replicas:
                from server.replicas.gateway import run
            else:
                from server.app import run
        run(settings)
    finally:
        gc.enable()
