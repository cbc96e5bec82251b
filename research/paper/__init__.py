"""The paper's tables and figures, and when exits pay."""
