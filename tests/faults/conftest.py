"""A fixture of the server's tests."""

from tests.server.conftest import no_log_lines

__all__ = ["no_log_lines"]
