"""Disentangled relational attention: the equation (reference.py)."""
