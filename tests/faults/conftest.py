"""The model of the server's tests, in a folder."""

from tests.server.conftest import byte_model, model_folder, no_log_lines

__all__ = ["byte_model", "model_folder", "no_log_lines"]
