"""What scores or annotates completions: functions, judges, encoders, models, and their sums."""
