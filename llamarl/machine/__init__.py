"""What this machine can do, and how it is asked.

kernels      kernels.py        in C, compiled on first use from decode.c and train.c
on a GPU     triton_kernels.py the elementwise operations between two matrix products, fused
the fastest  choice.py         of several ways to compute one thing, by measurement
precision    precision.py      which of PyTorch's settings gives float32 products
memory       allocator.py      freed memory is kept, not returned
waiting      waiting.py        how long threads spin before they sleep
"""
