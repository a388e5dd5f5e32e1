"""Another right step: the whole state in a broadcast for each dtype, and one flat all-reduce, which
also carries the number of samples."""

import torch


def start_equal(model, comms):
    by_dtype = {}
    for tensor in [p.detach() for p in model.parameters()] + list(model.buffers()):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        comms.broadcast(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def naive_step(model, loss_fn, optimizer, x, y, comms):
    model.zero_grad(set_to_none=True)
    (len(x) * loss_fn(model(x), y)).backward()
    used = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(p.grad.flatten() for p in used), used[0].grad.new_tensor([len(x)])])
    comms.all_reduce(flat)
    flat[:-1] /= flat[-1].item()
    *parts, _ = flat.split([*(p.numel() for p in used), 1])
    for p, part in zip(used, parts, strict=True):
        p.grad = part.view_as(p)
    optimizer.step()
