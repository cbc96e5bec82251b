"""What a run would take, computed from its recipe. Trains nothing."""
