"""A machine with GPUs, pretended on one without: what would fail there, fails here.

``devices`` makes tensors that say they are on CUDA and are computed on the CPU. ``torch_cuda`` is
the rest of ``torch.cuda``. ``communicators`` holds the backends to their rules and writes down what
every rank calls, and ``replay`` finds out whether NCCL could have run it. ``job`` puts a process
on such a machine.
"""
