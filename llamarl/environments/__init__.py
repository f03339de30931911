"""Environments: dialogues of many turns with what answers the policy, in worker processes."""
