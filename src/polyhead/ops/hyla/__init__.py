"""HYLA: the equation (reference.py), C++ (native.py) and Triton kernels."""
