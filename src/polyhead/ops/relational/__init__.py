"""Relational attention: the equation (reference.py), stock attention (sdpa.py), tiles (blocked.py), Triton kernels."""
