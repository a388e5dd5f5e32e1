"""Devices of known speed, and clusters to scale: where steps are timed on a few cores."""

from microddp.stage.devices import (
    PausingLayer,
    PausingOptimizer,
    pausing_batch,
    pausing_loss,
    pausing_model,
)
from microddp.stage.scale import (
    Side,
    cluster,
    known_all_reduces,
    known_clusters,
    published_cluster,
    stage_of,
    work_of,
)
from microddp.stage.stage import Stage, set_stage
