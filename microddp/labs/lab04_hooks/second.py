"""Another right one: the library's."""

from microddp.hooks import AllReduceHooks as OverlappedGradients

__all__ = ["OverlappedGradients"]
