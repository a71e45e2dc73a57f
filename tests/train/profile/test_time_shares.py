"""train/profile/time_shares.py: a step's time divided, compared with sums made by hand and by another reading of a trace."""

import gzip
import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from train.profile import time_shares
from train.profile.time_shares import (
    CLASSES,
    COPY,
    DATA,
    SEND,
    STEP,
    WAIT,
    WORK,
    Shares,
    Span,
    TraceError,
)

MAIN, BACKWARD = 1, 2  # threads


def event(
    category: str, name: str, begin: float, end: float, tid: object = MAIN, **args: object
) -> dict[str, Any]:
    """As torch.profiler exports it; microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 5,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def op(name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return event("cpu_op", name, begin, end, tid)


def mark(name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, begin, end, tid)


def kernel(
    name: str,
    begin: float,
    end: float,
    stream: int = 7,
    launched: tuple[float, int] | None = None,
    category: str = "kernel",
) -> list[dict[str, Any]]:
    """A kernel, and the call that launched it: (when, thread)."""
    number = id(name) + round(begin)
    found = [event(category, name, begin, end, f"stream {stream}", correlation=number)]
    if launched:
        found.append(
            event(
                "cuda_runtime",
                "cudaLaunchKernel",
                launched[0],
                launched[0] + 1,
                launched[1],
                correlation=number,
            )
        )
    return found


def ms(found: Shares) -> dict[str, float]:
    """Class -> microseconds, of those that have any."""
    return {name: ns / 1000 for name, ns in found.by_class.items() if ns}


def test_operators_of_a_cpu_are_divided_by_what_each_takes_itself() -> None:
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
        op("graph_0_cpp_fused__softmax_view_3", 600, 610),
        op("graph_0_cpp_fused_mul_silu_7", 610, 640),
        mark("Optimizer.step#AdamW.step", 700, 800),
        op("aten::_fused_adamw_", 720, 780),
        mark("DistributedDataParallel.forward", 900, 990),
        op("aten::mul", 910, 930),
        op("aten::mm", 2000, 2100),
        {"ph": "M", "name": "process_name", "pid": 5, "tid": 1},
    ]
    found = time_shares.shares(events, on_gpu=False)
    assert ms(found) == {
        "matmul": 100 + 40 + 50,  # linear and what is in it, the head's, that of backward
        "attention": 40 + 20 + 30 + 50 + 10,  # baddbmm, softmax, bmm, sdpa, the fused softmax
        "loss": 150 - 40,
        "optimizer": 100,
        "data wait": 50,
        "other": 10
        + 20
        + 20
        + 30
        + 20,  # matmul's own, evaluate_function's, MmBackward0's, silu, mul
        "host gaps": 10 + 40 + 10 + 60 + 100 + 70 + 10,
    }  # before and behind data, 500, 640, 800, in forward, 990
    assert found.head_ns == 40_000 and found.hidden_ns == 0 and found.between_ns == 0
    assert found.others == {
        "aten::matmul": 10_000,
        "autograd::engine::evaluate_function: MmBackward0": 20_000,
        "MmBackward0": 20_000,
        "graph_0_cpp_fused_mul_silu_7": 30_000,
        "aten::mul": 20_000,
    }
    assert sum(found.by_class.values()) == found.wall_ns == 1_000_000


def test_what_the_compiler_does_round_its_kernels_has_one_name() -> None:
    graph = "## Call CompiledFxGraph fnfvihqciwaapywrh62xqtxqcdukkhsn23rpm6gbkhkrhch2ih4n ##"
    events = [
        mark(STEP, 0, 100),
        op("Torch-Compiled Region: 0/0", 0, 50),
        op("CompiledFunction", 5, 45),
        op(graph, 10, 40),
        op("graph_0_cpp_fused_mul_silu_7", 12, 22),
        op("aten::mm", 22, 30),
    ]
    found = time_shares.shares(events, on_gpu=False)
    assert ms(found) == {"matmul": 8, "other": 42, "host gaps": 50}
    assert found.others == {
        "calls of compiled code": 32_000,
        "graph_0_cpp_fused_mul_silu_7": 10_000,
    }


def test_what_gloo_sends_is_hidden_behind_operators_and_exposed_where_nothing_runs() -> None:
    events = [
        mark(STEP, 0, 100),
        op("aten::mm", 0, 40),
        mark("gloo:all_reduce", 30, 90, tid=9),
        op("aten::mul", 60, 70),
        op("c10d::allreduce_", 92, 98),
        mark("gloo:all_gather", 30, 50, tid=8),
    ]
    found = time_shares.shares(events, on_gpu=False)
    assert ms(found) == {
        "matmul": 40,
        "communication, exposed": 20 + 20 + 6,
        "other": 10,
        "host gaps": 2 + 2,
    }
    assert found.hidden_ns == 10_000 + 10_000


def gpu_step() -> list[dict[str, Any]]:
    """One step of 1000 us with kernels as an H100's are named."""
    return [
        mark(STEP, 0, 1000),
        mark(DATA, 0, 100),
        op("aten::linear", 100, 140),
        op("aten::mm", 110, 135),
        *kernel(
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
            150,
            350,
            7,
            (120, MAIN),
        ),
        *kernel(
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
            350,
            450,
        ),
        *kernel("Memcpy HtoD (Pinned -> Device)", 400, 500, 9, category="gpu_memcpy"),
        op("_LinearCrossEntropy", 200, 300),
        op("aten::mm", 210, 230),
        *kernel("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT", 500, 560, 7, (220, MAIN)),
        *kernel("triton_red_fused_exp_logsumexp_sub_5", 560, 600, 7, (250, MAIN)),
        op("autograd::engine::evaluate_function: MmBackward0", 300, 400, BACKWARD),
        op("aten::mm", 310, 390, BACKWARD),
        *kernel(
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>",
            600,
            700,
            7,
            (320, BACKWARD),
        ),
        *kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            650,
            800,
            20,
        ),
        op("aten::mul", 420, 430, BACKWARD),
        *kernel(
            "void at::native::vectorized_elementwise_kernel<4, MulFunctor>",
            740,
            760,
            7,
            (425, BACKWARD),
        ),
        *kernel("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 800, 840, 7),
        *kernel("triton_poi_fused_mul_silu_3", 800, 840, 8),
        mark("Optimizer.step#AdamW.step", 500, 550),
        mark("Optimizer.step#Muon.step", 550, 600),
        op("aten::mm", 560, 570),
        *kernel(
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<X>",
            850,
            900,
            7,
            (510, MAIN),
        ),
        *kernel("sm90_xmma_gemm_muon", 900, 930, 7, (565, MAIN)),
        *kernel("some_kernel_of_nobody", 990, 1010, 7),
    ]


