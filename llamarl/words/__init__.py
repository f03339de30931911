"""Words that a user gives: which there are, the nearest of them, a function by its import path.

Standard library only.
"""
