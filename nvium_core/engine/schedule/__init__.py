"""What is decided on the host: whose rows run next, and on which pages. No PyTorch."""
