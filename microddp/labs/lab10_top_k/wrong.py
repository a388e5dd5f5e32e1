"""Averages by the largest values that people really write."""

CHOSEN = "        places = rest.abs().topk(min(self.k, len(rest))).indices\n"
REST = "        rest = gradient.clone() if self.residual is None else gradient + self.residual\n"
KEPT = "        self.residual = rest\n"
ADDED = (
    "        for value, place in zip(values, theirs, strict=True):\n"
    "            gradient.index_add_(0, place, value, alpha=1 / self.comms.world_size)\n"
)

WRONG = {
    "the largest with their signs": (
        {"rest.abs().topk": "rest.topk"},
        "choose by abs",
    ),
    "magnitudes are sent": (
        {"all_gather(rest[places])": "all_gather(rest[places].abs())"},
        "Those are magnitudes",
    ),
    "rank 0's places for all": (
        {"index_add_(0, place, value": "index_add_(0, theirs[0], value"},
        "added at rank 0's places",
    ),
    "divided by how many sent a value": (
        {
            ADDED: "        count = torch.zeros_like(gradient)\n"
            "        for value, place in zip(values, theirs, strict=True):\n"
            "            gradient.index_add_(0, place, value)\n"
            "            count.index_add_(0, place, torch.ones_like(value))\n"
            "        gradient /= count.clamp(min=1)\n"
        },
        "who does not send a value counts as 0",
    ),
    "one of two equal places is lost": (
        {
            ADDED: "        gradient[theirs.flatten().long()] += values.flatten()\n"
            "        gradient /= self.comms.world_size\n"
        },
        "only one of them arrived.*with index_add_",
    ),
    "a mean that is returned": (
        {"        gradient.zero_()\n": "        gradient = torch.zeros_like(gradient)\n"},
        "write the mean into it, in place",
    ),
    "the rest is forgotten": ({KEPT: ""}, "What was not sent is forgotten"),
    "what was sent is kept, too": ({"        rest[places] = 0\n": ""}, "and so sent again"),
    "the residual is overwritten": (
        {
            "        rest[places] = 0\n" + KEPT: "        self.residual = gradient.clone()\n"
            "        self.residual[places] = 0\n"
        },
        "overwritten with what is left of the last gradient alone",
    ),
    "what is kept is what the mean lacks": (
        {
            "        rest[places] = 0\n" + KEPT: "",
            ADDED: ADDED + "        self.residual = rest - gradient\n",
        },
        "Subtract what this rank sent itself",
    ),
    "the residual is the gradient's memory": (
        {
            REST: "        rest = gradient\n"
            "        if self.residual is not None:\n"
            "            rest += self.residual\n"
        },
        "the same memory, so the mean became the residual",
    ),
    "chosen before the residual is added": (
        {CHOSEN: CHOSEN.replace("rest.abs()", "gradient.abs()")},
        "chosen before the residual is added",
    ),
    "the residual is not sent": (
        {"all_gather(rest[places])": "all_gather(gradient[places])"},
        "The residual chooses the places, but is not sent",
    ),
    "one residual for all": (
        {
            "self.residual = rest": "TopK.residual = rest",
            "        self.residual: torch.Tensor | None = None\n": "",
            "    def __init__": "    residual = None\n\n    def __init__",
        },
        "keep the residual in self",
    ),
    "k values of fewer": (
        {"min(self.k, len(rest))": "self.k"},
        r"in average .*That was with 5 values and k=7: send min\(k, size\)",
    ),
    "an all-reduce of the masked gradient": (
        {
            "        values, theirs = self.comms.all_gather(rest[places]), "
            "self.comms.all_gather(places.int())\n": "        masked = torch.zeros_like(rest)\n"
            "        masked[places] = rest[places]\n",
            ADDED: "        self.comms.all_reduce_mean(masked)\n        gradient.copy_(masked)\n",
        },
        "The whole tensor travels, with its zeros",
    ),
    "places in int64": ({"places.int()": "places"}, "send them as int32"),
    "places in one byte": (
        {"places.int()": "places.byte()", "(0, place, value": "(0, place.int(), value"},
        "Send places as int32",
    ),
    "its own values first": (
        {
            ADDED: "        n = self.comms.world_size\n"
            "        for i in range(n):\n"
            "            rank = (self.comms.rank + i) % n\n"
            "            gradient.index_add_(0, theirs[rank], values[rank], alpha=1 / n)\n"
        },
        "same bits on every rank.*in the same order",
    ),
}
