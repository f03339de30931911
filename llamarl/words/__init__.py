"""Words of settings, names of columns, texts of others, and functions by their import path.

Standard library only.
"""
