"""A section a file: its dataclasses, and the rules about its values.

A rule is an `if` and a `found.add(REMEDY, *KEYS)`, and at least one of its keys is of its section.
Of other sections a rule gets what it reads: a section's settings, or a plain value.
"""
