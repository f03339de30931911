"""Learning: what stands between scored groups and an optimizer step. Pure functions; no process groups but in optim.clip_grad_norm.

    groups --advantages--> [G] a group --pack--> PackedBatch --decoder(head=make_head)--> trainer_logprobs --loss--> backward --optim
"""
