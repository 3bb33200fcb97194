"""Disentangled relational attention: the equation (op.py)."""
