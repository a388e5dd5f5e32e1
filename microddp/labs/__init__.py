"""Labs: a step of the course for the reader to build, and checks of what it does.

``python -m microddp.labs --help`` says how they are used.
"""
