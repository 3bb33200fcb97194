"""Softmax attention: the equation (reference.py) and PyTorch's own kernels (sdpa.py)."""
