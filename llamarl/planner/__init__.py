"""The planner predicts and simulates runs before they start (docs/scaling.md)."""
