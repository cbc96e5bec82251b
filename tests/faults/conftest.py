"""Fixtures of the server's tests."""

from tests.server.conftest import byte_model, model_folder, no_log_lines

__all__ = ["byte_model", "model_folder", "no_log_lines"]
