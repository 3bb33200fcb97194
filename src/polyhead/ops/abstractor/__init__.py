"""Attention to symbols, as in the Abstractor: the equation (op.py) and PyTorch's own kernels (sdpa.py)."""
