"""Steps through PyTorch's layers, operator by operator: any device, any precision."""
