"""Pages to look at: `report` (runs: scores, codes, attention) and `explore` (one text)."""
