"""The parity campaign: cases, their arrays, oracles beside every code, and bounds."""
