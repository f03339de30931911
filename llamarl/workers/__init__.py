"""Processes that run the user's code: what they may use, and how they end.

    pool           pool.py          starts workers, waits for them, replaces those that fail; its
                                    owner is called when there is something to poll
    one worker     process.py       its pipes, its deadline and its end, as the pool sees them
    in the worker  guard.py         its pipes, its limits, and the end of what it starts
    memory         memory_limit.py  what a worker and all that it starts may hold
    a sandbox      sandbox.py       walls around a program that a policy wrote (sandbox_init.py)

A worker has this user's rights: it bounds time, memory and processes, and is no sandbox.
"""
