"""Collectives over shared memory between real processes: every result bit by bit against the sum in rank order, and the bytes counted."""

from __future__ import annotations

import pickle

import pytest
import torch

from colrow.comm.group import Call
from colrow.comm.shm import ShmTransport
from colrow.comm.shm_check import ordered_sum
from tests.shm_ranks import run_ranks

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS = (*FLOATS, torch.int32, torch.int64, torch.uint8, torch.int8)
SMALL = 8192  # bytes of a slot, so that a few thousand elements go through in several pieces

pytestmark = pytest.mark.process


def call(op: str, name: str = "here", detail: str = "") -> Call:
    return Call(op, name, detail=detail)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What every rank can compute of every other rank."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=random) * 10).to(dtype)
    return torch.randint(0, 256, (numel,), generator=random).sub(0 if dtype is torch.uint8 else 128).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def all_reduces(transport: ShmTransport) -> int:
    tried = 0
    for limit in (0, 1 << 30):
        transport.one_shot_limit = limit
        for dtype in NUMBERS:
            for numel in (0, 1, 7, 1024, 2049, 9001):
                inputs = [values(rank, numel, dtype, tried) for rank in range(transport.size)]
                x = inputs[transport.rank].clone()
                transport.all_reduce(x, "sum", call("all_reduce"))
                assert same(x, ordered_sum(inputs)), (dtype, numel, limit)
                x = inputs[transport.rank].clone()
                transport.all_reduce(x, "max", call("all_reduce"))
                assert same(x, torch.stack(inputs).amax(0) if numel else x), (dtype, numel, limit)
                tried += 1
    return tried


def gathers(transport: ShmTransport) -> int:
    rank, size = transport.rank, transport.size
    uneven = [(9001 * (r + 1)) % 7919 for r in range(size)]
    cases = [
        [5] * size,
        [0] * size,
        [3 * r for r in range(size)],
        uneven,
        [0] * (size - 1) + [6000],
    ]
    for seed, sizes in enumerate(cases):
        for dtype in (*NUMBERS, torch.bool, torch.int16):
            pieces = [values(r, n, dtype, seed) for r, n in enumerate(sizes)]
            out = [torch.empty_like(piece) for piece in pieces]
            transport.all_gather(pieces[rank], out, call("all_gather"))
            assert all(map(same, out, pieces)), (sizes, dtype)
    for seed, sizes in enumerate(cases):
        for dtype in FLOATS:
            parts = [[values(r, n, dtype, 10 * seed + to) for to, n in enumerate(sizes)] for r in range(size)]
            out_part = torch.empty_like(parts[rank][rank])
            transport.reduce_scatter(parts[rank], out_part, call("reduce_scatter"))
            assert same(out_part, ordered_sum([parts[r][rank] for r in range(size)])), (sizes, dtype)
    return len(cases)


def others(transport: ShmTransport) -> int:
    rank, size = transport.rank, transport.size
    for source in range(size):
        for numel in (0, 3, 5000):
            for dtype in (*NUMBERS, torch.bool):
                x = values(rank, numel, dtype)
                transport.broadcast(x, source, call("broadcast"))
                assert same(x, values(source, numel, dtype))
    for length in (0, 100, 2039, 2040, 2041, 50_000):
        got = transport.gather_objects({"rank": rank, "text": "x" * (length * (rank + 1))}, call("object"))
        assert got == [{"rank": r, "text": "x" * (length * (r + 1))} for r in range(size)]
    assert transport.gather_objects(None, call("barrier")) == [None] * size
    return len(pickle.dumps(None))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("work", [all_reduces, gathers, others])
def test_every_result_bit_by_bit(size: int, work: object) -> None:
    assert len(set(run_ranks(work, size, slot_bytes=SMALL))) == 1


def special_values(transport: ShmTransport) -> bool:
    everything = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float16, torch.bfloat16):
        mine = (everything if transport.rank == 0 else everything[order]).view(dtype)
        inputs = [torch.empty_like(mine) for _ in range(transport.size)]
        transport.all_gather(mine, inputs, call("all_gather"))
        x = mine.clone()
        transport.all_reduce(x, "sum", call("all_reduce"))
        expected = ordered_sum(inputs)
        nan = expected.isnan()
        assert torch.equal(x.isnan(), nan)  # which NaN is not said
        assert same(x[~nan], expected[~nan])
        x = mine.clone()
        transport.all_reduce(x, "max", call("all_reduce"))
        expected = torch.maximum(*inputs)
        assert torch.equal(x.isnan(), expected.isnan())
        assert torch.equal(x[~x.isnan()], expected[~x.isnan()])
    return True


def test_every_half_precision_value_adds_as_torch_adds() -> None:
    run_ranks(special_values, 2)


def counted(transport: ShmTransport) -> list[int]:
    rank, size = transport.rank, transport.size
    x = torch.ones(3000)
    transport.one_shot_limit = 1 << 30
    moved = [transport.all_reduce(x, "sum", call("all_reduce"))]
    transport.one_shot_limit = 0
    moved.append(transport.all_reduce(x, "sum", call("all_reduce")))
    sizes = [100 + 7 * r for r in range(size)]
    out = [torch.empty(n) for n in sizes]
    moved.append(transport.all_gather(torch.ones(sizes[rank]), out, call("all_gather")))
    moved.append(transport.reduce_scatter(out, torch.empty(sizes[rank]), call("reduce_scatter")))
    moved.append(transport.broadcast(x, size - 1, call("broadcast")))
    return moved


