"""Softmax attention: the equation (reference.py), PyTorch's own kernels (sdpa.py) and native code (native.py)."""
