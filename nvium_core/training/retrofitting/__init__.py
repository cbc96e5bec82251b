"""Exits for a model that exists: made to speak first, and only then offered to routers."""
