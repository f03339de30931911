"""Scorers and annotators of completions: functions, judges, encoders, models, and their sums."""
