"""Bucket plans and hooks that people really write."""

FULL = "if sum(tensors[j].nbytes for j in bucket) >= cap:"
APPEND = "        bucket.append(i)\n"
WAIT = "            work.wait()\n"
RESET = (
    "        self.missing = [len(bucket) for bucket in self.buckets]\n        self.sent.clear()\n"
)
SEND = (
    "        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:\n"
    "            bucket = self.buckets[len(self.sent)]\n"
    "            gradients = [p.grad.flatten() for p in bucket if p.grad is not None]\n"
    "            flat = torch.cat(gradients) / self.comms.world_size\n"
    "            self.sent.append((flat, self.comms.all_reduce(flat, async_op=True)))\n"
)
GRADIENTS = "[p.grad.flatten() for p in bucket if p.grad is not None]"
COUNT = "        self.missing[self.index[parameter]] -= 1\n"
BEGIN = "        self.sent: list"

WRONG = {
    "the cap is asked before a tensor is added": (
        {
            APPEND: "",
            FULL: "if bucket and sum(tensors[j].nbytes for j in [*bucket, i]) > cap:",
            "            filled[tensor.dtype] += 1\n": "            filled[tensor.dtype] += 1\n"
            "        filling.setdefault(tensor.dtype, []).append(i)\n",
        },
        "Add it, then ask",
    ),
    "full only above the cap": ({FULL: FULL.replace(">=", ">")}, "holds exactly its cap is full"),
    "dtypes mixed": (
        {"tensor.dtype": "None"},
        "two dtypes in one bucket",
    ),
    "what is left is forgotten": (
        {"return plan + list(filling.values())": "return plan"},
        "What is left in the end",
    ),
    "forward order": ({"if p.requires_grad][::-1]": "if p.requires_grad]"}, "reverse them"),
    "one by one": (
        {"plan = plan_buckets(parameters, caps)": "plan = [[i] for i in range(len(parameters))]"},
        "Those are the gradients one by one",
    ),
    "all sent in finish": (
        {
            SEND: "",
            "        for bucket, (flat, work) in": SEND + "        for bucket, (flat, work) in",
        },
        "finish\\(\\) starts them",
    ),
    "sent as they fill": (
        {
            SEND: "        index = self.index[parameter]\n"
            "        bucket = self.buckets[index]\n"
            "        if not self.missing[index]:\n"
            f"            flat = torch.cat({GRADIENTS}) / self.comms.world_size\n"
            "            work = self.comms.all_reduce(flat, async_op=True)\n"
            "            self.sent.append((flat, work, bucket))\n",
            "for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):": (
                "for flat, work, bucket in self.sent:"
            ),
        },
        "all ranks send the same ones in the same order",
    ),
    "in the order in which they came": (
        {
            BEGIN: "        self.came = [[] for _ in self.buckets]\n" + BEGIN,
            COUNT: COUNT + "        self.came[self.index[parameter]].append(parameter)\n",
            "            bucket = self.buckets[len(self.sent)]\n": (
                "            bucket = self.came[len(self.sent)]\n"
            ),
            "zip(self.buckets, self.sent, strict=True)": "zip(self.came, self.sent, strict=True)",
            RESET: RESET + "        self.came = [[] for _ in self.buckets]\n",
        },
        "not in that in which they came",
    ),
    "copied before the wait": (
        {
            WAIT: "",
            "part.view_as(parameter)\n": "part.view_as(parameter).clone()\n" + WAIT,
        },
        "taken before wait\\(\\) returned",
    ),
    "finish waits for the last": (
        {
            WAIT: "",
            "        for bucket, (flat, work) in": "        self.sent[-1][1].wait()\n"
            "        for bucket, (flat, work) in",
        },
        "Wait for every all-reduce, not for the last",
    ),
    "all in float32": (
        {
            "torch.cat(gradients) /": "torch.cat(gradients).float() /",
            "part.view_as(parameter)": "part.view_as(parameter).to(parameter.dtype)",
        },
        "in its own dtype",
    ),
    "never emptied": (
        {
            BEGIN: "        self.came = [[] for _ in self.buckets]\n" + BEGIN,
            COUNT: COUNT + "        self.came[self.index[parameter]].append(parameter.grad)\n",
            GRADIENTS: "[g.flatten() for g in self.came[len(self.sent)]]",
            "parts = torch.split(flat, [p.numel() for p in bucket])": (
                "came = self.came[self.index[bucket[0]]]\n"
                "            parts = flat.split([g.numel() for g in came])"
            ),
            "for parameter, part in zip(bucket, parts, strict=True):": (
                "for gradient, part in zip(came, parts, strict=True):"
            ),
            "parameter.grad = part.view_as(parameter)": "gradient.copy_(part.view_as(gradient))",
        },
        "keeps what it held in the step before",
    ),
    "one first bucket for all dtypes": (
        {"filled[tensor.dtype]": "filled[torch.float32]"},
        "a first one of its own",
    ),
    "nothing is returned": (
        {"    return plan + list(filling.values())": "    plan += list(filling.values())"},
        "got NoneType Return what was planned",
    ),
    "counted only once": (
        {RESET: "        self.sent.clear()\n", "self.sent, strict=True": "self.sent, strict=False"},
        "miss all its gradients again",
    ),
}
