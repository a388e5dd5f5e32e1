"""What the case study trains on what: a language model, and pairs of sentences."""

from microddp.workloads.case_study import Case, Source, load_case, new_model
from microddp.workloads.sentence_pairs import batches, made_up_pairs
