"""train/profile/time_shares.py: a step's time divided, compared with sums made by hand and with a count by nanoseconds."""

import itertools
import random
from collections import Counter

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from train.profile import time_shares
from train.profile.time_shares import CLASSES, COMMUNICATION, DATA, OTHER, STEP, Span

MAIN, BACKWARD = 1, 2  # threads
NUMBERS = itertools.count()


def op(name, begin, end, thread=MAIN, number=0, **facts):
    """As torch.profiler has it; microseconds."""
    return FunctionEvent(number, name, thread, begin, end, **facts)


def mark(name, begin, end, thread=MAIN):
    return op(name, begin, end, thread, is_user_annotation=True)


def kernel(name, begin, end, launched=None, thread=MAIN):
    """A kernel, and the call that launched it if it is known."""
    number = next(NUMBERS)
    events = [op(name, begin, end, 7, number, device_type=DeviceType.CUDA)]
    if launched:
        events.append(op("cudaLaunchKernel", launched, launched + 1, thread, number))
    return events


def divided(events, on_gpu=False):
    tree = EventList(events)
    tree._build_tree()
    return time_shares.shares(tree, on_gpu)


def us(shares):
    """Class -> microseconds, of those that have any."""
    return {name: ns / 1000 for name, ns in shares.by_class.items() if ns}


def test_operators_of_a_cpu_are_divided_by_what_each_takes_itself():
    graph = "## Call CompiledFxGraph fnfvihqciwaapywrh62xqtxqcdukkhsn23rpm6gbkhkrhch2ih4n ##"
    events = [
        mark(STEP, 0, 1000),
        mark(DATA, 10, 60),
        op("aten::index", 20, 40),
        op("aten::linear", 100, 200),
        op("aten::mm", 110, 190),
        op("aten::resolve_conj", 120, 121),
        op("aten::baddbmm", 200, 240),
        op("aten::copy_", 210, 220),
        op("aten::softmax", 240, 260),
        op("aten::matmul", 260, 300),
        op("aten::bmm", 265, 295),
        op("aten::scaled_dot_product_attention", 300, 350),
        op("_LinearCrossEntropy", 350, 500),
        op("aten::mm", 360, 400),
        op("aten::softmax", 400, 450),
        op("autograd::engine::evaluate_function: MmBackward0", 510, 600),
        op("MmBackward0", 520, 590),
        op("aten::mm", 530, 580),
        op(graph, 600, 650),
        op("graph_0_cpp_fused__softmax_view_3", 600, 610),
        op("graph_0_cpp_fused_mul_silu_7", 610, 640),
        mark("Optimizer.step#AdamW.step", 700, 800),
        op("aten::_fused_adamw_", 720, 780),
        mark("DistributedDataParallel.forward", 900, 990),
        op("aten::mul", 910, 930),
        op("aten::mul", 910, 930, BACKWARD),  # another thread
        op("aten::mm", 2000, 2100),
    ]
    shares = divided(events)
    assert us(shares) == {
        "matmul": 100 + 40 + 50,  # linear and what is in it, the head's, that of backward
        "attention": 40 + 20 + 30 + 50 + 10,  # baddbmm, softmax, bmm, sdpa, the fused softmax
        "loss": 150 - 40,
        "optimizer": 100,
        "data wait": 50,
        "other": 10 + 20 + 20 + 40 + 20,  # matmul's own, two of backward, compiled code, mul
        # around data, 500, 650, 800, in forward, 990
        "host gaps": 10 + 40 + 10 + 50 + 100 + 70 + 10,
    }
    assert shares.head_ns == 40_000 and shares.hidden_ns == 0 and shares.wall_ns == 1_000_000
    assert shares.others == {
        "aten::matmul": 10_000,
        "autograd::engine::evaluate_function: MmBackward0": 20_000,
        "MmBackward0": 20_000,
        "graph_0_cpp_fused_mul_silu_7": 30_000,
        "calls of compiled code": 10_000,
        "aten::mul": 20_000,
    }


def test_what_gloo_sends_is_hidden_behind_operators_and_exposed_where_nothing_runs():
    events = [
        mark(STEP, 0, 100),
        op("aten::mm", 0, 40),
        mark("gloo:all_reduce", 30, 90, thread=9),
        mark("gloo:all_gather", 30, 50, thread=8),
        op("aten::mul", 60, 70),
        op("autograd::engine", 91, 98),
        op("c10d::allreduce_", 92, 98),
    ]
    shares = divided(events)
    expected = {"matmul": 40, "communication, exposed": 20 + 20 + 6, "other": 11, "host gaps": 3}
    assert us(shares) == expected
    assert shares.hidden_ns == 10_000 + 10_000


