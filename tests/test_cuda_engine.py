"""The CUDA engine's host side without a GPU: every call compiles its kernels and fills their arguments."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from mok import engines, functional
from mok.config import MoKConfig
from mok.engines import cuda, torch_engine
from mok.engines.cuda import build, driver, megakernel, options
from mok.errors import CapabilityError, InputError
from mok.groups import VirtualGroup
from mok.trace.read import kernel as reader

try:
    build.nvrtc_version()
except CapabilityError as error:
    pytest.skip(f"NVRTC: {error}", allow_module_level=True)

T, H, I, E, K = 40, 256, 128, 4, 2  # noqa: E741


class Recorder:
    """Stands where the driver stands: compiles for real, keeps the arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int, object]] = []
        self.resident = 66

    def kernel(self, source, name, device, defines=None, shared_bytes=0):
        assert device == torch.device("cpu")
        assert name.encode() in build.cubin(source, dict(defines or {}))
        recorder = self

        class Kernel:
            function = None

            def launch(self, grid, block, arguments):
                recorder.launches.append((name, grid, block, arguments))

        return Kernel()


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
    return recorder


def arguments(precision="bf16", shared=True, **changes):
    torch.manual_seed(0)

    def new(*size):
        return torch.randn(size).bfloat16()

    weights = (new(E, I, H), new(E, I, H), new(E, H, I))
    if precision == "mxfp8":
        from mok import mxfp8

        weights = tuple(part for weight in weights for part in mxfp8.quantize(weight, True, False)[:2])
    topk = torch.randint(0, E, (1, T, K), dtype=torch.int32)
    base = {
        "precision": precision, "x_peers": [new(T, H)], "combine_peers": [new(T * K, H)], "routed": weights,
        "shared": (weights[0][0], weights[1][0], weights[2][0]) if shared and precision == "bf16" else None,
        "schedule": torch_engine.schedule(topk, E, 1024, 0)[:4], "rank": 0, "top_k": K, "num_shared_tokens": T,
        "swiglu_limit": None, "num_comm_sms": 8, "minibatch": 256, "ring_rows": 1024, "row_block": 128, "combine": "comm",
        "save_context": True,
    }  # fmt: skip
    return {**base, **changes}


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_forward_returns_the_reference_engines_tensors(recorder, precision, save, shared):
    given = arguments(precision, shared, save_context=save)
    got = cuda.forward(**given)
    want = torch_engine.forward(**given)
    assert [(tuple(t.shape), t.dtype) for t in got] == [(tuple(t.shape), t.dtype) for t in want]
    _, grid, block, params = next(launch for launch in recorder.launches if launch[0] == "mok_forward")
    assert (grid, block) == (132, 384)
    assert params.x_peers[0] == given["x_peers"][0].data_ptr()
    assert params.combine_peers[0] == given["combine_peers"][0].data_ptr()
    assert params.num_tokens == given["schedule"][2].data_ptr()
    assert (params.hidden, params.intermediate, params.num_experts, params.top_k) == (H, I, E, K)
    assert params.shared_rows == (T if given["shared"] is not None else 0)
    assert params.limit == float("inf")
    assert (params.gate != 0) == save


def test_forward_maps_every_operand_it_needs(recorder):
    given = arguments()
    cuda.forward(**given)
    params = recorder.launches[-1][3]
    gate, up, down = given["routed"]
    want = [gate[0], up[0], down[0], gate, up, down]
    assert [int.from_bytes(bytes(entry)[:8], "little") for entry in params.b] == [tensor.data_ptr() for tensor in want]
    assert bytes(params.a[0])[:8] == given["x_peers"][0].data_ptr().to_bytes(8, "little")


