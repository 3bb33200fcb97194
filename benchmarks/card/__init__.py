"""What benchmarks/on_card.py measures."""
