"""Train exits and routers for an existing model."""
