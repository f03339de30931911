"""Builders that test files share, one module a thing. Look here before you write a helper.

group         a Group of scored completions
completion    a Completion as a generator sends it
eval_completion  an EvalCompletion: an answer to a held-out prompt
control       the Control of a world of one rank
ledger        a TicketLedger and its desk
routes        the route of a channel of weights, and the control of one of several ranks
model_config  the ModelConfig of a small decoder
model_directory  a copy of the embedded model, and a random model from a config.json
composing     Hydra's compose, which reads conf/ once
kind_settings  the settings of a model, an encoder, a judge or novelty
rows          a file of rows, such as a task reads
user_module   a module in the user's own directory
console       a terminal and a clock of the test's own
job           a job that runs to its end; a program's output

Scorers and encoders are in tests/scorers.py, tokenizers in tests/made_tokenizers.py, and jobs that
are watched or interrupted in tests/launching.py.
"""
