"""A file has one section, or a few that are read together: the dataclasses, and the rules about
their values.

A rule is an `if` and a `found.add(REMEDY, *KEYS)`, and at least one of its keys is of the file.
A rule takes what it reads of other sections: a section's settings, or a plain value.
"""
