"""Learning: what stands between scored groups and an optimizer step. Only optim.clip_grad_norm and update.py communicate.

groups --advantages--> [G] a group --pack--> PackedBatch --decoder(head=make_head)--> trainer_logprobs --loss--> optim
"""
