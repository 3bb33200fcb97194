"""Language models of both papers and of the course: models, runs, claims, curves."""
