"""llamarl: asynchronous RL post-training of LLMs in native PyTorch. Importing it imports no torch.

Import it before torch: it says how the threads of torch wait for each other
(llamarl.machine.waiting).
"""

from llamarl.machine.waiting import wait_briefly

__version__ = "0.1.0"

wait_briefly()
