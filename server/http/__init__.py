"""The HTTP layers around the app: connections, keys, limits, draining."""
