"""How a Step is carried out: everything that touches tensors."""
