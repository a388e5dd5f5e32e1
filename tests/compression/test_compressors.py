"""Each compressor against its own definition: what is sent, kept back and counted."""

import math

import numpy as np
import pytest
import torch
from ranks import on_ranks

from microddp.compression import Compression, compressor
from microddp.compression.compressor import exchange_parts
from microddp.compression.quantised import BLOCK, pack, unpack
from microddp.compression.sparse import SAMPLE, RandomK, TopK, largest, threshold_of
from microddp.message_counter import MessageCounter
from microddp.replicas import broadcast_tensors

ALL = ("top-k:0.1", "top-k:7", "random-k:0.1", "int8", "sign", "power:2", "fp16", "bf16")
TWICE = ("int8", "sign")  # sent in two phases, with another rounding between them
SHAPES = ((40, 30), (40,), (), (3, 2, 5, 5), (1, 17))  # 1,408 values: a block, and some more


def parameters(shapes=SHAPES, dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def gradients(comms, step, shapes=SHAPES, dtype=torch.float32):
    """Side by side, and different on every rank."""
    generator = torch.Generator().manual_seed(100 * step + comms.rank)
    parts = [
        torch.randn(shape, generator=generator).flatten() * 10.0**-i
        for i, shape in enumerate(shapes)
    ]
    return torch.cat(parts).to(dtype)


def blocks_of(values, world_size):
    """The values that share a scale: blocks of each rank's part, which has whole bytes of signs."""
    length = 8 * math.ceil(len(values) / 8 / world_size)
    return [block for part in values.split(length) for block in part.split(BLOCK)]


def by_definition(name, values, world_size):
    """What a rank sends of ``values``, in plain words; ``None`` if it takes all ranks to say."""
    kind, _, number = name.partition(":")
    if kind == "top-k":
        kept = math.ceil(float(number) * len(values)) if "." in number else int(number)
        least = values.abs().sort(descending=True).values[kept - 1]
        return torch.where(values.abs() >= least, values, 0)
    blocks = blocks_of(values, world_size)
    if kind == "int8":
        scales = [block.abs().max() / 127 for block in blocks]
        return torch.cat([(b / s).round() * s for b, s in zip(blocks, scales, strict=True)])
    if kind == "sign":
        return torch.cat([b.sign() * b.abs().mean() for b in blocks])
    if kind in ("fp16", "bf16"):
        dtype = torch.float16 if kind == "fp16" else torch.bfloat16
        return (values / world_size).to(dtype).to(values.dtype) * world_size
    return None


def owned(values, comms):
    """Zero but for the part that this rank adds up in two phases."""
    mine, length = torch.zeros_like(values), 8 * math.ceil(len(values) / 8 / comms.world_size)
    part = slice(comms.rank * length, (comms.rank + 1) * length)
    mine[part] = values[part]
    return mine


@on_ranks(1, 2, 3)
def test_what_is_sent_and_what_is_kept_back_make_the_gradient(comms):
    for name in ALL:
        state, params = Compression(compressor(name), comms), parameters()
        for step in range(4):
            kept = torch.cat([state.residuals[p] for p in params]) if step else 0
            flat = gradients(comms, step)
            whole = flat + kept
            state.average(params, flat)
            residual = torch.cat([state.residuals[p] for p in params])
            assert len(set(map(tuple, comms.all_gather(flat).tolist()))) == 1, name
            sent = by_definition(name, whole, comms.world_size)
            if sent is None:  # some values whole; of the others none, or the mean's approximation
                sent = torch.where(residual == 0, whole, 0 if "random" in name else flat)
            expected = comms.all_gather(sent).mean(dim=0)
            if name in TWICE:  # the mean is rounded again; what that leaves out is its owner's
                rest = expected - by_definition(name, expected, comms.world_size)
                expected = expected - rest
                residual = residual - owned(rest, comms) * comms.world_size
            if name not in ("sign", "int8", "power:2"):
                assert torch.equal(sent + residual, whole), (name, step)
            # For these a small value and a large one do not add up to the bit.
            near = 1e-5 if name in TWICE else 1e-6  # n times a rest, and back
            torch.testing.assert_close(sent + residual, whole, rtol=near, atol=near, msg=name)
            if name != "power:2":
                near = {"fp16": 4e-3, "bf16": 4e-2}.get(name, 1e-6)  # sums are rounded on the way
                torch.testing.assert_close(flat, expected, rtol=near, atol=near, msg=name)
        assert residual.abs().max() > 0, name


@on_ranks(1, 2, 3)
def test_the_means_of_all_steps_and_what_is_kept_back_make_the_gradients(comms):
    for name in ALL:
        state, params = Compression(compressor(name), comms), parameters(dtype=torch.float64)
        total, expected = 0, 0
        for step in range(5):
            flat = gradients(comms, step, dtype=torch.float64)
            expected = expected + comms.all_gather(flat).mean(dim=0)
            state.average(params, flat)
            total = total + flat
        left = torch.cat([state.residuals[p] for p in params])
        total = total + comms.all_gather(left).mean(dim=0)
        exact = name not in ("fp16", "bf16")  # whose sums over ranks are rounded on the way
        torch.testing.assert_close(
            total, expected, rtol=1e-12 if exact else 0.05, atol=1e-12 if exact else 0.05, msg=name
        )


@on_ranks(2, 3)
def test_what_fits_arrives_whole(comms):
    params = parameters()
    whole = gradients(comms, 0)
    numbers = torch.randint(-126, 127, whole.shape, generator=torch.Generator().manual_seed(0))
    numbers[::8] = 127  # the largest of each block, wherever it begins
    halves = (numbers % 32).float() * comms.world_size
    full = parameters(((12, 5),))
    for name, values, of in (
        ("top-k:1.0", whole, params),
        ("random-k:1.0", whole, params),
        ("int8", numbers.float() * 0.5, params),
        ("power:5", gradients(comms, 0, ((12, 5),)), full),
        ("fp16", halves, params),
        ("bf16", halves, params),
        ("sign", torch.where(numbers > 0, 0.25, -0.25), params),
    ):
        state, flat = Compression(compressor(name), comms), values.clone()
        state.average(of, flat)
        expected = comms.all_gather(values).mean(dim=0)
        torch.testing.assert_close(flat, expected, rtol=1e-6, atol=1e-7, msg=name)
        most = (
            1e-4 if name in TWICE else 0.0
        )  # a sum by three is rounded before its second rounding
        assert all((kept.abs() <= most).all() for kept in state.residuals.values()), name


@on_ranks(2, 3)
def test_a_mean_of_low_rank_is_found_at_once(comms):
    params = parameters(((30, 20),), torch.float64)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    right = torch.randn(2, 20, generator=generator, dtype=torch.float64) + comms.rank
    broadcast_tensors([left], comms)
    matrix = left @ right
    flat = matrix.flatten()
    Compression(compressor("power:2"), comms).average(params, flat)
    torch.testing.assert_close(flat, comms.all_gather(matrix).mean(dim=0).flatten())


@on_ranks(2, 3, 4)
def test_bytes_are_those_of_the_formula(comms):
    n = comms.world_size
    for name in ALL:
        state, params = Compression(compressor(name), comms), parameters()
        with MessageCounter(comms) as counter:
            state.average(params, gradients(comms, 0))
        sent = sum(message.nbytes for messages in counter.gather() for message in messages)
        assert sent == pytest.approx(n * state.sent_bytes(), rel=1e-12), name


def test_gathering_grows_with_the_ranks_and_two_phases_and_adding_up_do_not():
    shapes = [torch.Size((512, 512))]  # a block for each of 64 ranks, and more
    for name in ALL:
        of = compressor(name).sent_bytes
        grows = of(shapes, 4, 64) / of(shapes, 4, 8)
        gathered = name.startswith("top-k")
        assert grows == pytest.approx(9 if gathered else 63 / 64 / (7 / 8)), name


def test_two_phases_send_twice_what_a_part_of_one_rank_takes():
    values = 8 * 4096
    for name, of_all in (("int8", values), ("sign", values // 8)):
        scales = 4 * values // BLOCK
        for ranks in (1, 2, 4):
            predicted = 2 * (ranks - 1) / ranks * (of_all + scales)
            assert compressor(name).sent_bytes([torch.Size((values,))], 4, ranks) == predicted


@on_ranks(2, 3)
def test_parts_go_to_whom_they_are_for(comms):
    n = comms.world_size
    whom = torch.arange(n)
    parts = [100 * comms.rank + whom[:, None].expand(n, 3), (whom + comms.rank).to(torch.int8)]
    for rank, (first, second) in enumerate(exchange_parts(parts, comms)):
        assert first.tolist() == [100 * rank + comms.rank] * 3
        assert second.item() == rank + comms.rank


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_everybodys_and_soon_forgotten(comms):
    for name in ALL:
        for bad in (math.inf, -math.inf, math.nan):
            state, params = Compression(compressor(name), comms), parameters()
            for step in range(5):
                flat = gradients(comms, step)
                if step == 2 and comms.rank == 1:
                    flat[1000] = bad
                state.average(params, flat)
                finite = flat.isfinite().all().item()
                assert comms.all_gather_data(finite) == [step != 2] * 2, (name, bad, step)
                if step == 2:
                    assert not any(r.any() for r in state.residuals.values()), name
            assert all(r.isfinite().all() for r in state.residuals.values()), name


@on_ranks(2)
def test_what_16_bits_cannot_hold_is_sent_later(comms):
    """Two ranks whose sum, or whose values, exceed the largest of them."""
    params = parameters(((4,),))
    flat = torch.full((4,), 5e4)
    Compression(compressor("fp16"), comms).average(params, flat)
    assert flat.tolist() == [torch.tensor(5e4).half().item()] * 4
    flat, state = torch.full((4,), 3e5), Compression(compressor("fp16"), comms)
    arrived = 0
    for _ in range(6):
        state.average(params, flat)
        assert flat.isfinite().all()
        arrived = arrived + flat
        flat = torch.zeros(4)
    torch.testing.assert_close(arrived, torch.full((4,), 3e5), rtol=1e-3, atol=0)


@on_ranks(2)
def test_zeros_are_sent_as_zeros_and_do_no_harm(comms):
    for name in ALL:
        state, params = Compression(compressor(name), comms), parameters()
        flat = torch.zeros_like(gradients(comms, 0))
        state.average(params, flat)
        assert not flat.any(), name
        flat = gradients(comms, 0)
        state.average(params, flat)
        assert flat.any(), name


@on_ranks(2)
def test_what_cannot_be_compressed_is_refused(comms):
    state = Compression(compressor("int8"), comms)
    for flat in (torch.zeros(4, dtype=torch.complex64), torch.zeros(4).to_sparse()):
        with pytest.raises(RuntimeError, match=f"rank {comms.rank}: compression expected dense"):
            state.average(parameters(((4,),)), flat)


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_are_the_largest(seed):
    torch.manual_seed(seed)
    sorted_so_that_the_sample_misleads = torch.zeros(5 * SAMPLE)
    sorted_so_that_the_sample_misleads[1::5] = torch.rand(SAMPLE)
    for values in (
        torch.randn(10),
        torch.randn(4 * SAMPLE + 3),
        torch.randn(4 * SAMPLE).exp(),
        torch.ones(2 * SAMPLE),
        sorted_so_that_the_sample_misleads,
    ):
        for number in (1, len(values) // 100 + 1, len(values) // 2, len(values)):
            places = largest(values, number)
            assert len(set(places.tolist())) == number
            expected = values.abs().sort(descending=True).values[:number]
            assert torch.equal(values[places].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("columns", [64, 512, 1000, 1023])
def test_a_threshold_is_good_where_some_columns_have_the_largest_values(columns):
    torch.manual_seed(0)
    matrix = torch.randn((1 << 22) // columns, columns) * torch.rand(columns) ** 4
    values = matrix.flatten()
    for number in (len(values) // 100, len(values) // 1000):
        threshold = threshold_of(values, number)
        assert threshold is not None
        assert number <= (values.abs() >= threshold).sum() < 2.5 * number


@pytest.mark.parametrize("length", [1, 8, 9, 1000])
def test_signs_take_a_bit_each(length):
    values = torch.randn(length)
    packed = pack(values)
    assert packed.shape == (math.ceil(length / 8),)
    assert torch.equal(unpack(packed, values), torch.where(values < 0, -1.0, 1.0))


@pytest.mark.parametrize(
    "name",
    ["", "top-k", "top-k:", "top-k:0", "top-k:1.5", "top-k:-3", "power:0.5", "zip"],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=rf"expected one of top-k:K, .*, bf16, .* got '{name}'"):
        compressor(name)


@on_ranks(2)
def test_int8_keeps_the_sign_of_the_largest_in_16_bits(comms):
    for mantissa in range(128):
        values = torch.zeros(64, dtype=torch.bfloat16)
        values[0] = 1 + mantissa / 128
        mean = torch.empty_like(values)
        compressor("int8").average(values.clone(), mean, [], comms)
        assert 0.98 < mean[0] / values[0] < 1.02, mantissa


@on_ranks(2)
def test_factors_of_gradients_in_16_bits(comms):
    for dtype in (torch.bfloat16, torch.float16):
        matrix = torch.ones(16, 8, dtype=dtype)
        mean = torch.empty(128, dtype=dtype)
        compressor("power:2").average(matrix.flatten(), mean, [torch.nn.Parameter(matrix)], comms)
        torch.testing.assert_close(mean, torch.ones(128, dtype=dtype), rtol=0.02, atol=0.02)


@on_ranks(1)
def test_halves_of_other_halves(comms):
    values, mean = torch.ones(4, dtype=torch.float16), torch.empty(4, dtype=torch.float16)
    compressor("bf16").average(values, mean, [], comms)
    assert mean.tolist() == [1.0] * 4


@on_ranks(2)
def test_a_bucket_without_values_is_sent(comms):
    for name in ALL:
        Compression(compressor(name), comms).average(parameters([(0, 3)]), torch.zeros(0))


def test_a_share_is_of_the_values_whatever_floats_say():
    assert TopK(0.07).sent(100) == 7, "0.07 * 100 is above 7"
    assert TopK(0.07).sent(101) == 8
    assert TopK(np.float64(0.5)).sent(100) == 50
    assert [RandomK(k).sent(100) for k in (1, 200, 1.0, 1e-6)] == [1, 100, 100, 1]
