"""Character-level mathematics: the task, its questions (modules.py), its tokens and files (text.py)."""
