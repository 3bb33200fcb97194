"""HYLA: the equation (reference.py), C++ (native.py), Triton kernels, and a linear form (state.py)."""
