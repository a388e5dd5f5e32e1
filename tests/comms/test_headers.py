"""Short texts between ranks, and calls that they compare by them."""

import pytest
import torch
from ranks import on_ranks

from microddp.comms import describe, name_ranks, name_usual, odd_ranks
from microddp.comms.headers import HEADER_BYTES, Headers


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(3, 5), "float32 (3, 5)"),
        (torch.tensor(1), "int64 ()"),
        (torch.zeros(0, dtype=torch.bfloat16), "bfloat16 (0,)"),
        (torch.zeros(2, 1).to(torch.float8_e4m3fn), "float8_e4m3fn (2, 1)"),
    ],
)
def test_describe_tells_dtype_and_shape(tensor, text):
    assert describe(tensor) == text


@pytest.mark.parametrize(
    ("values", "usual", "odd", "words"),
    [
        (["a"], "a", [], ""),
        (["a", "b", "a"], "a", [1], "rank 1"),
        ([2, 1, 1, 3, 1], 1, [0, 3], "ranks 0, 3"),
        ([(1,), (2,)], (1,), [1], "rank 1"),
    ],
)
def test_odd_ranks_are_those_without_the_most_frequent_value(values, usual, odd, words):
    assert odd_ranks(values) == (usual, odd)
    assert not odd or name_ranks(odd) == words


def headers(comms):
    return Headers(comms.group, comms.device)


@on_ranks()
def test_exchange_gives_every_rank_all_texts_in_rank_order(comms):
    texts = headers(comms).exchange(f"é {comms.rank}")
    assert texts == [f"é {rank}" for rank in range(comms.world_size)]


@on_ranks(2)
def test_headers_to_one_rank_arrive_in_order(comms):
    if comms.rank == 0:
        for work in [headers(comms).send(text, 1) for text in ("first", "", "third")]:
            work.wait()
    else:
        assert [headers(comms).recv(0) for _ in range(3)] == ["first", "", "third"]


@on_ranks(2)
def test_a_text_that_is_too_long_is_cut_to_the_header(comms):
    assert headers(comms).exchange("x" * 1000) == ["x" * HEADER_BYTES] * 2
    texts = headers(comms).exchange("x" * (HEADER_BYTES - 1) + "é")  # cut within a character
    assert all(text.startswith("x" * (HEADER_BYTES - 1)) for text in texts)


@on_ranks()
def test_agree_is_silent_where_all_say_the_same(comms):
    comms.debug = True
    comms.agree("all_reduce(float32 (3,), op=sum)")


@on_ranks(3, 5)
def test_agree_names_the_odd_ranks_on_every_rank(comms):
    odd = comms.world_size - 1
    comms.debug = True
    with pytest.raises(RuntimeError) as caught:
        comms.agree("something else" if comms.rank == odd else "the usual")
    assert str(caught.value) == (
        f"rank {comms.rank}: the ranks disagree: rank {odd} calls something else; "
        "expected the usual, the most frequent"
    )


@on_ranks(2)
def test_of_two_ranks_neither_is_the_odd_one(comms):
    comms.debug = True
    with pytest.raises(RuntimeError) as caught:
        comms.agree(f"call of {comms.rank}")
    assert str(caught.value) == (
        f"rank {comms.rank}: the ranks disagree: rank 1 calls call of 1; "
        "expected call of 0, rank 0's, as none is more frequent"
    )


@pytest.mark.parametrize(
    ("values", "odd", "usual"),
    [
        ("aaa", [], "the most frequent"),
        ("aba", [1], "the most frequent"),
        ("abcd", [1, 2, 3], "rank 0's, as none is more frequent"),
        ("abbcc", [0, 3, 4], "rank 1's, as none is more frequent"),
    ],
)
def test_who_is_odd_and_of_what(values, odd, usual):
    assert odd_ranks(list(values))[1] == odd
    assert name_usual(list(values)) == usual
