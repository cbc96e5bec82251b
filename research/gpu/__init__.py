"""The parts of `research.on_gpu`, and what needs no GPU to be known about one."""
