"""Timed loops that people really write."""

ZERO = "        optimizer.zero_grad()\n"
BEGAN = "        began = now()\n"
FORWARD = "        forward = now()\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
LOOP = "    for i, (x, y) in enumerate(batches):\n"
TOTAL = "        total += loss.item() * len(x)\n"

WRONG = {
    "gradients are never zeroed": ({ZERO: ""}, "Gradients add up"),
    "gradients are zeroed after the step only": (
        {ZERO: "", STEP: STEP + ZERO},
        "gradients that the model came with",
    ),
    "step before backward": (
        {
            ZERO: "",
            BACKWARD + "        backward = now()\n" + STEP: STEP
            + ZERO
            + "        backward = now()\n"
            + BACKWARD,
        },
        "The step comes before backward",
    ),
    "zeroed between backward and step": (
        {ZERO: "", STEP: ZERO + STEP},
        "The model has not changed",
    ),
    "warm-up batches are skipped": (
        {ZERO: "        if i < warmup:\n            continue\n" + ZERO},
        "The warm-up batches are trained on",
    ),
    "the mean of the batches' means": (
        {TOTAL: "        total += loss.item()\n", "+= len(x)": "+= 1"},
        "weight each batch's loss by its samples",
    ),
    "losses are added with their graphs": (
        {
            TOTAL: "        total = total + loss * len(x)\n",
            "return seconds, total / samples": "return seconds, (total / samples).item()",
        },
        "keeps its graph in memory",
    ),
    "the loss is a tensor": (
        {TOTAL: "        total += loss.detach() * len(x)\n"},
        "is the number in a tensor",
    ),
    "the clock is read before the batch comes": (
        {LOOP: "    stepped = now()\n" + LOOP, BEGAN: "        began = stepped\n"},
        "Loading is in it",
    ),
    "the clock is read once before the loop": (
        {BEGAN: "", LOOP: "    began = now()\n" + LOOP},
        "Another part is in it",
    ),
    "zeroing is timed": ({ZERO + BEGAN: BEGAN + ZERO}, "Zeroing the gradients is in it"),
    "warm-up is counted": ({"if i >= warmup:": "if True:"}, "do not add their seconds"),
    "only the last batch's seconds": ({'"] += ': '"] = '}, "not the last one's alone"),
    "another clock": ({"= now()": "= time.perf_counter()"}, "was never read"),
}
