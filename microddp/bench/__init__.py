"""Benchmarks: of all-reduce algorithms, and of ways to train."""
