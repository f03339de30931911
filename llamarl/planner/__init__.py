"""Seconds and memory of a run, before there is one."""
