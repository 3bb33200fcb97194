"""Schug et al. 2024, "Attention as a hypernetwork": rows of Table A1, runs by figure, claims, and how each is drawn."""
