"""A machine asked before it is trusted: what it has, and whether training on it is right.

``python -m microddp.doctor`` says what the machine offers (``machine``), then starts jobs as
torchrun does (``job``), in which the ranks compare what microddp computes with what it should
(``checks``), and runs a few chapters. What it says is a report to attach to a bug report.

``python -m microddp.doctor DIR`` says instead why a job hangs (``hang``, ``diagnosis``).
"""
