"""Functions that name a cause as people really do."""

GATHERED = "    ranks = comms.all_gather_data(mine)\n"
SLOW = """    work = [sum(times[part] for part in WORK) for times in ranks]
    for rank in range(len(work)):
        others = work[:rank] + work[rank + 1 :]
        if work[rank] > 2 * max(others):
            return f"slow rank {rank}"
"""
MEDIAN = "statistics.median(times[1:]) for part"
STARTS = 'return "many messages" if len(job.sizes) * start > transfer / 2 else "slow network"'

WRONG = {
    "nothing is measured": (
        {"    seconds: dict[str, list[float]] = {}\n": '    return "loading"\n    seconds = {}\n'},
        "No step of the job was taken: measure",
    ),
    "who waits": (
        {"sum(times[part] for part in WORK)": 'times["average"]'},
        "Who averages longest came first",
    ),
    "rank 0's times only": (
        {GATHERED: GATHERED + "    ranks = ranks[:1]\n", SLOW: ""},
        "only because they wait",
    ),
    "a slow rank taken for a slow network": (
        {SLOW: "", 'min(times["average"]': 'max(times["average"]'},
        "only because they wait",
    ),
    "each rank by its own times": (
        {GATHERED: "    ranks = [mine]\n", SLOW: ""},
        "decided by different numbers. Gather the times of all",
    ),
    "one rank loads slowly": (
        {SLOW: "", 'min(times["load"]': 'max(times["load"]'},
        "One rank alone loads slowly|One rank alone loads for more than half|because ranks wait",
    ),
    "any rank that loads for long": (
        {'min(times["load"]': 'max(times["load"]'},
        "One rank alone loads for more than half of its step",
    ),
    "the longest wait is the network's": (
        {'min(times["average"]': 'max(times["average"]'},
        "but only because they wait",
    ),
    "another clock": (
        {"job.clock()": "time.perf_counter()", "import statistics\n": "import statistics, time\n"},
        "job.clock\\(\\) was never read",
    ),
    "a cause of its own": (
        {'return "nothing"': 'return "network"'},
        "one of the causes, as a text",
    ),
    "three times as long": ({"> 2 * max": "> 3 * max"}, "works 2.1 times as long"),
    "not quite twice as long": ({"> 2 * max": "> 1.8 * max"}, "works 1.9 times as long"),
    "loading for two fifths of the step": ({"> step / 2": "> 0.4 * step"}, "Nothing was planted"),
    "loading for two thirds of the step": ({"> step / 2": "> 0.65 * step"}, "is a cause: name it"),
    "a network for a quarter of the step": (
        {"transfer < step / 2": "transfer < step / 4"},
        "Nothing was planted",
    ),
    "a network for two thirds of the step": (
        {"transfer < step / 2": "transfer < 0.65 * step"},
        "is a cause: name it",
    ),
    "many messages for a quarter of averaging": (
        {"start > transfer / 2": "start > transfer / 4"},
        "to start them takes less than half",
    ),
    "many messages for most of averaging": (
        {"start > transfer / 2": "start > 0.8 * transfer"},
        "Few bytes take as long as many",
    ),
    "the first step counts": (
        {MEDIAN: "statistics.mean(times) for part"},
        "first step.*connections made. Leave it out",
    ),
    "the mean": (
        {MEDIAN: "statistics.mean(times[1:]) for part"},
        "longer than all others together.*the median",
    ),
    "two steps": (
        {"range(10)": "range(2)"},
        "longer than all others together.*the median",
    ),
    "messages are counted": (
        {STARTS: 'return "many messages" if len(job.sizes) > 10 else "slow network"'},
        "to start them takes less than half",
    ),
    "always the network": (
        {STARTS: 'return "slow network"'},
        "Few bytes take as long as many",
    ),
    "the longest part is to blame": (
        {"    if transfer < step / 2:\n": "    if transfer < 3e-3:\n"},
        "Nothing was planted",
    ),
}
