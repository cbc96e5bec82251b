"""C++ that runs a whole Step in one call on a CPU, without the overhead of PyTorch's operators.

The C++ is compiled on the machine that runs it. PyTorch's layers run instead if there is no compiler, or if the model
has parts that the C++ does not implement.
"""
