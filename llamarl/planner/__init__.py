"""Predicts a run's seconds and memory before it starts, and looks for the split of GPUs that makes
its step shortest.

    python -m llamarl.planner fit --probe sheet=NAME.yaml
    python -m llamarl.planner search --gpus 16 --gpu-memory 80 model.path=DIR
    python -m llamarl.planner simulate max_lag=1,2,4 overcommit=0,8,auto

Importing it imports no torch; a probe alone does, because it times the true parts.
"""
