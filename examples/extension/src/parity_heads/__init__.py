"""Parity of bits as a task of polyhead, heads of our own, and recipes that train them."""