def test_bytes_are_counted_where_they_are_copied() -> None:
    size, total = 3, 4 * sum(100 + 7 * r for r in range(3))
    results = run_ranks(counted, size, slot_bytes=SMALL)
    for rank, (one_shot, _, gather, scatter, broadcast) in enumerate(results):
        own = 4 * (100 + 7 * rank)
        assert one_shot == 12000 + (size - 1) * 12000
        assert gather == total
        assert scatter == (total - own) + (size - 1) * own
        assert broadcast == 12000
    written, read = size * 12000, 2 * (size - 1) * 12000  # two steps, all ranks together: as the ring
    assert sum(result[1] for result in results) == written + read


def groups(transport: ShmTransport) -> list[float]:
    rank = transport.rank
    subs = [(ranks, transport.sub(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 2, 3), (3,))]
    seen = []
    for turn in range(20):
        for ranks, sub in subs:
            assert (sub is None) == (rank not in ranks)
            if sub is not None:
                x = torch.full((500,), float(rank + turn))
                sub.all_reduce(x, "sum", call("all_reduce", f"group {ranks}"))
                assert x[0].item() == sum(r + turn for r in ranks)
                assert bool((x == x[0]).all())
        x = torch.ones(10)
        transport.all_reduce(x, "sum", call("all_reduce", "world"))
        seen.append(x[0].item())
    for _, sub in subs:
        if sub is not None:
            sub.close()
    return seen


def test_sub_groups_do_not_see_each_other() -> None:
    assert run_ranks(groups, 4, slot_bytes=SMALL) == [[4.0] * 20] * 4


def in_place_of_a_copy(transport: ShmTransport) -> list[int]:
    moved = []
    for numel in (1, 1000, SMALL // 4):
        inputs = [values(r, numel, torch.float32) for r in range(transport.size)]
        buffer = transport.buffer(numel, torch.float32)
        buffer.copy_(inputs[transport.rank])  # stands for a product with out=
        out = torch.empty(numel)
        moved.append(transport.all_reduce_into(buffer, out, "sum", call("all_reduce")))
        assert same(out, ordered_sum(inputs))
        with pytest.raises(ValueError, match="lent for an earlier call"):
            transport.all_reduce_into(buffer, out, "sum", call("all_reduce"))
    with pytest.raises(ValueError, match="at most"):
        transport.buffer(SMALL, torch.float32)
    return moved


def test_a_value_computed_in_the_buffer_is_not_copied() -> None:
    assert run_ranks(in_place_of_a_copy, 2, slot_bytes=SMALL) == [[4, 4000, SMALL]] * 2  # only what was read from the peer


def reference_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As transformers' LlamaRMSNorm."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def fused(transport: ShmTransport) -> list[bytes]:
    results = []
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)):
        for rows, width in ((1, 1), (1, 575), (3, 64), (50, 333), (0, 8)):
            inputs = [values(r, rows * width, dtype).view(rows, width) for r in range(transport.size)]
            residual, weight = values(90, rows * width, dtype).view(rows, width), values(91, width, dtype)
            expected = residual + ordered_sum(inputs)
            out = torch.empty(rows, width, dtype=dtype)
            source = inputs[transport.rank]
            if rows * width * dtype.itemsize <= SMALL // 2:
                source = transport.buffer(rows * width, dtype).view(rows, width).copy_(source)
            transport.all_reduce_norm(source, residual, weight, 1e-5, out, call("all_reduce"))
            assert same(residual, expected), (dtype, rows, width)
            wanted = reference_norm(expected, weight, 1e-5)
            torch.testing.assert_close(out.float(), wanted.float(), rtol=close, atol=close)
            results.append(bytes(out.view(torch.uint8).flatten().tolist()))
    with pytest.raises(ValueError, match="a row is too long"):
        transport.all_reduce_norm(torch.ones(1, SMALL), torch.ones(1, SMALL), torch.ones(SMALL), 1e-5, torch.ones(1, SMALL), call("x"))
    with pytest.raises(ValueError, match="of one dtype"):
        transport.all_reduce_norm(*[torch.ones(4, dtype=torch.float64)] * 3, 1e-5, torch.ones(4, dtype=torch.float64), call("x"))
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_all_reduce_with_residual_and_norm_is_what_the_modules_compute(size: int) -> None:
    results = run_ranks(fused, size, slot_bytes=SMALL)
    assert all(result == results[0] for result in results)  # the same bits on every rank


def refusals(transport: ShmTransport) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        transport.all_reduce(torch.ones(4, 4).t(), "sum", call("all_reduce"))
    with pytest.raises(ValueError, match="contiguous"):
        transport.broadcast(torch.ones(4, 4).t(), 0, call("broadcast"))
    with pytest.raises(ValueError, match="numbers"):
        transport.all_reduce(torch.ones(4, dtype=torch.complex64), "sum", call("all_reduce"))
    with pytest.raises(KeyError):
        transport.all_reduce(torch.ones(4), "mean", call("all_reduce"))
    with pytest.raises(ValueError, match="its place is"):
        transport.all_gather(torch.ones(4), [torch.ones(3)] * transport.size, call("all_gather"))
    x = torch.ones(3)
    transport.all_reduce(x, "sum", call("all_reduce"))  # a refusal before the call leaves the group in order
    assert x.tolist() == [2.0] * 3


def test_what_it_cannot_do_is_refused_before_anything_moves() -> None:
    run_ranks(refusals, 2)


def many_sites(transport: ShmTransport) -> float:
    x = torch.zeros(4)
    for turn in range(9000):
        transport.all_reduce(x, "max", call("all_reduce", f"layer {turn % 7}", f"{turn} tokens"))
    return x.sum().item()


def test_the_table_of_call_sites_stays_small() -> None:
    assert run_ranks(many_sites, 2) == [0.0, 0.0]
