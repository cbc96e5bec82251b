"""The paper's experiments and the project's own. It may import the product; the product never imports it."""
