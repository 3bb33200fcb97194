"""Relational and dual attention (Altabaa et al. 2024, Altabaa and Lafferty 2024): models at equal
parameters, runs, claims, figures."""
