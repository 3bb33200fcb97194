"""Native code for CPUs: C++ sources, compiled on first use by library.py, which also calls them."""
