"""HYLA: the equation (reference.py), tiles in PyTorch (blocked.py, tiles.py), C++ (native.py), Triton kernels, and a
linear form (state.py)."""
