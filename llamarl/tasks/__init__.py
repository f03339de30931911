"""Tasks: where prompts come from and how completions are scored. Importing it imports no torch
(reward workers do).
"""
