"""What a training method builds and minimises."""
