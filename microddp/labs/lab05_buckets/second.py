"""Other right buckets: planned one dtype after the other, and .grad is a view of its bucket."""

from functools import partial

import torch.distributed as dist


def plan_buckets(tensors, caps):
    plan = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        size, limit, members = 0, caps[0], []
        for i, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                continue
            if size >= limit:
                plan.append(members)
                size, limit, members = 0, caps[1], []
            members.append(i)
            size += tensor.nbytes
        plan.append(members)
    return sorted(plan)


class Bucket:
    def __init__(self, parameters):
        self.parameters = parameters
        counts = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(counts))
        parts = self.flat.split(counts)
        self.views = [part.view_as(p) for p, part in zip(parameters, parts, strict=True)]
        self.came, self.work = set(), None


class BucketHooks:
    def __init__(self, model, comms, caps):
        self.n = comms.world_size
        parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        plan = plan_buckets(parameters, caps)
        self.buckets = [Bucket([parameters[i] for i in members]) for members in plan]
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, slot))

    def _ready(self, bucket, slot, parameter):
        bucket.views[slot].copy_(parameter.grad)
        parameter.grad = bucket.views[slot]
        bucket.came.add(slot)
        for each in self.buckets:
            if len(each.came) < len(each.parameters):
                break
            if each.work is None:
                each.work = dist.all_reduce(each.flat, async_op=True)

    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= self.n
            bucket.came, bucket.work = set(), None
