"""Rings that people really write."""

SENDRECV = "comms.sendrecv(mine, right, incoming, left)"
LAST_LINE = (
    "        comms.sendrecv(chunks[(rank + 1 - i) % n], right, chunks[(rank - i) % n], left)\n"
)

WRONG = {
    "whole tensors go round": (
        {
            "    chunks = tensor.tensor_split(n)\n": "    mine = tensor.clone()\n",
            "        mine, theirs = chunks[(rank - i) % n], chunks[(rank - i - 1) % n]\n": "",
            "torch.empty_like(theirs)": "torch.empty_like(tensor)",
            "        COMBINE[op](theirs, incoming, out=theirs)\n    for i in range(n - 1):\n": (
                "        COMBINE[op](tensor, incoming, out=tensor)\n        mine = incoming\n"
            ),
            LAST_LINE: "",
        },
        "same bits on every rank.*an order of its own",
    ),
    "only half of the way": (
        {"    for i in range(n - 1):\n" + LAST_LINE: ""},
        "never came here",
    ),
    "the second half adds, too": (
        {
            LAST_LINE: "        theirs = chunks[(rank - i) % n]\n"
            "        incoming = torch.empty_like(theirs)\n"
            "        comms.sendrecv(chunks[(rank + 1 - i) % n], right, incoming, left)\n"
            "        COMBINE[op](theirs, incoming, out=theirs)\n"
        },
        "overwrite with it",
    ),
    "it divides": (
        {LAST_LINE: LAST_LINE + "    tensor /= n\n"},
        "an all-reduce does not divide",
    ),
    "it divides by the rank": (
        {LAST_LINE: LAST_LINE + "    tensor /= rank\n"},
        "each rank's value once in each sum got inf",
    ),
    "the op is forgotten": ({"COMBINE[op]": 'COMBINE["sum"]'}, "That is the sum, where max"),
    "sizes that n does not divide": (
        {"tensor.tensor_split(n)": "tensor.split(len(tensor) // n)"},
        "do not cover the tensor",
    ),
    "send first, receive then": (
        {
            SENDRECV: "comms.send(mine, right)\n        comms.recv(incoming, left)",
        },
        "All ranks send, and none receives.*waiting in send.*waiting in send",
    ),
    "everyone to everyone": (
        {
            "    for i in range(n - 1):\n" + LAST_LINE: "    for d in range(1, n):\n"
            "        done = chunks[(rank + 1) % n]\n"
            "        comms.sendrecv(\n"
            "            done, (rank + d) % n, chunks[(rank - d + 1) % n], (rank - d) % n\n"
            "        )\n"
        },
        "only to the right neighbour.*uses one link each way",
    ),
    "the backend's": (
        {"    chunks = tensor.tensor_split(n)\n": "    return comms.all_reduce(tensor, op)\n"},
        "That is the backend's all-reduce",
    ),
    "a copy": (
        {"    chunks = tensor.tensor_split(n)\n": "    chunks = tensor.clone().tensor_split(n)\n"},
        "was not written back",
    ),
}
