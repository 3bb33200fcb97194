"""Parity of bits as a task of polyhead, and recipes for it."""
