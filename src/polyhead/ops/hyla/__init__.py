"""HYLA: the equation (reference.py), tiles in PyTorch (blocked.py), Triton kernels, and a linear form (state.py)."""
