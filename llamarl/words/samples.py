"""The words of samples (llamarl/learning/samples.py), for those who write and who read them."""

from __future__ import annotations

# The numbers about a group, in their order in its line: its ticket; its least, mean and largest
# reward; completions that are trained on; the lag of its oldest token in steps; whether anything
# was learned from it.
GROUP_FIELDS = ("ticket", "least", "mean", "most", "trained", "lag", "taught")
