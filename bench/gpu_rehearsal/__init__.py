"""`make gpu-rehearsal`: the path of a GPU job, run on torch's CPU build without a GPU.

    cuda_guard.cpp   what torch's C++ asks of a CUDA device
    fake_cuda.py     a machine with GPUs, on which shapes, types and devices are real and numbers are not
    rehearsal.py     one case: what training, evaluation and generation do on such a machine, and what must be true
    finetuning.py    what differs in fine-tuning
    cases.py         which cases there are

It finds devices that are mixed up, wrong types, arguments that a CUDA kernel refuses, views that its output does not
allow, a second read by the host in a step, graph breaks, kernels of Triton's that do not compile or fit, and memory
that differs from the plan. It cannot find wrong numbers, races between streams, what NCCL does, or what is slow.
"""
