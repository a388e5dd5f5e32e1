"""Another right one: the library's, with several segments a chunk under way."""

from microddp.allreduce import ring_all_reduce

__all__ = ["ring_all_reduce"]
