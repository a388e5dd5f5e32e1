"""Other right hooks: on the nodes of autograd that accumulate, with copies that travel."""

import torch


class OverlappedGradients:
    def __init__(self, model, comms):
        self.comms, self.under_way = comms, {}
        self.nodes = []  # nobody else keeps them
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, p=parameter: self._ready(p))
                self.nodes.append(node)

    def _ready(self, parameter):
        if parameter.grad is None:
            return
        copy = parameter.grad.clone()
        work = torch.distributed.all_reduce(copy, async_op=True)
        self.under_way[parameter] = copy, work

    def finish(self):
        while self.under_way:
            parameter, (copy, work) = self.under_way.popitem()
            work.wait()
            parameter.grad.copy_(copy / self.comms.world_size)
