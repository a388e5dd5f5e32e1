"""Benchmarks of all-reduce algorithms, of training steps, and of sharding."""