def test_options_reach_the_launch(recorder, monkeypatch):
    fault = torch.zeros(8, dtype=torch.int64)
    monkeypatch.setenv("MOK_TIMEOUT_LOCAL", "0.25")
    with options.trace(32) as sink, options.mode("compute_only"), options.faults_to(fault), options.planted_lost_flag(3):
        cuda.forward(**arguments())
    params = recorder.launches[-1][3]
    assert (params.mode, params.lost_flag, params.timeout_ns, params.trace_records) == (2, 3, 250_000_000, 32)
    assert params.fault == fault.data_ptr()
    assert params.trace == sink.buffers[0].data.data_ptr()
    assert (sink.buffers[0].grid, sink.buffers[0].num_comm_sms) == (132, 8)
    assert (sink.buffers[0].minibatch, sink.buffers[0].ring_rows, sink.buffers[0].shared_rows) == (256, 1024, T)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    _, header = reader.unpack(reader.pack(sink.buffers[0].data.numpy(), sink.buffers[0].header()))
    assert (header["minibatch"], header["ring_rows"], header["shared_rows"]) == (256, 1024, T)
    with pytest.raises(InputError, match="comm_only"), options.mode("comm_onyl"):
        pass


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_comm_sms": 132}, r"even number in \[2, 130\]"),
        ({"num_comm_sms": 7}, "even number"),
        ({"minibatch": 100}, "multiples of 128"),
        ({"x_peers": [torch.zeros(T, 2 * H, dtype=torch.bfloat16)[:, ::2]]}, "x must be contiguous"),
        ({"x_peers": [torch.zeros(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H)]}, "multiple of 16 bytes"),
    ],
)
def test_bad_arguments_are_refused_before_launch(recorder, changes, message):
    with pytest.raises(InputError, match=message):
        cuda.forward(**arguments(**changes))
    assert not [launch for launch in recorder.launches if launch[0] == "mok_forward"]


