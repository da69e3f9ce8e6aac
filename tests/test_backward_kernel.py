"""The backward kernel without a GPU: what it compiles to, what it is launched with, and that C++ and Python agree on both."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch
from test_cuda_engine import E, H, I, K, Recorder, T
from test_kernels import CSRC, NEEDED, sass

from mok import mxfp8
from mok.engines import cuda, torch_engine
from mok.engines.cuda import backward_kernel, build, driver, megakernel, options, params
from mok.errors import InputError
from mok.trace.read import kernel as reader

SPECIALISATIONS = [
    backward_kernel.defines(combine=combine, mxfp8=mxfp8, trace=trace)
    for combine, mxfp8, trace in (
        ("epilogue", False, False), ("comm", False, False), ("epilogue", False, True), ("epilogue", True, False),
        ("comm", True, True),
    )
]  # fmt: skip
FORMS = ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR24], R24", "].tnspB, R24", "].tnspA.tnspB, R24")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        yield


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(driver, "kernel", recorder.kernel)
    monkeypatch.setattr(driver, "check_device", lambda index: 132)
    monkeypatch.setattr(driver, "arch", lambda index: "sm_90a")
    monkeypatch.setattr(driver, "tensor_map", lambda tensor, box: tensor.data_ptr().to_bytes(8, "little").ljust(128, b"\1"))
    monkeypatch.setattr(megakernel, "_resident_clusters", lambda device, kernel, shared_bytes: recorder.resident)
    monkeypatch.setattr(build, "cubin", lambda source, defines: b"mok_backward mok_seal mok_forward mok_quantize mok_dequantize")
    return recorder


@pytest.mark.parametrize(
    "defines",
    [SPECIALISATIONS[0], *(pytest.param(found, marks=pytest.mark.slow) for found in SPECIALISATIONS[1:])],
    ids=lambda d: ",".join(f"{k}={v}" for k, v in d.items()),
)
def test_the_kernel_multiplies_in_three_forms_without_fences_in_the_loop(defines, tmp_path):
    code, log = build.compile_source(CSRC, "backward.cu", defines)
    assert re.search(r"C75\d\d", log) is None, log  # setmaxnreg ignored, wgmma serialised
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log)
    # a queue position and an address, once per task; MXFP8's rounding in the epilogue has no registers left
    assert int(spilled) <= (1024 if defines["MOK_MXFP8"] else 32), log
    text = sass(code, tmp_path)
    missing = [name for name in (*NEEDED, "LDSM", "STSM", *FORMS[1:]) if name not in text]
    assert not missing, f"instructions not in the SASS: {missing}"
    loop = text[text.index("HGMMA") : text.rindex("HGMMA")]
    assert not re.findall(r"MEMBAR|CCTL|STL", loop), "a fence or a store between the matrix instructions"
    plain = re.findall(r"HGMMA\.64x256x16\.F32\.BF16 R\d+, gdesc\[UR\d+\](\.\w+(?:\.\w+)?)?, R\d+", text)
    assert {form: plain.count(form) for form in set(plain)} == {"": 4, ".tnspB": 4, ".tnspA.tnspB": 4}


@pytest.mark.parametrize("mxfp8_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recompute_is_the_forward_kernel_without_down_projections(mxfp8_, tmp_path):
    code, log = build.compile_source(
        CSRC, "forward.cu", megakernel.defines(combine="epilogue", mxfp8=mxfp8_, trace=False, recompute=True)
    )
    assert re.search(r"C75\d\d", log) is None, log
    assert "0 bytes stack frame, 0 bytes spill stores" in log
    text = sass(code, tmp_path)
    assert all(name in text for name in NEEDED)
    assert "MUFU.EX2" not in text  # no activation either


def enum_of(text: str, name: str) -> list[str]:
    """The constants of an enum without values, snake case and without the k."""
    body = re.sub(r"//.*", "", re.search(rf"enum {name} : int \{{(.*?)\}};", text, re.DOTALL)[1])
    return [part.strip()[1:] for part in body.split(",") if part.strip()]


def test_python_and_cpp_agree_on_the_maps():
    names = enum_of((CSRC / "include" / "mok" / "backward_params.cuh").read_text(), "BackwardMap")
    assert names[-1] == "BackwardMaps"
    flat = [name.replace("_", "") for name in params.BACKWARD_MAPS]
    assert [name.lower() for name in names[:-1]] == flat


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_parameter_struct_is_mirrored_field_by_field(tmp_path):
    folder = tmp_path / "mok"
    folder.mkdir()
    for name in ("tasks", "flags", "backward_tasks", "backward_flags", "params", "backward_params"):
        text = (CSRC / "include" / "mok" / f"{name}.cuh").read_text()
        (folder / f"{name}.cuh").write_text(text.replace('#include "mok/tile_sm90.cuh"\n', ""))
    nested = {name: f"flags.{name}" for name in params.BACKWARD_FLAGS}
    nested |= {name: f"sizes.{name}" for name in ("inner_tiles", "outer_tiles", "down_tiles", "wide_tiles", "ring_blocks")}
    fields = [name for name, _ in params.BackwardParams._fields_ if name != "padding"]
    offsets = {name: getattr(params.BackwardParams, name).offset for name in fields}
    checks = [f"offsetof(BackwardParams, {nested.get(name, name)}) == {offset}" for name, offset in offsets.items()]
    checks += [
        f"trace_kind(k{kind}) + kMma == {reader.EVENTS.index(f'mma {name}')}"
        for kind, name in (("DgradDownShared", "dgrad_down_shared"), ("WgradGateShared", "wgrad_shared"), ("GateUp", "gate_up"),
                           ("DgradDown", "dgrad_down"), ("DgradGateUp", "dgrad_gate_up"), ("WgradUp", "wgrad_up"))
    ]  # fmt: skip
    checks += [
        f"kDispatchDyEvent == {reader.EVENTS.index('dispatch_dy')}",
        f"kCombineDxEvent == {reader.EVENTS.index('combine_dx')}",
    ]
    comm = (CSRC / "include" / "mok" / "backward_comm.cuh").read_text()
    events = comm[comm.index("constexpr int kDispatchDyEvent") : comm.index("MOK_HD int unit_event")]
    source = "#include <cstddef>\nnamespace mok { using u64 = unsigned long long; using u16 = unsigned short;\n"
    source += "struct alignas(64) TensorMap { u64 opaque[16]; }; }\n#define MOK_HD constexpr inline\n"
    source += '#include "mok/backward_params.cuh"\nnamespace mok { constexpr int kWait = 16, kMma = 4;\n' + events + "}\n"
    source += "using namespace mok;\n" + "\n".join(f"static_assert({check});" for check in checks)
    (tmp_path / "params.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{tmp_path}", str(tmp_path / "params.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def arguments(precision="bf16", shared=True, **changes):
    torch.manual_seed(0)

    def new(*size):
        return torch.randn(size).bfloat16()

    weights, ring = (new(E, I, H), new(E, I, H), new(E, H, I)), 256
    routed = weights
    if precision == "mxfp8":
        gate, up, down = (mxfp8.quantize(weight, True, True) for weight in weights)
        routed = (*gate, *up, *down[2:])
    topk = torch.randint(0, E, (1, T, K), dtype=torch.int32)
    forward = torch_engine.forward(
        precision=precision, x_peers=[new(T, H)], combine_peers=[new(T * K, H)], shared=None,
        routed=weights if precision == "bf16" else tuple(part for w in weights for part in mxfp8.quantize(w, True, False)[:2]),
        schedule=torch_engine.schedule(topk, E, 1024, 0)[:4], rank=0, top_k=K, num_shared_tokens=T, swiglu_limit=None,
        num_comm_sms=8, minibatch=256, ring_rows=ring, row_block=128, combine="comm", save_context=True,
    )  # fmt: skip
    context = list(forward[:-1])
    if shared:
        for place in (1, 3) if precision == "bf16" else (2, 5):
            context[place] = new(T, I)
    base = {
        "precision": precision, "context": tuple(context), "x_peers": [new(T, H)], "d_y_peers": [new(T, H)],
        "router_weight_peers": [torch.rand(T, K)], "d_x_routed_peers": [new(T * K, H)],
        "d_router_weight_peers": [torch.zeros(T, K)], "d_y_shared": new(T, H),
        "shared": (weights[0][0], weights[1][0], weights[2][0]) if shared else None, "routed": routed,
        "main_grads": (None,) * 6, "schedule": torch_engine.schedule(topk, E, 1024, 0)[:4], "rank": 0, "top_k": K,
        "num_shared_tokens": T, "swiglu_limit": None, "num_comm_sms": 8, "minibatch": 256, "ring_rows": ring, "row_block": 128,
        "combine": "comm",
    }  # fmt: skip
    return {**base, **changes}


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_backward_returns_the_reference_engines_tensors(recorder, precision, shared, accumulate):
    sizes = [(E, I, H), (E, I, H), (E, H, I), (I, H), (I, H), (H, I)]
    kinds = (torch.float32, torch.bfloat16, torch.float32) * 2
    mains = [torch.zeros(s, dtype=kind) for s, kind in zip(sizes, kinds, strict=True)] if accumulate else [None] * 6
    if not shared:
        mains[3:] = [None] * 3
    given = arguments(precision, shared, main_grads=tuple(mains))
    got = cuda.backward(**given)
    want = torch_engine.backward(**given)
    assert [(tuple(t.shape), t.dtype) for t in got] == [(tuple(t.shape), t.dtype) for t in want]
    (name, grid, block, p), (seal, _, _, after) = recorder.launches[-2:]
    assert (name, grid, block, seal) == ("mok_backward", 132, 384, "mok_seal")
    assert (p.has_shared, p.shared_rows, p.limit) == (int(shared), T if shared else 0, float("inf"))
    modes = [0 if main is None else (1 if main.dtype == torch.float32 else 2) for main in mains]
    assert list(p.grad_modes) == modes
    assert [p.grads[i] == main.data_ptr() for i, main in enumerate(mains) if main is not None] == [True] * (6 - modes.count(0))
    assert after.status == given["schedule"][2].data_ptr()
    assert [after.results[1 + i] for i, tensor in enumerate(got[1:]) if tensor.numel()] == [
        tensor.data_ptr() for tensor in got[1:] if tensor.numel()
    ]
    assert (p.x_ring != 0) == (p.parked != 0) == True  # noqa: E712  # 1024 schedule rows in a ring of 256: replays may come
    assert p.d_x_peers[0] == given["d_x_routed_peers"][0].data_ptr()
    assert int.from_bytes(bytes(p.maps[params.BACKWARD_MAPS.index("rows_dy")])[:8], "little") == p.d_y_ring


def test_one_macrobatch_needs_no_replay_and_the_epilogue_route_no_ring_of_d_x(recorder):
    cuda.backward(**arguments(ring_rows=1024, combine="epilogue", context=ring_context(1024)))
    p = recorder.launches[-2][3]
    assert (p.x_ring, p.gate, p.up, p.parked, p.d_x_ring) == (0, 0, 0, 0, 0)


def ring_context(rows):
    empty = torch.empty
    kind = torch.bfloat16
    return (empty(rows, H, dtype=kind), empty(T, I, dtype=kind), empty(rows, I, dtype=kind), empty(T, I, dtype=kind),
            empty(rows, I, dtype=kind))  # fmt: skip


def test_options_reach_the_launch(recorder, monkeypatch):
    fault = torch.zeros(8, dtype=torch.int64)
    monkeypatch.setenv("MOK_TIMEOUT_LOCAL", "0.25")
    with options.trace(32) as sink, options.mode("comm_only"), options.faults_to(fault), options.planted_lost_flag(3, rank=0):
        cuda.backward(**arguments(swiglu_limit=7.0))
    p = recorder.launches[-2][3]
    assert (p.mode, p.lost_flag, p.timeout_ns, p.trace_records, p.limit, p.has_limit) == (1, 3, 250_000_000, 32, 7.0, 1)
    assert (p.fault, p.trace) == (fault.data_ptr(), sink.buffers[0].data.data_ptr())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_comm_sms": 132}, r"even number in \[2, 130\]"),
        ({"minibatch": 100}, "multiples of 128"),
        ({"d_y_peers": [torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, ::2]]}, "d_y must be contiguous"),
        (
            {"d_y_shared": torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)},
            "d_y_shared must start at a multiple of 16",
        ),
        ({"router_weight_peers": [torch.zeros(T, K, device="meta")]}, "backward got tensors on cpu, meta"),
    ],
)
def test_bad_arguments_are_refused_before_launch(recorder, changes, message):
    if "meta" in message:
        changes["router_weight_peers"][0] = changes["router_weight_peers"][0].as_subclass(Elsewhere)
    with pytest.raises(InputError, match=message):
        cuda.backward(**arguments(**changes))
    assert not [launch for launch in recorder.launches if launch[0] == "mok_backward"]


class Elsewhere(torch.Tensor):
    """A tensor on another device that still has an address."""

    def data_ptr(self):
        return 0


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_recompute_returns_the_saved_context(recorder, precision):
    given = arguments(precision)
    routed = given["routed"][:2] if precision == "bf16" else (*given["routed"][:2], *given["routed"][4:6])
    keys = ("precision", "x_peers", "schedule", "rank", "top_k", "num_shared_tokens", "swiglu_limit", "num_comm_sms", "minibatch",
            "ring_rows", "row_block")  # fmt: skip
    how = {key: given[key] for key in keys} | {"routed": routed, "shared": given["shared"][:2]}
    got, want = cuda.recompute(**how), torch_engine.recompute(**how)
    assert [(tuple(t.shape), t.dtype) for t in got] == [(tuple(t.shape), t.dtype) for t in want]
    p = next(launch[3] for launch in recorder.launches if launch[0] == "mok_forward")
    assert (p.hidden_ring, p.y_ring, p.y_shared, p.combine_peers[0]) == (0, 0, 0, 0)
