"""Attention to symbols, as in the Abstractor: the equation (reference.py) and PyTorch's own kernels (sdpa.py)."""
