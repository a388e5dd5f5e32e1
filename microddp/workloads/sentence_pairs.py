"""Pairs of sentences, from MRPC or from NumPy's and PyTorch's docstrings, in batches for ranks."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from microddp.comms import Comms
from microddp.data import ShardedBatches, shard

DOCUMENTED = (("numpy", "torch"), ("numpy.linalg", "torch.linalg"), ("numpy.fft", "torch.fft"))
WORDS = (4, 40)  # least and most of a sentence
MARKUP = re.compile(r":\w+:`~?([^`<]*)[^`]*`|`+([^`]*)`+")
SENTENCE = re.compile(r"[A-Z][^:=>|{}\\]*\.")
HELD_OUT = 5  # one function in so many is for validation
MAX_TOKENS = 128  # of a pair; longer ones are cut
PAD, SEPARATOR, UNKNOWN = 0, 1, 2  # token numbers; words follow


def documented_pairs(vocabulary: int) -> tuple[TensorDataset, TensorDataset]:
    """Pair sentences of NumPy's documentation with sentences of PyTorch's.

    A paraphrase is what both say of a function that they have in common. Any other pair has
    PyTorch's sentence on another function. There are as many of one as of the other.

    Args:
        vocabulary: number of different tokens. Words are numbered from the most frequent one; those
            beyond are all the same token.

    Returns:
        Training and validation data, each tokens ``(pairs, length)``, their mask, and labels
        ``(pairs,)``, all int64.
    """
    said = documented_sentences()
    counts = Counter(word for both in said for sentence in both for word in _words(sentence))
    known = [word for word, _ in counts.most_common(vocabulary - UNKNOWN - 1)]
    number = {word: i for i, word in enumerate(known, start=UNKNOWN + 1)}

    def numbers(sentence: str) -> list[int]:
        return [number.get(word, UNKNOWN) for word in _words(sentence)]

    def encode(functions: Sequence[tuple[str, str]]) -> TensorDataset:
        firsts, seconds = zip(*functions, strict=True)
        others = (seconds[-1], *seconds[:-1])
        pairs = [
            [*numbers(first), SEPARATOR, *numbers(second)]
            for first, second in zip(firsts * 2, seconds + others, strict=True)
        ]
        lengths = torch.tensor([len(pair) for pair in pairs]).clamp(max=MAX_TOKENS)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.full(mask.shape, PAD)
        for row, pair in zip(tokens, pairs, strict=True):
            row[: len(pair)] = torch.tensor(pair[: len(row)])
        labels = torch.arange(len(pairs)) < len(functions)
        return TensorDataset(tokens, mask.long(), labels.long())

    held_out = said[::HELD_OUT]
    return encode([both for i, both in enumerate(said) if i % HELD_OUT]), encode(held_out)


def documented_sentences() -> list[tuple[str, str]]:
    """Collect what NumPy and PyTorch say of each function that both have, a sentence each."""
    found: dict[str, str] = {}
    for modules in DOCUMENTED:
        one, other = map(importlib.import_module, modules)
        for name in sorted(set(dir(one)) & set(dir(other))):
            functions = getattr(one, name), getattr(other, name)
            if name.startswith("_") or any(inspect.isclass(f) for f in functions):
                continue
            first, second = map(_sentence, functions)
            if first and second:
                found.setdefault(first, second)  # some functions have two names
    return list(found.items())


def _sentence(function: Any) -> str:
    """Find the first sentence of a function's documentation; empty if there is none."""
    text = MARKUP.sub(r"\1\2", inspect.getdoc(function) or "")
    for paragraph in re.split(r"\n\s*\n", text)[:4]:
        sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.split()))[0]
        if "---" not in sentence and SENTENCE.fullmatch(sentence):
            return sentence if WORDS[0] <= len(sentence.split()) <= WORDS[1] else ""
    return ""


def _words(sentence: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", sentence.lower())


def load_pairs(data: Sequence[str], tokenizer: Any) -> tuple[TensorDataset, TensorDataset]:
    """Load MRPC's pairs of sentences, each as one text of two lines.

    Args:
        data: arguments of ``datasets.load_dataset``.
        tokenizer: the model's tokenizer, one of transformers'.

    Returns:
        Training and validation data, as of :func:`documented_pairs`.
    """
    import datasets

    datasets.disable_progress_bars()
    found = datasets.load_dataset(*data)
    return _encoded(found["train"], tokenizer), _encoded(found["validation"], tokenizer)


def _encoded(pairs: Any, tokenizer: Any) -> TensorDataset:
    texts = [f"{a}\n{b}" for a, b in zip(pairs["sentence1"], pairs["sentence2"], strict=True)]
    both = tokenizer(
        texts, padding=True, truncation=True, max_length=MAX_TOKENS, padding_side="right"
    )
    columns = (both["input_ids"], both["attention_mask"], pairs["label"])
    return TensorDataset(*(torch.tensor(list(column)) for column in columns))


def batches(
    pairs: TensorDataset, batch_size: int, comms: Comms, *, whole: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's shards of an epoch's global batches, as keyword arguments of the model.

    A shard is as long as the longest pair of the global batch, so all ranks have equal shapes.

    Args:
        pairs: tokens, mask and labels, as in :class:`~microddp.workloads.case_study.Case`.
        batch_size: number of pairs in a global batch, a multiple of the number of ranks.
        comms: the ranks that share each batch.
        whole: whether to yield the global batches instead of shards, for one device alone.
    """
    rank, ranks = (0, 1) if whole else (comms.rank, comms.world_size)
    ShardedBatches(pairs, batch_size, rank, ranks)  # checks that the batch divides
    for tokens, mask, labels in ShardedBatches(pairs, batch_size, 0, 1).epoch(0):
        length = int(mask.sum(1).max())
        columns = {"input_ids": tokens[:, :length], "attention_mask": mask[:, :length]}
        mine = {k: shard(v, rank, ranks) for k, v in (columns | {"labels": labels}).items()}
        yield {name: tensor.to(comms.device) for name, tensor in mine.items()}
