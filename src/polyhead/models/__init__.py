"""The one transformer, its two ends, its initialisation and its size."""
