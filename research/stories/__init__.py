"""The bundled model, its corpus, and what its stories keep."""
