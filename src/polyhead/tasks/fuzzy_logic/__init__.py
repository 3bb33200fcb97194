"""Fuzzy logic: the task, and the scores of solvers that do not compose (baselines.py)."""
