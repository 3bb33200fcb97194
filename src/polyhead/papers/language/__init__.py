"""Language models of both papers and of Stanford's course: models, runs, claims, curves."""
