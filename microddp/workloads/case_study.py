"""The case study's model and data: a SmolLM2-360M that learns to recognise paraphrases.

Needs ``transformers``, and for the real weights and MRPC's sentences ``datasets`` and the Hugging
Face hub. Without the hub, weights are random, and the sentences those of NumPy and PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import urllib.request
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from microddp.comms import Comms
from microddp.workloads.sentence_pairs import PAD, documented_pairs, load_pairs

# Source: config.json of https://huggingface.co/HuggingFaceTB/SmolLM2-360M, commit 3ce05f6.
FULL = {
    "vocab_size": 49152,
    "hidden_size": 960,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "intermediate_size": 2560,
}
# For a CPU: the same ratios of heads and widths; a batch of 16 takes some tenths of a second.
SMALL = FULL | {
    "vocab_size": 4096,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}
SIZES = {"full": FULL, "small": SMALL}
ROPE_THETA, MAX_POSITIONS, RMS_NORM_EPS = 100000, 8192, 1e-5
MODEL, DATA = "HuggingFaceTB/SmolLM2-360M", ("nyu-mll/glue", "mrpc")  # names on the hub
HUB_TIMEOUT = 3.0  # seconds; transformers itself would try for most of a minute


@dataclass(frozen=True)
class Case:
    """A model to fine-tune, and its sentence pairs.

    Attributes:
        model: maps ``input_ids`` and ``attention_mask`` to two logits, and with ``labels`` to a
            loss; in fp32, on the device, equal on all ranks.
        train: tokens ``(pairs, length)``, padded with ``pad``; mask of the same shape; labels
            ``(pairs,)``, 1 for a paraphrase.
        validation: the same for validation.
        pad: number of the padding token.
        origin: text that says where weights and pairs are from, and why.
        pretrained: whether the weights are the published ones, and not random.
    """

    model: nn.Module
    train: TensorDataset
    validation: TensorDataset
    pad: int
    origin: str
    pretrained: bool = False

    def statistics(self) -> list[tuple[str, str]]:
        """Describe the training pairs: names and values, as text."""
        tokens, mask, labels = self.train.tensors
        lengths = mask.sum(1).float()
        return [
            ("training pairs", str(len(tokens))),
            ("tokens a pair", f"{lengths.mean():.1f} +- {lengths.std():.1f}"),
            ("longest", f"{lengths.max():.0f}"),
            ("paraphrases", f"{labels.float().mean():.1%}"),
        ]


def load_case(size: str, comms: Comms) -> Case:
    """Load the model and the pairs, real if that is possible, the same on every rank. A collective.

    Rank 0 tries first, and fills the cache of its machine; the others follow if it succeeded.
    The real weights are for the full size only. With ``HF_HUB_OFFLINE=1`` the hub is not asked:
    files are real that were downloaded earlier.

    Args:
        size: ``"full"`` or ``"small"``.
        comms: the ranks.

    Raises:
        ValueError: the size is unknown.
    """
    if size not in SIZES:
        raise ValueError(f"rank {comms.rank}: expected size in {list(SIZES)}, got {size!r}")
    case, problem = _try(size, comms) if comms.rank == 0 else (None, "")
    first, *_ = comms.all_gather_data(problem)
    if comms.rank > 0 and not first:
        case, problem = _try(size, comms)
    why = next(filter(None, comms.all_gather_data(problem)), "")
    return offline_case(size, comms.device, why) if why or case is None else case


def offline_case(size: str, device: torch.device, why: str) -> Case:
    """Make the model with random weights, the same on each call, and pairs that need no hub."""
    train, validation = documented_pairs(SIZES[size]["vocab_size"])
    origin = f"random weights ({size} size), and sentences of NumPy's and PyTorch's documentation"
    return Case(new_model(size, PAD).to(device), train, validation, PAD, f"{origin}, because {why}")


def new_model(size: str, pad: int | None, vocabulary: int | None = None) -> nn.Module:
    """Make the model with a head of two classes and random weights, the same on each call.

    Args:
        size: ``"full"`` or ``"small"``.
        pad: number of the padding token. The head reads the logits at the last other token.
        vocabulary: number of different tokens; default: the size's own.
    """
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        **(SIZES[size] | ({"vocab_size": vocabulary} if vocabulary else {})),
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=pad,
        num_labels=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = LlamaForSequenceClassification(config)
    return model


def _try(size: str, comms: Comms) -> tuple[Case | None, str]:
    """Load the real model and pairs; if that fails, say why."""
    if importlib.util.find_spec("datasets") is None:
        return None, "the package datasets is not installed (pip install microddp[llm])"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if not offline and (problem := _unreachable()):
        return None, f"the hub cannot be reached ({problem})"
    try:
        return _load(size, comms.device), ""
    except Exception as error:  # the network, the cache and the disk can fail in many ways
        why = (str(error) or repr(error)).splitlines()[0]
        return None, f"loading failed ({type(error).__name__}: {why})"


def _unreachable() -> str:
    """Say why the hub does not answer within ``HUB_TIMEOUT`` seconds; empty if it does."""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    outcome = [f"no answer in {HUB_TIMEOUT:g} s"]

    def ask() -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=HUB_TIMEOUT).close()
            outcome.append("")
        except (OSError, ValueError) as error:
            outcome.append(str(getattr(error, "reason", error)))

    # On a thread, since looking up the name has no time-out.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT)
    return outcome[-1]


def _load(size: str, device: torch.device) -> Case:
    import transformers

    transformers.logging.set_verbosity_error()  # no warning that the head is new
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    train, validation = load_pairs(DATA, tokenizer)
    if size == "full":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # for the weights of the head
            model = transformers.LlamaForSequenceClassification.from_pretrained(
                MODEL, num_labels=2, dtype=torch.float32
            )
        model.config.pad_token_id = tokenizer.pad_token_id
        weights = f"the weights of {MODEL}"
    else:
        model = new_model(size, tokenizer.pad_token_id, len(tokenizer))
        weights = f"random weights ({size} size) with the tokenizer of {MODEL}"
    origin = f"{weights}, and the pairs of {' '.join(DATA)}"
    pad, pretrained = tokenizer.pad_token_id, size == "full"
    return Case(model.to(device), train, validation, pad, origin, pretrained)
