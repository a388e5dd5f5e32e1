"""Pairs of sentences, MRPC's or generated ones of the same lengths, and batches for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from microddp.comms import Comms
from microddp.data import ShardedBatches, shard

TRAINING_PAIRS, VALIDATION_PAIRS = 3668, 408  # GLUE's split of MRPC; its test set has 1725
PARAPHRASES = 0.675  # fraction of MRPC's training pairs
# GLUE's parquet file of 3668 pairs holds 943843 bytes, 12 to 20 of each pair not text: about 120
# characters a sentence, or 22 words of 5.5. The deviation and the tokens are assumptions.
WORDS, DEVIATION, LIMITS, TOKENS_PER_WORD = 22.0, 5.5, (5, 40), 1.2
MAX_TOKENS = 128  # of a pair; longer ones are cut
SKEW = 4  # few words make up most of a text: half of its tokens are of 6 % of all words
PAD, SEPARATOR, FIRST_WORD = 0, 1, 2  # token numbers of generated pairs


def made_up_pairs(samples: int, vocabulary: int, seed: int) -> TensorDataset:
    """Generate pairs of sentences of random words.

    A paraphrase has the words of the first sentence in another order. Any other second sentence has
    words of the vocabulary's upper half, which no first sentence uses: that is easier to learn than
    English. The fraction of paraphrases is MRPC's.

    Args:
        samples: number of pairs.
        vocabulary: number of different tokens.
        seed: seed of the random words.

    Returns:
        Tokens ``(samples, length)``, their mask, and labels ``(samples,)``, all int64.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> torch.Tensor:
        skewed = torch.rand(samples, longest, generator=generator) ** SKEW
        return low + (skewed * (high - low)).long()

    words = torch.randn(samples, 2, generator=generator) * DEVIATION + WORDS
    lengths = (words.clamp(*LIMITS) * TOKENS_PER_WORD).round().long()
    first, second = lengths[:, :1], lengths[:, 1:]
    longest = int(max(first.max(), second.max()))
    half = (FIRST_WORD + vocabulary) // 2
    place = torch.arange(longest)
    original = draw(FIRST_WORD, half)
    keys = torch.rand(samples, longest, generator=generator)
    shuffled = original.gather(1, keys.masked_fill(place >= first, 2).argsort(dim=1))
    similar = torch.where(place < first, shuffled, draw(FIRST_WORD, half))
    labels = torch.arange(samples) < round(PARAPHRASES * samples)
    labels = labels[torch.randperm(samples, generator=generator)]
    other = torch.where(labels[:, None], similar, draw(half, vocabulary))

    place = torch.arange(2 * longest + 1)
    tokens = torch.where(
        place < first,
        original.gather(1, place.expand(samples, -1).clamp(max=longest - 1)),
        other.gather(1, (place - first - 1).clamp(0, longest - 1)),
    ).where(place != first, SEPARATOR)
    mask = place <= first + second
    tokens = tokens.where(mask, PAD)[:, :MAX_TOKENS]
    return TensorDataset(tokens, mask[:, :MAX_TOKENS].long(), labels.long())


def load_pairs(data: Sequence[str], tokenizer: Any) -> tuple[TensorDataset, TensorDataset]:
    """Load real pairs of sentences, for training and for validation, as :func:`encode_pairs` does.

    Args:
        data: arguments of ``datasets.load_dataset``.
        tokenizer: the model's tokenizer, one of transformers'.
    """
    import datasets

    datasets.disable_progress_bars()
    found = datasets.load_dataset(*data)
    return encode_pairs(found["train"], tokenizer), encode_pairs(found["validation"], tokenizer)


def encode_pairs(pairs: Any, tokenizer: Any) -> TensorDataset:
    """Encode pairs of sentences, each pair as one text of two lines.

    Args:
        pairs: a split of MRPC, with columns ``sentence1``, ``sentence2`` and ``label``.
        tokenizer: the model's tokenizer, one of transformers'.

    Returns:
        Tokens ``(pairs, length)``, their mask, and labels ``(pairs,)``, all int64.
    """
    texts = [f"{a}\n{b}" for a, b in zip(pairs["sentence1"], pairs["sentence2"], strict=True)]
    both = tokenizer(
        texts, padding=True, truncation=True, max_length=MAX_TOKENS, padding_side="right"
    )
    columns = (both["input_ids"], both["attention_mask"], pairs["label"])
    return TensorDataset(*(torch.tensor(list(column)) for column in columns))


def batches(
    pairs: TensorDataset, batch_size: int, comms: Comms, epoch: int = 0, *, whole: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's shards of an epoch's global batches, as keyword arguments of the model.

    A shard is as long as the longest pair of the global batch, so all ranks have equal shapes.

    Args:
        pairs: tokens, mask and labels, as in :class:`~microddp.workloads.case_study.Case`.
        batch_size: number of pairs in a global batch, a multiple of the number of ranks.
        comms: the ranks that share each batch.
        epoch: number of the epoch, which determines the order.
        whole: whether to yield the global batches instead of shards, for one device alone.
    """
    rank, ranks = (0, 1) if whole else (comms.rank, comms.world_size)
    ShardedBatches(pairs, batch_size, rank, ranks)  # checks that the batch divides
    for tokens, mask, labels in ShardedBatches(pairs, batch_size, 0, 1).epoch(epoch):
        length = int(mask.sum(1).max())
        columns = {"input_ids": tokens[:, :length], "attention_mask": mask[:, :length]}
        mine = {k: shard(v, rank, ranks) for k, v in (columns | {"labels": labels}).items()}
        yield {name: tensor.to(comms.device) for name, tensor in mine.items()}
