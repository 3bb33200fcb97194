"""Relational attention: equation (reference.py), PyTorch's kernels (sdpa.py), tiles (blocked.py), C++, Triton
kernels."""
