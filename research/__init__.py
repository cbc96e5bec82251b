"""The paper's experiments and the project's own. The product must not import this package."""
