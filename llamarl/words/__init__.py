"""Words that a user gives: which are allowed, the nearest of them, and a function by its import
path.

Standard library only.
"""
