"""HTML pages: `report` (scores, codes and attention of runs) and `explore` (one text)."""
