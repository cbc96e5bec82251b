"""Run the server on a Ray cluster: `serve run server.ray_app:app`. Reads its settings from `NVIUM_…` variables."""

from server.replicas.deployment import application
from server.settings import read_settings

app = application(read_settings({}))
