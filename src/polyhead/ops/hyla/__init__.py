"""HYLA: the equation (reference.py), tiles in PyTorch (blocked.py), Triton kernels, sums instead of keys (state.py)."""