@pytest.mark.parametrize("odd", ["combine_peers", "routed", "schedule", "shared"])
def test_tensors_of_two_devices_are_refused_before_launch(recorder, odd):
    given = arguments()
    *rest, last = given[odd]
    given[odd] = type(given[odd])((*rest, Elsewhere.of(last)))
    with pytest.raises(InputError, match=r"forward got tensors on cpu, meta; move them to one device"):
        cuda.forward(**given)
    assert recorder.launches == []


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, but still has an address."""

    @staticmethod
    def of(tensor):
        return tensor.as_subclass(Elsewhere)

    @property
    def device(self):
        return torch.device("meta")


def test_the_small_kernels_refuse_two_devices_too(recorder):
    slots, weights = torch.zeros(T * K, H, dtype=torch.bfloat16), torch.zeros(T, K, device="meta")
    with pytest.raises(InputError, match="the top-k sum got tensors on cpu, meta"):
        cuda.forward_epilogue(None, slots, weights, None, None)
    values, scales = torch.zeros(128, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, 32, 16, dtype=torch.uint8, device="meta")
    with pytest.raises(InputError, match="dequantize got tensors on cpu, meta"):
        cuda.dequantize(values, scales)
    assert recorder.launches == []


def test_empty_and_missing_tensors_have_no_say_in_the_device():
    full = torch.zeros(3)
    assert driver.device_of("x", None, torch.empty(0, device="meta"), full) == full.device
    assert driver.device_of("x", None, torch.empty(0, device="meta")) == torch.device("meta")


def test_kernels_of_tensors_elsewhere_than_on_a_gpu_are_refused():
    with pytest.raises(InputError, match=r"engine 'cuda' runs on CUDA tensors, got cpu.*engine='torch'"):
        driver.kernel("barrier.cu", "mok_barrier", torch.device("cpu"))


def test_load_and_launch_happen_on_the_tensors_device_not_on_the_current_one(monkeypatch):
    current, calls = [0], []

    @contextlib.contextmanager
    def guard(device):
        before, current[0] = current[0], device
        yield
        current[0] = before

    def stream(device=None):
        return SimpleNamespace(cuda_stream=100 + (current[0] if device is None else device))

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(driver, "check_device", lambda index: 132)
    monkeypatch.setattr(driver, "arch", lambda index: "sm_90a")
    monkeypatch.setattr(driver, "call", lambda name, *args: calls.append((name, current[0], args)) or len(calls))
    driver._kernel.cache_clear()
    try:
        for index in (1, 0, 1):
            kernel = driver.kernel("barrier.cu", "mok_barrier", torch.device("cuda", index), shared_bytes=100_000)
            kernel.launch(1, 32, ctypes.c_int32(5))
            assert current == [0]
    finally:
        driver._kernel.cache_clear()
    loads = [device for name, device, _ in calls if name == "cuModuleLoadData"]
    assert loads == [1, 0]  # one module per device, each in its own context
    assert [device for name, device, _ in calls if name == "cuFuncSetAttribute"] == [1, 0]
    launches = [(device, args[8]) for name, device, args in calls if name == "cuLaunchKernel"]
    assert launches == [(1, 101), (0, 100), (1, 101)]


def test_too_few_resident_clusters_refuse_before_launch(recorder):
    recorder.resident = 4
    with pytest.raises(CapabilityError, match="4 clusters of this kernel fit"):
        cuda.forward(**arguments())
    assert recorder.launches == []


def test_time_outs_must_be_positive_numbers(recorder, monkeypatch):
    monkeypatch.setenv("MOK_TIMEOUT_LOCAL", "soon")
    with pytest.raises(InputError, match="MOK_TIMEOUT_LOCAL must be a number"):
        cuda.forward(**arguments())
    monkeypatch.setenv("MOK_TIMEOUT_PEER", "-1")
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(InputError, match="MOK_TIMEOUT_PEER must be a positive"):
        cuda.barrier([counter.data_ptr()], counter, 0)


def test_schedule_quantiser_and_meetings_launch(recorder):
    topk = torch.randint(0, E, (2, T, K))
    tables = cuda.schedule(topk, E // 2, 1024, 1)
    assert [tuple(t.shape) for t in tables] == [(1024,), (1024,), (1,), (2,), (8,)]
    parts = cuda.mxfp8_quantize(torch.zeros(2, 128, 256, dtype=torch.bfloat16))
    assert [tuple(p.shape) for p in parts] == [(2, 128, 256), (2, 2, 32, 16), (2, 256, 128), (4, 1, 32, 16)]
    counters = [torch.zeros(1, dtype=torch.int32) for _ in range(3)]
    address = [c.data_ptr() for c in counters]
    cuda.barrier(address, counters[1], 1)
    cuda.gather_routes(topk[0].int(), address, address, T, 1)
    names = [name for name, *_ in recorder.launches]
    assert names == [
        "mok_schedule_count",
        "mok_schedule_scan",
        "mok_schedule_place",
        "mok_quantize",
        "mok_barrier",
        "mok_gather_routes",
    ]
    assert list(recorder.launches[-2][3].counters[:3]) == address
    with pytest.raises(InputError, match="multiple of 128"):
        cuda.schedule(topk, E // 2, 1000, 1)
    with pytest.raises(InputError, match="multiples of 128"):
        cuda.mxfp8_quantize(torch.zeros(64, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("save", [True, False])
def test_the_functional_step_runs_through_the_operators(recorder, monkeypatch, shared, save):
    # operators refuse results that alias each other; only real calls show it
    monkeypatch.setattr(engines, "missing_for_cuda", lambda: None)
    monkeypatch.setattr(engines, "active", lambda device_type: cuda)
    monkeypatch.setattr(cuda, "schedule", torch_engine.schedule)  # a recorded launch leaves its tables unwritten
    given = arguments(shared=shared)
    config = MoKConfig(minibatch_size=256, macrobatch_size=512, fwd_num_comm_sms=8)
    space = functional.create_workspace(config, VirtualGroup(2), device="cpu", num_local_tokens=T, hidden_size=H, topk=K)
    top, weights = torch.randint(0, E, (T, K)), torch.rand(T, K)
    schedule = functional.build_schedule(space, config, top, num_local_experts=E)
    experts = given["shared"] or (None, None, None)
    x = given["x_peers"][0]
    out, context = functional.forward(config, space, schedule, x, weights, *experts, *given["routed"], save_context=save)
    assert out.shape == (T, H)
    assert (context is not None) == save
    assert [name for name, *_ in recorder.launches].count("mok_forward") == 2
