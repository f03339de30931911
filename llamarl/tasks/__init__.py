"""Tasks: where prompts come from. Importing it imports no torch (reward workers do)."""
