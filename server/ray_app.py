"""For a Ray cluster: `serve run server.ray_app:app`, with settings as NVIUM_… in the environment."""

from server.replicas.deployment import application
from server.settings import read_settings

app = application(read_settings({}))
