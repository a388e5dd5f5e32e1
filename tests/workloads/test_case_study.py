"""The case study's model and pairs: from a local folder, and without the hub."""

import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks

from microddp.model import gradient_bytes, parameter_count
from microddp.replicas import check_replicas
from microddp.workloads import (
    Case,
    batches,
    case_study,
    documented_pairs,
    load_case,
    new_model,
)
from microddp.workloads.case_study import FULL, SMALL
from microddp.workloads.sentence_pairs import PAD, SEPARATOR, UNKNOWN, documented_sentences

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # where nobody listens

# ---- the model


def test_the_full_size_has_the_published_number_of_parameters():
    with torch.device("meta"):
        count = parameter_count(new_model("full", pad=0))
    assert 361e6 < count < 363e6
    assert count == 361_821_120 + 2 * FULL["hidden_size"]  # the decoder, and a head of two classes


def test_the_small_size_keeps_the_ratios():
    for numerator, denominator in (
        ("num_attention_heads", "num_key_value_heads"),
        ("intermediate_size", "hidden_size"),
    ):
        assert SMALL[numerator] / SMALL[denominator] == FULL[numerator] / FULL[denominator]
    assert gradient_bytes(new_model("small", pad=0)) < 16 << 20


def test_a_model_is_the_same_on_each_call_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (new_model("small", pad=0).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)


def test_padding_does_not_change_an_answer():
    tokens, mask = (x[:8] for x in documented_pairs(SMALL["vocab_size"])[0].tensors[:2])
    model = new_model("small", PAD)
    with torch.no_grad():
        together = model(tokens, mask).logits
        for row, length in enumerate(mask.sum(1).tolist()):
            cut = slice(row, row + 1), slice(0, length)
            torch.testing.assert_close(model(tokens[cut], mask[cut]).logits[0], together[row])


# ---- sentences that ship with NumPy and PyTorch


def test_both_say_the_same_of_a_function():
    said = dict(documented_sentences())
    assert len(said) > 150
    assert said["Calculate the absolute value element-wise."] == (
        "Computes the absolute value of each element in input."
    )
    for sentence in (*said, *said.values()):
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert 4 <= len(sentence.split()) <= 40
        assert not set(sentence) & set("`:{}|=")


def test_half_of_the_pairs_are_paraphrases():
    for pairs in documented_pairs(4096):
        tokens, mask, labels = pairs.tensors
        assert tokens.shape == mask.shape
        assert 2 * labels.sum() == len(labels)
        assert torch.equal(tokens != PAD, mask.bool()), "padding is at the end, and nowhere else"
        assert (mask.diff(dim=1) <= 0).all()
        assert ((tokens == SEPARATOR).sum(1) == 1).all()
        assert (tokens != UNKNOWN).all()
        rows = {tuple(row) for row in tokens.tolist()}
        assert len(rows) == len(tokens), "no pair is both"


def test_of_a_small_vocabulary_rare_words_are_unknown():
    whole, small = (documented_pairs(size)[0].tensors[0] for size in (4096, 100))
    assert small.max() == 99
    assert torch.equal(whole.where(whole < 100, UNKNOWN), small)


