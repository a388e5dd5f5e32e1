"""How often the straggler report blames somebody while nothing is wrong: a hundred reports.

``python -m microddp.hosts --hosts 4 --link 1gbit -- tests/performance/false_alarms.py [REPORTS]``
"""

import sys
from collections import Counter

import microddp
from microddp.performance import straggler_report
from microddp.program import Layer, Work
from microddp.stage import PausingOptimizer, pausing_batch, pausing_loss, pausing_model
from microddp.step import take_step
from microddp.strategies import STRATEGIES
from microddp.timing import Timeline

STEPS = 8
DEVICE = Work((Layer(2e-3, 4e-3, (1 << 14,)),) * 3)  # 18 ms of computing, 192 KiB of gradients

comms = microddp.init()
strategy = STRATEGIES["naive"](pausing_model(DEVICE), comms)
optimizer = PausingOptimizer(strategy.parameters())
named: Counter[str] = Counter()
longer = delay = 0.0
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
    timeline = Timeline(comms)
    strategy.record(timeline)
    for _ in range(STEPS):
        take_step(strategy, pausing_loss, optimizer, pausing_batch())
    report = straggler_report(timeline.gather(), comms)
    named["reports"] += 1
    named["a rank"] += report.rank is not None
    named["a link"] += report.link is not None
    for rank in range(comms.world_size):
        longer = max(longer, report.longer(rank))
        delay = max(delay, report.delay(rank) / report.step)
comms.print(dict(named), f"; nearest: longer in {longer:.0%} of steps, or a delay of {delay:.1%}")
comms.close()
