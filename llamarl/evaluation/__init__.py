"""Evaluations: held-out prompts are completed, scored and measured. The main job, SFT and
recipes/evaluate.py do it in the same steps.

    prompts --ask.complete--> EvalCompletion --ask.score--> ScoredAnswer
    ScoredAnswer --metrics.Evaluations--> Evaluation, once a policy version has all its answers
    Evaluation --judges.Judges--> its metrics with those of gold, perplexity and diversity
"""
