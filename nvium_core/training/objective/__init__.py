"""What each training method builds and minimises."""
