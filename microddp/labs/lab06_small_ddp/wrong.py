"""Wrappers that people really write."""

BROADCAST = (
    "        for tensor in (*module.parameters(), *module.buffers()):\n"
    "            comms.broadcast(tensor.detach())\n"
)
TRAINED = "[p for p in module.parameters() if p.requires_grad]"
OF_ALL_LAYERS = (
    "[p for m in module.modules() for p in m._parameters.values() if p is not None "
    "and p.requires_grad]"
)
BUFFERS = (
    "            for buffer in self.module.buffers():\n"
    "                self.comms.broadcast(buffer)\n"
)
CALL = "        return self.module(*args, **kwargs)\n"
HOOK = (
    "            if self.announced:\n"
    "                self.announced = False\n"
    "                at_end_of_backward(average)\n"
)
ANNOUNCE = "        if torch.is_grad_enabled():\n            self.announced = self.syncs\n"
BUCKETS = "            for bucket in buckets:\n"
GRADS = "torch.zeros_like(p) if p.grad is None else p.grad for p in bucket"
REGISTER = "        for parameter in parameters:\n            parameter.register_post"
DIVIDE = "                flat /= comms.world_size\n"
RESTORE = "        try:\n            yield\n        finally:\n            self.syncs = before\n"

WRONG = {
    "no broadcast at construction": (
        {BROADCAST: ""},
        "rank 0's parameter 0.weight.*Broadcast every parameter",
    ),
    "no broadcast of frozen parameters": (
        {BROADCAST: BROADCAST.replace("*module.parameters()", f"*{TRAINED}")},
        "rank 0's parameter 0.weight.*Broadcast every parameter",
    ),
    "a finish() that forward calls": (
        {
            HOOK: "            pass\n",
            REGISTER: "        self.average = average\n" + REGISTER,
            ANNOUNCE: "        if self.announced:\n            self.average()\n"
            "        self.announced = self.syncs\n",
        },
        "nothing was averaged when backward returned",
    ),
    "an announcement outlives a quiet forward": (
        {
            ANNOUNCE: "        if torch.is_grad_enabled() and self.syncs:\n"
            "            self.announced = True\n"
        },
        "takes back what an earlier one has announced",
    ),
    "only what is saved is broadcast": (
        {
            BROADCAST: BROADCAST.replace(
                "(*module.parameters(), *module.buffers())", "module.state_dict().values()"
            )
        },
        "buffer .*not_saved.*Broadcast every buffer",
    ),
    "the division is forgotten": ({DIVIDE: ""}, "That is the sum: divide"),
    "a shared weight is divided twice": (
        {
            HOOK: "            _parameter.grad /= comms.world_size\n" + HOOK,
            REGISTER: REGISTER.replace("parameters", OF_ALL_LAYERS),
            DIVIDE: "",
        },
        "it was averaged once for each",
    ),
    "frozen parameters are sent": (
        {
            TRAINED: "list(module.parameters())",
            REGISTER: REGISTER.replace("parameters", TRAINED),
        },
        "Frozen parameters are not averaged",
    ),
    "one collective a parameter": (
        {"plan_buckets(parameters, bucket_bytes)": "[[p] for p in parameters]"},
        "9 of up to.*side by side in a flat tensor",
    ),
    "buffers are forgotten": (
        {BUFFERS: "            pass\n"},
        "rank 0's have to come before each forward pass",
    ),
    "buffers are copied after forward": (
        {
            BUFFERS: "            pass\n",
            CALL: "        result = self.module(*args, **kwargs)\n        if self.syncs:\n"
            + BUFFERS
            + "        return result\n",
        },
        "copy buffers before the module is called",
    ),
    "no_sync sends anyway": (
        {"self.announced = self.syncs": "self.announced = True"},
        "no_sync\\(\\) was on, and the gradients were sent",
    ),
    "no_sync sends buffers": (
        {"        if self.syncs:\n": "        if True:\n"},
        "not even buffers are sent",
    ),
    "only the last micro-batch": (
        {
            "        def gradient_came(": "        last = {}\n\n        def gradient_came(",
            GRADS: "last.pop(id(p), torch.zeros_like(p)) for p in bucket",
            REGISTER: "        for p in parameters:\n"
            "            p.register_hook(lambda grad, p=p: last.__setitem__(id(p), grad))\n"
            + REGISTER,
        },
        "what had accumulated in .grad before is lost",
    ),
    "decided at backward": (
        {
            HOOK: "            if self.syncs and not self.announced:\n"
            "                self.announced = True\n"
            "                at_end_of_backward(average)\n",
            BUCKETS: "            self.announced = False\n" + BUCKETS,
            ANNOUNCE: "",
        },
        "It was decided when backward ran",
    ),
    "not restored after an exception": (
        {RESTORE: "        yield\n        self.syncs = before\n"},
        "averaging is still off",
    ),
    "the inner block switches on": (
        {"self.syncs = before": "self.syncs = True"},
        "restore what was before it",
    ),
    "unused parameters are left out": (
        {
            BUCKETS: "            used = [p for p in parameters if p.grad is not None]\n"
            "            for bucket in plan_buckets(used, bucket_bytes):\n"
        },
        "that rank would send more",
    ),
    "a bucket that is not full stays": (
        {
            BUCKETS: BUCKETS + "                if any(p.grad is None for p in bucket):\n"
            "                    continue\n"
        },
        "Some buckets wait for gradients",
    ),
    "what did not come this time is zero": (
        {
            HOOK: "            came.add(id(_parameter))\n" + HOOK,
            "if p.grad is None else": "if id(p) not in came else",
            "            self.announced = self.syncs\n": "            self.announced = self.syncs\n"
            "            self.came.clear()\n",
            "        buckets = plan": "        self.came = came = set()\n        buckets = plan",
        },
        "What an earlier batch has left in .grad is lost",
    ),
    "no mean for who did not use it": (
        {
            "                    parameter.grad = ": (
                "                    if parameter.grad is None:\n"
                "                        continue\n"
                "                    parameter.grad = "
            ),
        },
        "Another rank used it, and steps with the mean",
    ),
    "one announcement for all wrappers": (
        {
            "self.announced": "SmallDDP.announced",
            "        SmallDDP.announced = False  #": "        #",
            "    def __init__": "    announced = False\n\n    def __init__",
        },
        "What is announced is one wrapper's",
    ),
    "an announcement that holds": (
        {
            HOOK: "            if self.announced and not self.queued:\n"
            "                self.queued = True\n"
            "                at_end_of_backward(average)\n",
            BUCKETS: "            self.queued = False\n" + BUCKETS,
            REGISTER: "        self.queued = False\n" + REGISTER,
        },
        "An announcement holds for one backward",
    ),
}
