"""What a run would take, by arithmetic on its recipe. Trains nothing."""
