"""Hooks that people really write."""

DIVIDE = "        parameter.grad.div_(self.comms.world_size)\n"
START = "        self.works.append(self.comms.all_reduce(parameter.grad, async_op=True))\n"
REGISTER = "parameter.register_post_accumulate_grad_hook(self._ready)"
LOOP = "        for parameter in model.parameters():\n"
WAIT = "        for work in self.works:\n            work.wait()\n"
CLEAR = "        self.works.clear()\n"

WRONG = {
    "the hook waits": (
        {START: "        self.comms.all_reduce(parameter.grad)\n"},
        "A hook waits for the other ranks",
    ),
    "all start in finish": (
        {
            LOOP: "        self.model = model\n" + LOOP,
            DIVIDE + START: "        pass\n",
            WAIT: "        for p in self.model.parameters():\n"
            "            if p.grad is not None:\n"
            "                self.comms.all_reduce_mean(p.grad)\n",
        },
        "each all-reduce begins when.*finish\\(\\) starts them",
    ),
    "the parameter, called grad, is averaged": (
        {
            "parameter: torch.Tensor": "grad: torch.Tensor",
            "        assert parameter.grad is not None\n": "",
            DIVIDE + START: "        grad.div_(self.comms.world_size)\n"
            "        self.works.append(self.comms.all_reduce(grad, async_op=True))\n",
        },
        "What has to be averaged is parameter.grad",
    ),
    "a tensor hook that does not wait": (
        {
            REGISTER: "parameter.register_hook(self._ready)",
            "        assert parameter.grad is not None\n" + DIVIDE + START: (
                "        gradient = parameter / self.comms.world_size\n"
                "        self.works.append(self.comms.all_reduce(gradient, async_op=True))\n"
                "        return gradient\n"
            ),
        },
        "A tensor hook is called with what",
    ),
    "finish forgets to wait": ({WAIT: ""}, "finish\\(\\) must call wait\\(\\)"),
    "finish waits for the last": (
        {WAIT: "        self.works[-1].wait()\n"},
        "Wait for every all-reduce, not for the last",
    ),
    "the works are never thrown away": ({CLEAR: ""}, "empty it in finish"),
    "the sum": ({DIVIDE: ""}, "That is the sum: divide"),
    "a copy that nobody reads": (
        {
            DIVIDE + START: "        mean = parameter.grad / self.comms.world_size\n"
            "        self.works.append(self.comms.all_reduce(mean, async_op=True))\n"
        },
        "the mean was not written to .grad",
    ),
    "divided twice": (
        {START: START.replace("all_reduce", "all_reduce_mean")},
        "That is divided twice",
    ),
    "a hook for each use": (
        {LOOP: "        for _, parameter in model.named_parameters(remove_duplicate=False):\n"},
        "has one gradient, and needs one hook",
    ),
    "divided in finish": (
        {
            LOOP: "        self.model = model\n" + LOOP,
            DIVIDE: "",
            CLEAR: CLEAR + "        for p in self.model.parameters():\n"
            "            if p.grad is not None:\n"
            "                p.grad /= self.comms.world_size\n",
        },
        "Divide in the hook, what has just come",
    ),
}
