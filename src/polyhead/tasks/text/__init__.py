"""Language modelling: the task, sources of text, tokenizers, token files, and compressors as baselines."""
