"""Functions that name a slow rank as people really do."""

WORK = "step.launched[-1] - step.begin + step.end - step.backward for"
GATHERED = "comms.all_gather_data(statistics.median(work))"
DECIDE = "if seconds > 1.5 * statistics.median(others):"

WRONG = {
    "nothing is measured": (
        {"    steps = [job": "    return 0\n    steps = [job"},
        "No step of the job was taken: measure",
    ),
    "the longest step": (
        {WORK: "step.end - step.begin for"},
        "on every rank got None.*the others wait in theirs",
    ),
    "the longest backward": (
        {WORK: "step.backward - step.forward for"},
        "got None.*the others wait in theirs",
    ),
    "the longest wait": (
        {WORK: "step.backward - step.launched[-1] for"},
        "That rank waits, for the slow one",
    ),
    "the longest forward": (
        {WORK: "step.forward - step.loaded for"},
        "got None.*Compare only what a rank does while it does not wait",
    ),
    "without the loader": (
        {WORK: "step.launched[-1] - step.loaded + step.end - step.backward for"},
        "got None.*Compare only what a rank does while it does not wait",
    ),
    "the first launch": (
        {WORK: "step.launched[0] - step.begin + step.end - step.backward for"},
        "slow after its first launch",
    ),
    "without the optimizer": (
        {WORK: "step.launched[-1] - step.begin for"},
        "slow after backward, in its optimizer",
    ),
    "from one launch to the next": (
        {WORK: "step.launched[-1] - step.launched[0] for"},
        "got None.*Compare only what a rank does while it does not wait",
    ),
    "who launches last, by all clocks": (
        {
            GATHERED: "comms.all_gather_data(steps[-1].launched[-1])",
            DECIDE: DECIDE[:-1] + " * 0 and seconds == max(ranks):",
        },
        "clocks of two ranks differ",
    ),
    "who works longest, always": (
        {DECIDE: "if seconds == max(ranks):"},
        "Nothing was planted. One rank always works longest",
    ),
    "a little longer": (
        {"1.5 * ": "1.3 * "},
        "works 1.4 times as long as the others",
    ),
    "twice as long": ({"1.5 * ": "2 * "}, "works 1.6 times as long"),
    "two steps": ({"steps[1:]": "steps[1:3]"}, "another rank lost two seconds|clocks of two"),
    "beside the mean of all": (
        {"statistics.median(others)": "statistics.mean(others)"},
        "with their mean",
    ),
    "it compares with the mean of all": (
        {"statistics.median(others)": "statistics.mean(ranks)"},
        "got None.*Compare only what a rank does while it does not wait",
    ),
    "each rank for itself": (
        {DECIDE: "if rank == comms.rank and seconds > 1.5 * statistics.median(others):"},
        "The ranks decided by different numbers",
    ),
    "the mean": (
        {GATHERED: "comms.all_gather_data(statistics.mean(work))"},
        "another rank lost two seconds.*the median|clocks of two ranks differ",
    ),
    "the first step only": (
        {"steps[1:]": "steps[:1]"},
        "another rank lost two seconds.*the median|clocks of two ranks differ",
    ),
    "the quickest of the others": (
        {DECIDE: "if seconds > 1.5 * min(others):"},
        "Compare with the median of the others",
    ),
}