@on_ranks(1, 2, 3)
def test_the_shards_of_a_batch_are_the_batch(comms):
    pairs, _ = documented_pairs(500)
    whole = list(batches(pairs, 12, comms, whole=True))
    mine = list(batches(pairs, 12, comms))
    assert len(whole) == len(mine) == len(pairs) // 12
    for all_rows, shard in zip(whole, mine, strict=True):
        assert set(shard) == {"input_ids", "attention_mask", "labels"}
        assert all_rows["attention_mask"].sum(1).max() == all_rows["input_ids"].shape[1]
        for name in shard:
            assert torch.equal(
                comms.all_gather(shard[name].contiguous()).flatten(0, 1), all_rows[name]
            )
    assert mine[0]["labels"].shape == (12 // comms.world_size,)


@on_ranks(3)
def test_a_batch_that_does_not_divide_is_refused(comms):
    with pytest.raises(ValueError, match="a multiple of 3 ranks, got 16"):
        next(batches(documented_pairs(500)[0], 16, comms))


# ---- the hub, which is not there


@on_ranks(2, environment=NOWHERE)
def test_without_the_hub_all_ranks_have_the_same_case(comms):
    case = load_case("small", comms)
    assert not case.pretrained
    assert case.origin.startswith(
        "random weights (small size), and sentences of NumPy's and PyTorch's"
    )
    assert "because the hub" in case.origin
    assert "refused" in case.origin
    same_on_all_ranks(case, comms)
    numbers = dict(case.statistics())
    assert int(numbers["training pairs"]) == len(case.train)
    assert numbers["paraphrases"] == "50.0%"


def test_offline_only_the_cache_is_asked(monkeypatch):
    def empty_cache(*_):
        raise OSError("not in the cache\nand more")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(case_study, "_unreachable", lambda: pytest.fail("the network was asked"))
    monkeypatch.setattr(case_study, "_load", empty_cache)
    one = SimpleNamespace(
        rank=0,
        device=torch.device("cpu"),
        all_gather_data=lambda value: [value],
        fail_together=lambda problem, _: pytest.fail(problem) if problem else None,
    )
    case = load_case("small", one)
    assert not case.pretrained
    assert case.origin.endswith("because loading failed (OSError: not in the cache)")


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(case_study, "HUB_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        assert case_study._unreachable()
        assert time.monotonic() - start < 20


@on_ranks(1)
def test_an_unknown_size_is_refused(comms):
    with pytest.raises(ValueError, match=r"expected size in \['full', 'small'\], got 'huge'"):
        load_case("huge", comms)


# ---- the same code path, from a local folder


def save_tiny(folder):
    """A checkpoint of a decoder, its tokenizer and two splits of pairs, as the hub has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<|endoftext|>", "\n", "a", "cat", "dog", "sat", "on", "the", "mat", "ran"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\n"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder / "model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    rows = [("a cat sat", "the cat sat on the mat", 1), ("a dog ran", "the mat", 0)]
    (folder / "data").mkdir()
    for split, count in (("train", 6), ("validation", 2)):
        lines = [
            json.dumps({"sentence1": a, "sentence2": b, "label": label, "idx": i})
            for i, (a, b, label) in enumerate(rows * (count // 2))
        ]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines))


def same_on_all_ranks(case: Case, comms):
    check_replicas(case.model, comms)
    told = comms.all_gather_data(
        [case.origin, case.pad, case.train.tensors[0].tolist(), case.validation.tensors[2].tolist()]
    )
    assert all(theirs == told[0] for theirs in told)


def load_from_a_folder(comms):
    """Let the ranks load a tiny model and its pairs, as if they had been downloaded earlier."""
    folder = comms.all_gather_data(tempfile.mkdtemp() if comms.rank == 0 else "")[0]
    os.environ["HF_HOME"] = f"{folder}/cache"  # before the first import of datasets
    if comms.rank == 0:
        save_tiny(Path(folder))
    comms.barrier()
    case_study.MODEL, case_study.DATA = f"{folder}/model", (f"{folder}/data",)
    return folder


@on_ranks(2, environment={"HF_HUB_OFFLINE": "1"})
def test_weights_tokenizer_and_pairs_load_from_a_folder(comms):
    folder = load_from_a_folder(comms)
    case = load_case("full", comms)
    assert case.pretrained
    assert case.origin.startswith(f"the weights of {folder}/model, and the pairs of ")
    same_on_all_ranks(case, comms)
    tokens, mask, labels = case.train.tensors
    assert tokens.shape == (6, 8)
    assert labels.tolist() == [1, 0] * 3
    assert mask[:2].sum(1).tolist() == [8, 4]
    assert len(case.validation) == 2
    assert case.pad == 0 == case.model.config.pad_token_id, "the end of text pads"
    parameters = dict(case.model.named_parameters())
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert parameters["score.weight"].shape == (2, 16)
    loss = case.model(**next(batches(case.train, 6, comms))).loss
    loss.backward()
    assert all(p.grad is not None for p in parameters.values())

    # The small size takes the tokenizer, and random weights.
    case = load_case("small", comms)
    assert case.origin.startswith("random weights (small size) with the tokenizer of ")
    assert case.model.config.vocab_size == 10
    same_on_all_ranks(case, comms)

    # Where one rank cannot load, all have the random weights.
    if comms.rank == 1:
        case_study.MODEL = f"{folder}/nowhere"
    case = load_case("full", comms)
    assert not case.pretrained
    assert "because loading failed" in case.origin
    same_on_all_ranks(case, comms)
    if comms.rank == 0:
        shutil.rmtree(folder)
