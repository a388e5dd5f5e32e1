"""The doctor: a report on a machine and on training on it, or on a job that hangs.

``python -m microddp.doctor`` says what the machine offers (``machine``), then starts jobs as
torchrun does (``job``), in which the ranks compare what microddp computes with what it should
(``checks``), and runs a few chapters. Its report can be attached to a bug report.

``python -m microddp.doctor DIR`` says instead why a job hangs (``hang``, ``diagnosis``).
"""
