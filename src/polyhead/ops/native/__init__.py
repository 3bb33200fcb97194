"""Native code for CPUs: C++ sources, from a wheel or compiled on first use; library.py loads and calls them."""
