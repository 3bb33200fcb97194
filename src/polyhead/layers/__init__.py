"""Modules: parameters around an op.  Plain keyword arguments; usable without our configuration."""
