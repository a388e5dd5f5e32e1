"""HSDP's reductions as people really write them."""

SCATTER = '    part = ring_reduce_scatter(flat, grid.inside, "mean")\n'
REDUCE = '    ring_all_reduce(part, grid.across, "mean")\n'
CUT = "    part = flat.tensor_split(grid.inside.world_size)[grid.inside.rank]\n"

WRONG = {
    "a reduce-scatter over all ranks, as in stage 3": (
        {SCATTER + REDUCE: SCATTER.replace("inside", "everyone")},
        "a part for each of all ranks",
    ),
    "an all-reduce over all ranks": (
        {SCATTER + REDUCE: '    ring_all_reduce(flat, grid.everyone, "mean")\n' + CUT},
        "sent over all ranks",
    ),
    "PyTorch's all-reduce over all ranks": (
        {SCATTER + REDUCE: "    grid.everyone.all_reduce_mean(flat)\n" + CUT},
        "PyTorch's own all_reduce",
    ),
    "swapped dimensions": (
        {
            SCATTER: SCATTER.replace("inside", "across"),
            REDUCE: REDUCE.replace("across", "inside"),
        },
        "dimensions of the grid are swapped",
    ),
    "a sum": ({', "mean"': ""}, "A sum was taken for a mean"),
    "a mean in the node only": (
        {'grid.across, "mean"': "grid.across"},
        "A sum was taken for a mean",
    ),
    "a mean between nodes only": (
        {'grid.inside, "mean"': "grid.inside"},
        "A sum was taken for a mean",
    ),
    "no all-reduce": ({REDUCE: ""}, "mean of this node's ranks"),
    "no reduce-scatter": (
        {SCATTER: CUT},
        "mean of this rank and its replicas",
    ),
    "the all-reduce first": (
        {SCATTER + REDUCE: '    ring_all_reduce(flat, grid.across, "mean")\n' + SCATTER},
        "Reduce in the node first",
    ),
    "an all-reduce in the node": (
        {SCATTER: '    ring_all_reduce(flat, grid.inside, "mean")\n' + CUT},
        "A reduce-scatter brings a rank its part",
    ),
    "an all-gather of whole gradients afterwards": (
        {REDUCE: REDUCE + "    flat[:] = grid.inside.all_gather(part).flatten()\n"},
        "PyTorch's own all_gather|A reduce-scatter brings a rank its part",
    ),
    "the first part on every rank": (
        {"    return part": "    return flat.tensor_split(grid.inside.world_size)[0]"},
        "expected this rank's part",
    ),
}
