"""Evaluations of held-out prompts: the questions, their metrics, and the judges that say more."""
