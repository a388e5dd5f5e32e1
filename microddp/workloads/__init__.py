"""Models and data of the chapters: SmolLM2 on pairs of sentences, a transformer, loss curves."""

from microddp.workloads.case_study import Case, load_case, new_model
from microddp.workloads.curves import Curves
from microddp.workloads.sentence_pairs import batches, documented_pairs
from microddp.workloads.transformer import Transformer, token_loss