def test_kernels_of_a_gpu_are_divided_by_what_launched_them():
    """One step of 1000 us with kernels as an H100's are named."""
    events = [
        mark(STEP, 0, 1000),
        op(STEP, 0, 1000, 7, device_type=DeviceType.CUDA, is_user_annotation=True),
        mark(DATA, 0, 100),
        op("aten::linear", 100, 140),
        op("aten::mm", 110, 135),
        *kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_cublas", 150, 350, 120),
        *kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", 350, 450),
        *kernel("Memcpy HtoD (Pinned -> Device)", 400, 500),
        op("aten::bmm", 140, 160),
        *kernel("ampere_sgemm_128x64_nn", 450, 460, 145),
        op("_LinearCrossEntropy", 200, 300),
        op("aten::mm", 210, 230),
        *kernel("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT", 500, 560, 220),
        *kernel("triton_red_fused_exp_logsumexp_sub_5", 560, 600, 250),
        op("autograd::engine::evaluate_function: MmBackward0", 300, 400, BACKWARD),
        op("aten::mm", 310, 390, BACKWARD),
        *kernel("unknown_product_kernel", 600, 700, 320, BACKWARD),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", 650, 800),
        op("aten::mul", 420, 430, BACKWARD),
        *kernel("void at::native::vectorized_elementwise_kernel<4>", 740, 760, 425, BACKWARD),
        *kernel("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 800, 840),
        *kernel("triton_poi_fused_mul_silu_3", 810, 850),
        mark("Optimizer.step#Muon.step", 550, 600),
        op("aten::mm", 560, 570),
        *kernel("sm90_xmma_gemm_muon", 900, 930, 565),
        *kernel("some_kernel_of_nobody", 990, 1010),
    ]
    shares = divided(events, on_gpu=True)
    assert us(shares) == {
        "matmul": 200 + 60 + 100 + 40,  # until 840, as it began before the other kernel
        "attention": 100 + 10,
        "loss": 40,
        "optimizer": 30,  # Muon's products too
        "communication, exposed": 40 + 40,  # 700 to 800, without the 20 of the elementwise kernel
        "data wait": 100,
        "host gaps": 50 + 50 + 60,  # until the first kernel; 850 to 900; 930 to 990
        "other": 40 + 20 + 10 + 10,  # the copy's rest, mul, silu's rest, what ends in the step
    }
    assert shares.hidden_ns == 50_000 + 20_000 and shares.head_ns == 60_000
    assert shares.others == {
        "Memcpy HtoD (Pinned -> Device)": 40_000,
        "aten::mul": 20_000,
        "triton_poi_fused_mul_silu_3": 10_000,
        "some_kernel_of_nobody": 10_000,
    }
    table = shares.table()
    assert table[0] == "matmul                   40.0%       0.40 ms   of it in the head 6.0%"
    assert table[4].startswith("communication, exposed    8.0%") and "and 7.0% hidden" in table[4]
    assert "   Memcpy HtoD (Pinned -> Device) 4.0%, aten::mul 2.0%" in table[7]
    assert table[8:] == ["a step                  100.0%       1.00 ms"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128>", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>", "matmul"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<X>>", "matmul"),
        ("triton_tem_fused_addmm_relu_1", "matmul"),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<X>>>",
            "attention",
        ),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", "other"),
        ("triton_poi_fused_add_mm_mul_9", "other"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "communication, exposed"),
        ("multimem_all_reduce_kernel", "communication, exposed"),
    ],
)
def test_a_kernel_is_known_by_its_name(name, expected):
    shares = divided([mark(STEP, 0, 10), *kernel(name, 0, 10)], on_gpu=True)
    assert us(shares) == {expected: 10}


def test_each_moment_goes_to_one_span_as_when_each_is_looked_at_alone():
    """Random spans against a count nanosecond by nanosecond, over several steps."""
    rng = random.Random(3)
    steps = [Span(5, 30, ""), Span(30, 35, ""), Span(40, 70, "")]
    for _ in range(30):
        spans = []
        for _ in range(rng.randrange(12)):
            begin = rng.randrange(60)
            kind = rng.choice(("matmul", OTHER, COMMUNICATION, DATA))
            spans.append(Span(begin, begin + rng.randrange(1, 20), kind))
        by_class = Counter(dict.fromkeys(CLASSES, 0))
        hidden = 0
        for at in [*range(5, 35), *range(40, 70)]:
            kinds = [span.kind for span in spans if span.begin <= at < span.end]
            last = ([kind for kind in kinds if kind != COMMUNICATION] or ["host gaps"])[-1]
            works = last in ("matmul", OTHER)
            hidden += works and COMMUNICATION in kinds
            by_class[COMMUNICATION if COMMUNICATION in kinds and not works else last] += 1
        shares = time_shares.divide(spans, steps)
        assert shares.by_class == by_class and shares.hidden_ns == hidden
        assert (shares.steps, shares.wall_ns, shares.step_ms) == (3, 60, 20e-6)


def test_what_has_no_steps_or_kernels_is_refused():
    with pytest.raises(ValueError, match="nothing is marked 'train step'"):
        divided([op("aten::mm", 0, 1)])
    with pytest.raises(ValueError, match="there are no kernels"):
        divided([mark(STEP, 0, 1), *kernel("Memset (Device)", 0, 1)], on_gpu=True)
