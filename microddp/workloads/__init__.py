"""Models and data of the chapters: SmolLM2 on pairs of sentences, a small one on characters."""

from microddp.workloads.case_study import Case, Source, load_case, new_model
from microddp.workloads.characters import (
    LENGTH,
    Learned,
    character_batches,
    character_model,
    learn,
    times_by_link,
)
from microddp.workloads.sentence_pairs import batches, documented_pairs
from microddp.workloads.transformer import Transformer, token_loss
