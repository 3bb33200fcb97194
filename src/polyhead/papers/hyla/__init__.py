"""Schug et al. 2024, "Attention as a hypernetwork": the models of Table A1; runs, claims and drawing of each figure."""
