"""Relational and dual attention (Altabaa et al. 2024 and 2025): models at equal parameters, runs, claims, figures."""
