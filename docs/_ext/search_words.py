"""What people search for, and the sections that answer it: main entries of the index.

Sphinx's search finds a page by its words. By an entry of the index it finds a section.
"""

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

# By the name of a chapter's file and the title of a section.
WORDS = {
    "00_baseline": {"Throughput": ("throughput",), "Memory": ("memory",)},
    "01_manual": {"Where it breaks: unequal shards": ("unequal shards",)},
    "02_all_reduce": {
        "Ring: a chunk at a time": ("ring", "ring all-reduce"),
        "Where it breaks: each rank adds in its own order": ("rounding", "reproducibility"),
        "What a message costs": ("latency", "bandwidth", "alpha", "beta"),
    },
    "03_naive_dp": {
        "Replicate": ("seed",),
        "Where it breaks: every rank shuffles for itself": ("shuffle",),
    },
    "04_hooks": {
        "Two kinds of hooks": ("hook", "gradient hook"),
        "An all-reduce inside backward": ("overlap",),
    },
    "05_bucketing": {
        "The plan": ("bucket", "first bucket"),
        "Step time by bucket size": ("bucket size", "bucket_cap_mb"),
        "Appendix: views against copies": ("gradient_as_bucket_view",),
    },
    "06_ddp": {
        "Gradient accumulation, right and wrong": ("no_sync", "gradient accumulation"),
        "Parameters that get no gradient": ("find_unused_parameters", "unused parameters"),
        "Buffers: whose statistics?": ("forward_sync_buffers", "broadcast_buffers", "buffers"),
        "Where it breaks: uneven inputs": ("join", "uneven inputs"),
        "Something else instead of an all-reduce": ("communication hook", "comm hook"),
    },
    "07_sync_primitives": {
        "Who waits: the barrier": ("barrier",),
        "Who has what": ("collectives", "all_gather", "reduce_scatter"),
        "Whom to ask: a mesh": ("device mesh", "subgroup"),
        "Where it breaks: only rank 0 enters": ("deadlock",),
        "Appendix: when it hangs": ("time-out", "timeout"),
    },
    "08_performance": {
        "Taking a step apart": ("exposed communication",),
        "More ranks": ("strong scaling", "weak scaling", "scaling efficiency"),
        "When is it worth it?": ("break-even",),
    },
    "09_case_study": {
        "The profile": ("profiler", "profile"),
        "bf16": ("mixed precision", "bf16", "autocast"),
        "A model that does not fit": ("FSDP", "fully_shard", "ZeRO", "sharding"),
        "Where it breaks: the padding token": ("padding",),
    },
    "10_compression": {
        "The largest values": ("top-k",),
        "Where it breaks: what was not sent is forgotten": ("error feedback",),
        "Fewer bits, and thinner matrices": ("int8", "sign", "PowerSGD", "quantization"),
        "Where it pays": ("compression", "gradient compression"),
    },
    "11_local_sgd": {
        "Averaging weights": ("local SGD", "weight averaging"),
        "DiLoCo": ("DiLoCo", "outer optimizer", "pseudo-gradient"),
    },
    "12_uneven": {
        "Slow rank or slow link?": ("straggler", "slow rank", "slow link"),
        "Less work for a slow rank": ("heterogeneous",),
    },
    "13_faults": {
        "Reading a hang": ("hang", "deadlock", "stuck", "flight recorder"),
        "Without a restart, in thirty lines": ("elastic",),
        "What a fault costs": ("restart", "torchrun", "fault tolerance"),
        "How often to save": ("checkpoint interval",),
    },
    "14_your_script": {
        "Four lines": ("DistributedDataParallel", "init_process_group"),
        "What the sampler has to be told": ("sampler", "DistributedSampler", "set_epoch"),
        "Batch size and learning rate": ("batch size", "learning rate", "warm-up"),
        "Evaluation": ("evaluation",),
        "Clipping": ("clipping", "clip_grad_norm"),
        "Precision": ("GradScaler", "mixed precision"),
        "torch.compile": ("torch.compile", "compile"),
        "Batch normalisation": ("SyncBatchNorm", "batch normalization"),
        "The loader": ("DataLoader", "num_workers", "pinned memory"),
        "Checkpoints": ("checkpoint", "resume"),
        "When something is wrong": ("slow", "debugging"),
    },
    "15_one_machine": {
        "Two meetings and a sum": ("shared memory", "semaphore"),
        "Several machines: each sum once": ("hierarchical all-reduce", "topology"),
        "How NCCL does it": ("NVLink", "NVLS", "SHARP", "tree"),
    },
    "16_sharding": {
        "Who keeps what": ("ZeRO", "memory of a rank"),
        "Stage 1: an n-th of the optimizer": ("ZeroRedundancyOptimizer",),
        "Stage 3: parameters only while they are needed": ("FSDP", "fully_shard"),
        "When does it cost time?": ("sharding, time of",),
        "Training that no rank could hold": ("meta device", "deferred initialisation"),
    },
    "17_thousand": {
        "A clock for each device": ("simulator", "discrete-event simulation"),
        "Does efficiency fall with n?": ("scaling to many devices", "weak scaling"),
        "Why one curve keeps 39 % and another 97 %": ("tokens per device",),
        "A thousand fail": ("mean time between failures", "checkpoint interval"),
        "Ask for your own": ("plan a training", "price of a training"),
    },
}


class MarkSections(SphinxTransform):
    """Put the entries before the sections."""

    default_priority = 800  # before the domains collect them, at 850

    def apply(self, **_: Any) -> None:
        """Raises `ExtensionError` if a chapter has no section of that title."""
        folder, _, stem = self.env.docname.rpartition("/")
        words = dict(WORDS.get(stem, {})) if folder == "chapters" else {}
        for section in list(self.document.findall(nodes.section)):
            entries = [
                ("single", word, section["ids"][0], "main", None)
                for word in words.pop(section[0].astext(), ())
            ]
            if entries:
                section.insert(1, addnodes.index(entries=entries))
        if words:
            missing = ", ".join(map(repr, words))
            raise ExtensionError(f"search_words: {stem} has no section {missing}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the transform."""
    app.add_transform(MarkSections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
