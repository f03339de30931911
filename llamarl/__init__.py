"""llamarl: asynchronous RL post-training of LLMs in native PyTorch. Importing it imports no torch.

Import it before torch: it says how torch's threads wait for each other and how large its pages are (llamarl.native.environment).
"""

from llamarl.native.environment import prepare

__version__ = "0.1.0"

prepare()
