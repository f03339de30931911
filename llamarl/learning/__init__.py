"""Learning: the way from scored groups to new weights. update.py makes a step of it;
docs/algorithms.md tells its order.

groups --shaping, advantages--> Targets --pack--> PackedBatch
       --decoder(head=make_head)--> trainer_logprobs --loss--> optim

Ranks communicate through comm/together.py, optim.clip_grad_norm and the decoder alone.
"""
