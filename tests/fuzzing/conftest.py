"""Fixtures of the server's tests."""

from tests.server.conftest import byte_model, no_log_lines, server

__all__ = ["byte_model", "no_log_lines", "server"]
