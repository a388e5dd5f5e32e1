"""Another right wrapper: a bucket leaves as soon as it is full, and torch.distributed sends it."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class SmallDDP(nn.Module):
    def __init__(self, module, comms, bucket_bytes):
        super().__init__()
        self.wrapped = module
        self.ranks = comms.world_size
        self.quiet = 0  # blocks of no_sync() that are open
        self.waiting = None  # for each bucket the gradients to come; None: nobody averages
        self.buckets, held = [[]], 0
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if held >= bucket_bytes:
                self.buckets.append([])
                held = 0
            self.buckets[-1].append(p)
            held += p.nbytes
            place = len(self.buckets) - 1
            p.register_post_accumulate_grad_hook(lambda p, place=place: self.came(p, place))
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def came(self, p, place):
        if self.waiting is None:
            return
        if not self.asked:
            self.asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        self.waiting[place].discard(id(p))
        while len(self.sent) < len(self.buckets) and not self.waiting[len(self.sent)]:
            self.send()

    def send(self):
        bucket = self.buckets[len(self.sent)]
        flat = torch.cat([self.grad(p).reshape(-1) for p in bucket]) / self.ranks
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    @staticmethod
    def grad(p):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad

    def end(self):
        while len(self.sent) < len(self.buckets):
            self.send()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(mean.view_as(p))
        self.waiting = None

    def forward(self, *args, **kwargs):
        if not self.quiet:
            for buffer in self.wrapped.buffers():
                dist.broadcast(buffer, 0)
        if torch.is_grad_enabled():
            self.waiting = None  # what was announced before, and got no backward
            if not self.quiet:
                self.waiting = [{id(p) for p in bucket} for bucket in self.buckets]
                self.sent, self.asked = [], False
        return self.wrapped(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1
