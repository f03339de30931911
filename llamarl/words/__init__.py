"""What settings are made of and the words they take, names of columns, texts of others, and
functions by their import path.

Standard library only, but for pydantic in fields.py and findings.py.
"""
