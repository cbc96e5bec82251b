"""Log lines kept off the terminal."""

from tests.server.conftest import no_log_lines

__all__ = ["no_log_lines"]
