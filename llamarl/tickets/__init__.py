"""Tickets, that is prompts by number: which may start, which are trained on next, who works on
which.
"""