def test_kernels_of_a_gpu_are_divided_by_interval_arithmetic() -> None:
    found = time_shares.shares(gpu_step(), on_gpu=True)
    assert ms(found) == {
        "matmul": 200 + 60 + 100 + 20,  # of 800 to 840 one half, as two kernels run
        "attention": 100,
        "loss": 40,
        "optimizer": 50 + 30,  # Muon's products too
        "communication, exposed": 40 + 40,  # 700 to 800, without the 20 of the elementwise kernel
        "data wait": 100,
        "host gaps": 50 + 10 + 60,  # until the first kernel; 840 to 850; 930 to 990
        "other": 50 + 20 + 20 + 10,
    }  # the copy's rest, mul, silu, and what ends within the step
    assert found.hidden_ns == 50_000 + 20_000
    assert found.head_ns == 60_000
    assert found.others == {
        "Memcpy HtoD (Pinned -> Device)": 50_000,
        "aten::mul": 20_000,
        "triton_poi_fused_mul_silu_3": 20_000,
        "some_kernel_of_nobody": 10_000,
    }
    assert sum(found.by_class.values()) == found.wall_ns == 1_000_000
    table = found.table()
    assert len(table) == len(CLASSES) + 1
    assert "matmul                   38.0%       0.38 ms   of it in the head 6.0%" in table
    assert (
        table[4].startswith("communication, exposed    8.0%")
        and "7.0% hidden behind work" in table[4]
    )
    assert "Memcpy HtoD (Pinned -> Device) 5.0%, aten::mul 2.0%" in table[7]
    assert table[8] == "a step                  100.0%       1.00 ms"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4",
            "matmul",
        ),
        (
            "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
            "matmul",
        ),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true>",
            "matmul",
        ),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<X>>", "matmul"),
        ("triton_tem_fused_mm_7", "matmul"),
        ("triton_tem_fused_addmm_relu_1", "matmul"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<X>>>",
            "attention",
        ),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<X>", "attention"),
        (
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::X>)",
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
            "attention",
        ),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>", "other"),
        ("triton_per_fused__to_copy_mean_mul_rsqrt_2", "other"),
        ("triton_poi_fused_add_mm_mul_9", "other"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication, exposed"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "communication, exposed"),
        ("multimem_all_reduce_kernel", "communication, exposed"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, expected: str) -> None:
    found = time_shares.shares([mark(STEP, 0, 10), *kernel(name, 0, 10)], on_gpu=True)
    assert ms(found) == {expected: 10}


def test_a_product_of_attention_and_one_of_the_optimizer_are_known_by_what_launched_them() -> None:
    events = [
        mark(STEP, 0, 100),
        op("aten::bmm", 0, 10),
        *kernel("ampere_sgemm_128x64_nn", 20, 30, 7, (5, MAIN)),
        op("aten::addmm", 10, 20),
        *kernel("unknown_product_kernel", 30, 40, 7, (15, MAIN)),
        op("CompiledFunctionBackward", 40, 60, BACKWARD),
        *kernel("triton_red_fused_mul_sum_2", 60, 70, 7, (50, BACKWARD)),
    ]
    found = time_shares.shares(events, on_gpu=True)
    assert ms(found) == {"attention": 10, "matmul": 10, "other": 10, "host gaps": 70}


def test_several_steps_are_added_and_what_is_between_them_is_not() -> None:
    events = [
        mark(STEP, 0, 100),
        mark(STEP, 150, 250),
        op("aten::mm", 50, 100),
        op("aten::mm", 100, 170),
        op("aten::mm", 240, 250),
    ]
    found = time_shares.shares(events, on_gpu=False)
    assert (found.steps, found.step_ms, found.between_ns) == (2, 0.1, 50_000)
    assert ms(found) == {"matmul": 50 + 20 + 10, "host gaps": 50 + 70}


def test_each_moment_goes_to_what_comes_first_as_when_each_is_looked_at_alone() -> None:
    """Random spans against a count nanosecond by nanosecond."""
    rng = random.Random(3)
    for _ in range(30):
        spans = []
        for _ in range(rng.randrange(12)):
            begin, kind = rng.randrange(60), rng.choice((WORK, COPY, SEND, WAIT))
            of = {
                WORK: rng.choice(("matmul", "other")),
                COPY: "other",
                SEND: "communication, exposed",
                WAIT: "data wait",
            }[kind]
            spans.append(Span(begin, begin + rng.randrange(1, 20), kind, of, rng.choice("ab")))
        steps = [(5, 30), (30, 35), (40, 70)]
        by_class: Counter[str] = Counter()
        hidden = 0
        for begin, end in steps:
            for at in range(begin, end):
                there = [span for span in spans if span.begin <= at < span.end]
                first = [span for span in there if span.kind == min(span.kind for span in there)]
                for span in first:
                    by_class[span.of] += Fraction(1, len(first))  # type: ignore[assignment]
                by_class["host gaps"] += not there
                hidden += {SEND} < {span.kind for span in there} and any(
                    span.kind < SEND for span in there
                )
        found = time_shares.divide(spans, steps, on_gpu=False)
        assert {name: ns for name, ns in found.by_class.items() if ns} == pytest.approx(
            {name: float(ns) for name, ns in by_class.items() if ns}
        )
        assert found.hidden_ns == hidden and sum(found.by_class.values()) == pytest.approx(60)


def test_what_is_no_trace_and_what_has_no_steps_or_kernels_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{")
    with pytest.raises(TraceError, match=r"a\.json is no trace of torch's profiler"):
        time_shares.read(path)
    with pytest.raises(TraceError, match="nothing in it is marked 'train step'"):
        time_shares.shares([op("aten::mm", 0, 1)], on_gpu=False)
    with pytest.raises(TraceError, match="the trace has no kernels"):
        time_shares.shares([mark(STEP, 0, 1)], on_gpu=True)
    packed = tmp_path / "b.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"traceEvents": gpu_step()}).encode()))
    assert time_shares.read(packed) == gpu_step()
    packed.write_bytes(packed.read_bytes()[:50])
    with pytest.raises(TraceError):
        time_shares.read(packed)
