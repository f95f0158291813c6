"""The emulator of GPUs, by small kernels that Triton compiles, and by PTX of our own."""

import numpy as np
import pytest
import torch

from flexhop.offline.emulate import Emulator
from flexhop.offline.interpret import Deadlock, OutOfBoundsError, Schedule
from flexhop.offline.ptx.machine import Machine
from flexhop.offline.ptx.memory import GlobalMemory
from flexhop.offline.ptx.parse import parse
from flexhop.offline.ptx.races import Race
from tests.unit.offline.kernels import POINTERS, kernel

HOPPER = Emulator(templates=True)


def _emulate(body: str, x: torch.Tensor, out: torch.Tensor, emulator: Emulator = HOPPER):
    emulator.run(kernel(POINTERS, body), (2,), {"x": x, "out": out})
    return out


def test_arithmetic_and_reductions():
    body = """
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    v = tl.load(x + i, mask=i < 300, other=1.0)
    n = (v * 8).to(tl.int32)
    v = tl.where(n % 3 == 0, tl.exp(v), v / (n + 100)) - tl.sum(tl.abs(v)) + tl.max(v)
    v += (n // 3 + ((n << 2) ^ 5) - (n >> 1) + tl.minimum(n, 4)).to(tl.float32)
    v += v.to(tl.bfloat16).to(tl.float32) + v.to(tl.float16).to(tl.float32) + tl.cumsum(v)
    tl.store(out + i, v, mask=i < 300)
    """
    torch.manual_seed(0)
    x = torch.randn(300)
    found = _emulate(body, x, torch.zeros(300))
    padded = torch.cat([x.double(), torch.ones(212).double()]).view(2, 256)
    n = (padded.float() * 8).to(torch.int32)
    v = torch.where(n % 3 == 0, padded.exp(), padded / (n + 100))  # 0 if a remainder is 0
    v = v - padded.abs().sum(1, keepdim=True) + padded.amax(1, keepdim=True)
    third = torch.div(n, 3, rounding_mode="trunc")
    v = v + third + ((n << 2) ^ 5) - (n >> 1) + n.clamp(max=4)
    v = v + v.float().bfloat16() + v.float().half() + v.cumsum(1)
    torch.testing.assert_close(found, v.flatten()[:300].float(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("architecture", [80, 90, 120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
def test_products(architecture, dtype):
    cast = "" if dtype == "tf32" else f".to(tl.{dtype})"
    body = f"""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    one = tl.load(x + i * 64 + j){cast}
    other = tl.load(x + 4096 + j * 64 + i){cast}
    tl.store(out + i * 64 + j, tl.dot(one, other))
    """
    torch.manual_seed(0)
    x = torch.randint(-8, 8, (2, 64, 64)).float()  # exact in all of these types
    found = _emulate(body, x, torch.zeros(64, 64), Emulator(architecture, True))
    torch.testing.assert_close(found, x[0] @ x[1].mT, rtol=0, atol=0)


def test_atomic_additions_of_several_programs():
    body = "i = tl.arange(0, 256)\ntl.atomic_add(out + i % 3, tl.load(x + i))"
    found = _emulate(body, torch.ones(256), torch.zeros(3))
    assert found.tolist() == [172, 170, 170]


@pytest.mark.parametrize("operation", ["load", "store"])
def test_addresses_outside_of_an_argument(operation):
    far = {"load": "tl.store(out + i, tl.load(x + i + 1))", "store": "tl.store(out + i + 1, i)"}
    body = f"i = tl.program_id(0) * 32 + tl.arange(0, 32)\n{far[operation]}"
    whole = torch.zeros(65)
    with pytest.raises(
        OutOfBoundsError, match=rf"{operation} of .* has 64 elements .*\(1, 0, 0\)"
    ):
        _emulate(body, whole[:64], torch.zeros(64))


_HEAD = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry example(.param .u64 example_param_0)
.reqntid 64
{{
	.reg .pred 	%p<4>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [example_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
{body}
	st.global.b32 	[%rd3], %r2;
	ret;
}}
"""


def _run(body: str, when: str = "random") -> list[int]:
    out = torch.full((64,), -1, dtype=torch.int32)
    program = parse(_HEAD.format(body=body))
    memory = GlobalMemory("example", {"out": out})
    symbols = {"example_param_0": out.data_ptr(), "global_smem": 0}
    machine = Machine(program, memory, 1024, symbols, Schedule(when, 3))
    machine.watch()
    machine.start({})
    assert machine.run(100_000)
    return out.tolist()


def test_threads_of_a_warp_part_and_meet():
    body = """
	and.b32 	%r3, %r1, 1;
	setp.eq.b32 	%p1, %r3, 0;
	@%p1 bra 	$even;
	mov.b32 	%r2, 5;
	bra.uni 	$both;
$even:
	mov.b32 	%r2, 7;
$both:
	shfl.sync.bfly.b32 	%r2, %r2, 1, 31, -1;
	"""
    assert _run(body) == [5, 7] * 32


def test_labels_of_inline_assembly_belong_to_their_block():
    wait = """
	{ .reg .pred done;
	mov.b32 	%r4, 0;
	.reg .b32 a<2>;
	mov.b32 	a0, 1;
	again:
	add.s32 	%r4, %r4, a0;
	setp.eq.b32 	done, %r4, COUNT;
	@!done bra.uni again; }
	add.s32 	%r2, %r2, %r4;
	"""
    body = "mov.b32 %r2, 0;" + wait.replace("COUNT", "3") + wait.replace("COUNT", "4")
    assert _run(body) == [7] * 64


def test_a_barrier_for_more_threads_than_come():
    with pytest.raises(Deadlock, match="waits for 96 threads at barrier 2"):
        _run("mov.b32 %r2, 0; bar.sync 2, 96;")


def test_a_barrier_for_fewer_threads_than_come():
    body = """
	setp.lt.u32 	%p1, %r1, 16;
	@%p1 bra 	$go;
	mov.b32 	%r2, 1;
$go:
	mov.b32 	%r2, 2;
	bar.sync 	1, 32;
	"""
    assert _run(body) == [2] * 64  # each warp by itself


def test_barriers_in_memory_count_arrivals():
    body = """
	mov.b32 	%r5, global_smem;
	setp.eq.b32 	%p1, %r1, 0;
	@%p1 mbarrier.init.shared::cta.b64 [%r5], 64;
	bar.sync 	0;
	mbarrier.arrive.shared::cta.b64 _, [%r5];
	{ .reg .pred complete;
	waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [%r5], 0;
	@!complete bra.uni waitLoop; }
	mov.b32 	%r2, 1;
	"""
    assert _run(body) == [1] * 64
    with pytest.raises(Deadlock, match="pending=1"):
        _run(body.replace("b64 [%r5], 64", "b64 [%r5], 65"))


# A thread stores its number, and loads what its neighbour in the other warp has stored.
_EXCHANGE = """
	mov.b32 	%r5, global_smem;
	setp.eq.b32 	%p1, %r1, 0;
	@%p1 mbarrier.init.shared::cta.b64 [%r5], 64;
	bar.sync 	0;
	xor.b32 	%r3, %r1, 32;
	mad.lo.s32 	%r4, %r1, 4, 64;
	mad.lo.s32 	%r6, %r3, 4, 64;
	st.shared.b32 	[%r4], %r1;
	{first}
	ld.shared.b32 	%r2, [%r6];
	{second}
	st.shared.b32 	[%r4], {value};
"""
_BY_THREADS = "bar.sync 	0;"
_BY_MEMORY = """mbarrier.arrive.shared::cta.b64 _, [%r5];
	{ .reg .pred complete;
	waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [%r5], 0;
	@!complete bra.uni waitLoop; }"""
_ARRIVAL = "mbarrier.arrive.shared::cta.b64 _, [%r5];"


def _exchange(first: str = "", second: str = "", value: str = "-1") -> list[int]:
    return _run(_EXCHANGE.format(first=first, second=second, value=value))


@pytest.mark.parametrize("barrier", [_BY_THREADS, _BY_MEMORY])
def test_barriers_order_accesses(barrier):
    assert _exchange(barrier, _BY_THREADS) == [n ^ 32 for n in range(64)]


@pytest.mark.parametrize("barrier", ["", "bar.warp.sync 	-1;", _ARRIVAL])
def test_a_load_that_nothing_orders_with_the_store(barrier):
    with pytest.raises(Race, match=r"warp [01] (wrote|reads) it in (ld|st)\.shared"):
        _exchange(barrier, _BY_THREADS)


def test_a_store_that_nothing_orders_with_the_load():
    with pytest.raises(Race, match=r"nothing orders .* warp [01] reads it in ld\.shared"):
        _exchange(_BY_THREADS)


def test_a_store_that_changes_nothing():
    """Kernels have such stores, by all threads."""
    assert _exchange(_BY_THREADS, value="%r1") == [n ^ 32 for n in range(64)]


def test_all_threads_store_at_one_place():
    """The last one's number stays; nobody orders the two warps."""
    body = """
	mov.b32 	%r5, global_smem;
	st.shared.b32 	[global_smem], %r1;
	bar.sync 	0;
	ld.shared.b32 	%r2, [global_smem];
	"""
    with pytest.raises(Race, match=r"warp 0 wrote it in st\.shared"):
        _run(body)
    same = body.replace("], %r1", "], %r3").replace("mov.b32", "shr.u32 %r3, %r1, 6; mov.b32", 1)
    assert _run(same) == [0] * 64


def test_both_warps_store_one_matrix():
    """Layouts repeat a small tensor in several warps."""
    body = """
	shl.b32 	%r4, %r1, 4;
	and.b32 	%r4, %r4, 127;
	stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r3};
	bar.sync 	0;
	ld.shared.b32 	%r2, [%r4];
	"""
    lane, warp = "and.b32 %r3, %r1, 31;", "mov.b32 %r3, %r1;"
    assert _run(lane + body) == [4 * (n % 8) for n in range(64)]
    with pytest.raises(Race, match=r"warp 0 wrote it in stmatrix"):
        _run(warp + body)


def test_a_barrier_that_is_used_before_it_is_made():
    body = """
	mov.b32 	%r5, global_smem;
	setp.eq.b32 	%p1, %r1, 0;
	@%p1 mbarrier.init.shared::cta.b64 [%r5], 64;
	mbarrier.arrive.shared::cta.b64 _, [%r5];
	mov.b32 	%r2, 1;
	"""
    with pytest.raises((Race, RuntimeError), match=r"mbarrier\.init|there is no barrier"):
        _run(body)


# Four bytes of each thread are copied while the program goes on.
_COPY = """
	mul.lo.s32 	%r4, %r1, 4;
	cp.async.ca.shared.global [%r4], [%rd3], 4;
	cp.async.commit_group;
	{wait}
	xor.b32 	%r4, %r4, {other};
	ld.shared.b32 	%r2, [%r4];
"""


@pytest.mark.parametrize(
    ("wait", "other"), [("", 4), ("cp.async.wait_group 0;", 128), ("bar.sync 0;", 128)]
)
def test_a_copy_that_nobody_waited_for(wait, other):
    """Each warp waits for its own copies; a barrier tells the others."""
    with pytest.raises(Race, match=r"may still be written in cp\.async"):
        _run(_COPY.format(wait=wait, other=other))


@pytest.mark.parametrize(
    ("wait", "other"),
    [("cp.async.wait_group 0;", 4), ("cp.async.wait_group 0;\n\tbar.sync 0;", 128)],
)
def test_a_copy_that_is_over(wait, other):
    assert _run(_COPY.format(wait=wait, other=other)) == [-1] * 64


def test_a_program_that_ends_before_its_copies():
    with pytest.raises(Race, match=r"ends before somebody has waited for cp\.async"):
        _run("mov.b32 %r2, 0; mul.lo.s32 %r4, %r1, 4; cp.async.ca.shared.global [%r4], [%rd3], 4;")


def test_memory_of_each_thread():
    body = """
	.local .align 16 .b8 __local_depot0[16];
	mov.b64 	%rd2, __local_depot0;
	st.local.b32 	[%rd2+8], %r1;
	bar.sync 	0;
	ld.local.b32 	%r2, [%rd2+8];
	cvta.local.u64 	%rd2, %rd2;
	st.b32 	[%rd2+4], %r2;
	ld.b32 	%r2, [%rd2+4];
	"""
    assert _run(body) == list(range(64))


def test_unknown_instructions_are_named():
    with pytest.raises(NotImplementedError, match=r"no tcgen05\.mma"):
        _run("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1;")


@pytest.mark.parametrize("opcode", ["max.xorsign.abs.f32", "add.sat.s32", "mul.rz.f64"])
def test_unknown_ends_of_instructions_are_named(opcode):
    with pytest.raises(NotImplementedError, match=rf"no {opcode}"):
        _run(f"{opcode} %r2, %r1, %r1;")


def test_the_larger_number_at_least_0_and_not_a_number():
    body = """
	sub.s32 	%r3, 9, %r1;
	sub.s32 	%r4, 7, %r1;
	max.relu.s32 	%r2, %r3, %r4;
	max.NaN.f32 	%r5, 0f7FC00000, 0f3F800000;
	max.f32 	%r6, 0f7FC00000, 0f3F800000;
	setp.nan.f32 	%p1, %r5, %r5;
	selp.b32 	%r5, 100, 0, %p1;
	setp.eq.f32 	%p1, %r6, 0f3F800000;
	selp.b32 	%r6, 1000, 0, %p1;
	add.s32 	%r2, %r2, %r5;
	add.s32 	%r2, %r2, %r6;
	"""
    assert _run(body) == [max(9 - n, 0) + 1100 for n in range(64)]


@pytest.mark.parametrize(
    ("direction", "above", "below"), [("rm", 0, 1), ("rp", 1, 0), ("rz", 0, 0), ("rn", 0, 0)]
)
def test_directions_of_rounding(direction, above, below):
    """A quarter beyond 2**23 and its negative: how many numbers farther from 0 they become."""
    body = f"""
	fma.{direction}.f32 	%r2, 0f3E800000, 0f3F800000, 0f4B000000;
	fma.{direction}.f32 	%r3, 0fBE800000, 0f3F800000, 0fCB000000;
	sub.s32 	%r2, %r2, {0x4B000000};
	sub.s32 	%r3, %r3, {0xCB000000 - (1 << 32)};
	mul.lo.s32 	%r3, %r3, 10;
	add.s32 	%r2, %r2, %r3;
	"""
    assert _run(body) == [above + 10 * below] * 64


def test_bits():
    body = """
	bfe.s32 	%r3, %r1, 1, 2;
	lop3.b32 	%r4, %r1, 12, 10, 202;
	prmt.b32 	%r5, %r1, 255, 16452;
	bfi.b32 	%r6, %r1, 255, 4, 3;
	add.s32 	%r2, %r3, %r4;
	add.s32 	%r2, %r2, %r5;
	add.s32 	%r2, %r2, %r6;
	"""
    n = np.arange(64)
    signed = (n >> 1 & 3) - 4 * (n >> 2 & 1)
    chosen = (n & 12) | (~n & 10)
    inserted = (255 & ~(7 << 4)) | ((n & 7) << 4)
    # Bytes 4, 4, 0 and 4 of 255 << 32 | n.
    bytes_of = [n, 0 * n, 0 * n, 0 * n, 255 + 0 * n, 0 * n, 0 * n, 0 * n]
    permuted = sum(bytes_of[16452 >> 4 * i & 7].astype(np.int64) << 8 * i for i in range(4))
    assert _run(body) == (signed + chosen + permuted + inserted).astype(np.int32).tolist()
