"""Relational attention: equation (reference.py), PyTorch's kernels (sdpa.py), C++ (native.py)."""
