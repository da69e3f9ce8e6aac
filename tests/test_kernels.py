"""Every kernel compiles for sm_90a without a GPU, to the instructions it was written for, without spills."""

from __future__ import annotations

import ctypes
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest

from mok import errors
from mok.engines.cuda import backward_kernel, build, driver, megakernel, params
from mok.errors import CapabilityError, InputError
from mok.trace.read import kernel as reader

try:
    build.nvrtc_version()
except CapabilityError as error:
    pytest.skip(f"NVRTC: {error}", allow_module_level=True)

CSRC = build.source_folder()
FORWARD = [
    megakernel.defines(combine=combine, mxfp8=mxfp8, trace=trace)
    for combine, mxfp8, trace in itertools.product(("comm", "epilogue"), (False, True), (False, True))
]
SMALL = [("schedule.cu", {}), ("quantize.cu", {}), ("barrier.cu", {}), ("probe.cu", {}), ("seal.cu", {})] + [
    ("epilogue.cu", {"MOK_TOPK": k, "MOK_WEIGHTED": w}) for k, w in ((1, 1), (8, 1), (9, 1), (8, 0))
]
NEEDED = ("HGMMA.64x256x16.F32.BF16", "UTMALDG.2D", "UTMALDG.3D.MULTICAST", "UBLKCP", "USETMAXREG")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        yield


def compiled(source: str, defines: dict[str, int]) -> bytes:
    code, log = build.compile_source(CSRC, source, defines)
    assert re.search(r"C75\d\d", log) is None, log  # setmaxnreg ignored, wgmma serialised
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills, log
    assert all(numbers == ("0", "0", "0") for numbers in spills), log
    return code


def sass(code: bytes, folder: pathlib.Path) -> str:
    wheel = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    tool = shutil.which("cuobjdump", path=f"{wheel}{os.pathsep}{os.environ.get('PATH', '')}{os.pathsep}/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("cuobjdump is not installed (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    environment = {**os.environ, "PATH": f"{wheel}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0 and "nvdisasm" in done.stderr:
        pytest.skip("nvdisasm is not installed beside cuobjdump")
    assert done.returncode == 0, done.stderr
    return done.stdout


def gate(text: str) -> None:
    missing = [name for name in NEEDED if name not in text]
    assert not missing, f"instructions not in the SASS: {missing}"
    assert not re.findall(r"\b(STL|LDL)\b", text), "the kernel uses local memory"
    loop = text[text.index("HGMMA") : text.rindex("HGMMA")]
    # a cluster-scope arrive or wait in the multiply loop shows as these, and halves the matrix rate
    assert not re.findall(r"MEMBAR|CCTL", loop), "a fence between the matrix instructions"


def instructions(text: str) -> list[str]:
    return [
        line.split("*/", 1)[1].split("/*")[0].strip() for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)
    ]


def test_the_forward_kernel_is_what_it_was_written_to_be(tmp_path):
    gate(sass(compiled("forward.cu", FORWARD[0]), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("defines", FORWARD[1:], ids=lambda d: ",".join(f"{k}={v}" for k, v in d.items()))
def test_every_forward_specialisation_passes_the_gate(defines, tmp_path):
    gate(sass(compiled("forward.cu", defines), tmp_path))


@pytest.mark.parametrize(
    "source, defines", SMALL, ids=lambda v: v if isinstance(v, str) else ",".join(f"{k}={n}" for k, n in v.items())
)
def test_small_kernels_compile_without_spills(source, defines):
    compiled(source, defines)


# Calls of trace lanes, and everything that exists only for them; what is left must not mention a trace object.
TRACE_CALL = re.compile(r"(?:env\.)?\btrace(?:->|\.)(?:begin|end|turn|finish|open|close)\([^;]*\);")
TRACE_ONLY = (
    "u32 before = env.trace->blocked(smem + kFull + 8 * stage.index(), stage.phase());",
    "if (before != 0) stall += env.trace->tick() - before;",
    "  TraceLane trace;\n",
    "  TraceLane* trace;\n",
    ", &trace",
)


def without_trace(folder: pathlib.Path) -> pathlib.Path:
    """A copy of csrc in which no lane of a trace exists: calls become empty statements, trace.cuh keeps its constants."""
    shutil.copytree(CSRC, folder)
    found = dict.fromkeys(TRACE_ONLY, 0)
    calls = 0
    for path in (*folder.rglob("*.cu"), *folder.rglob("*.cuh")):
        text = path.read_text()
        if path.name == "trace.cuh":
            text = text[: text.index("#if MOK_TRACE\n")] + "}  // namespace mok\n"
        else:
            text, count = TRACE_CALL.subn(";", text)
            calls += count
            for piece in TRACE_ONLY:
                found[piece] += text.count(piece)
                text = text.replace(piece, "")
        assert not re.search(r"\btrace(?:->|\.(?!cuh))|TraceLane\b", text), path
        path.write_text(text)
    assert calls >= 13
    assert all(found.values()), found
    return folder


TRACED = [("forward.cu", "comm", False), *(
    pytest.param(*choice, marks=pytest.mark.slow)
    for choice in (("forward.cu", "comm", True), ("forward.cu", "epilogue", False), ("forward.cu", "epilogue", True),
                   ("backward.cu", "epilogue", False))
)]  # fmt: skip


@pytest.mark.parametrize("source, combine, mxfp8", TRACED)
def test_trace_off_is_the_same_code_as_sources_without_a_trace(source, combine, mxfp8, tmp_path):
    plain = without_trace(tmp_path / "csrc")
    defines = megakernel.defines if source == "forward.cu" else backward_kernel.defines
    off, on = (defines(combine=combine, mxfp8=mxfp8, trace=trace) for trace in (False, True))
    shipped, stripped, traced = (
        instructions(sass(build.compile_source(folder, source, how)[0], tmp_path))
        for folder, how in ((CSRC, off), (plain, off), (CSRC, on))
    )
    assert stripped == shipped
    assert traced != shipped  # the comparison can fail


def constants() -> list[str]:
    """What Python and C++ must agree on, as static_asserts."""
    size = -(-(ctypes.sizeof(params.ForwardParams) - 64) // 64) * 64
    checks = [f"sizeof(ForwardParams) == {size}"]
    checks += [
        f"kMaxPeers == {params.MAX_PEERS}",
        f"kFlagArrays == {params.FLAG_ARRAYS}",
        f"kTraceLanes == {reader.LANES_PER_CTA}",
    ]
    checks += [f"kLoad + kGateUp == {reader.EVENTS.index('load gate_up')}", f"kMma + kDown == {reader.EVENTS.index('mma down')}"]
    checks += [f"kEpilogue + kDownShared == {reader.EVENTS.index('epilogue down_shared')}", f"kStall == {reader.STALL}"]
    checks += [f"kDispatchUnit == {reader.EVENTS.index('dispatch')}", f"kCombineUnit == {reader.EVENTS.index('combine')}"]
    for name in filter(None, errors.PLACES):
        constant = "kWait" + "".join(word.capitalize() for word in name.split("_"))
        checks += [f"{constant} == {errors.PLACES.index(name)}", f"kWait + {constant} == {reader.EVENTS.index('wait ' + name)}"]
    return checks


def test_every_place_a_kernel_can_record_has_a_name():
    enum = re.search(r"enum Place : int \{(.*?)\n\};", (CSRC / "include" / "mok" / "flags.cuh").read_text(), re.DOTALL)
    codes = dict(re.findall(r"kWait(\w+) = (\d+)", enum[1]))
    snake = {int(code): re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name, code in codes.items()}
    assert snake == {code: name for code, name in enumerate(errors.PLACES) if name}
    assert re.findall(r"kPlaceBarrier = (\d+)", (CSRC / "barrier.cu").read_text()) == [str(errors.PLACE_BARRIER)]
    assert errors.PLACE_BARRIER not in snake


def test_python_and_cpp_agree_on_layouts_and_numbers(tmp_path):
    (tmp_path / "include").symlink_to(CSRC / "include")
    lines = "\n".join(f'static_assert({check}, "{check}");' for check in constants())
    (tmp_path / "agree.cu").write_text(
        f'#include "mok/comm_sm90.cuh"\nusing namespace mok;\n{lines}\nextern "C" __global__ void k() {{}}\n'
    )
    build.compile_source(tmp_path, "agree.cu", {})


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_parameter_struct_is_mirrored_field_by_field(tmp_path):
    text = (CSRC / "include" / "mok" / "params.cuh").read_text()
    struct = text[text.index("constexpr int kMaxPeers") : text.index("// Places in `sync`")]
    names = [name for name, _ in params.ForwardParams._fields_ if name != "padding"]
    lines = [f"static_assert(offsetof(ForwardParams, {n}) == {getattr(params.ForwardParams, n).offset});" for n in names]
    types = "#include <cstddef>\nusing u64 = unsigned long long; using u16 = unsigned short;\n"
    types += "struct alignas(64) TensorMap { u64 opaque[16]; };\n"
    (tmp_path / "params.cpp").write_text(types + struct + "\n".join(lines) + "\n")
    command = ["g++", "-std=c++20", "-fsyntax-only", str(tmp_path / "params.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_compile_error_shows_file_line_and_options(tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void k() { int x = nothing; }\n')
    with pytest.raises(build.CompileError) as caught:
        build.compile_source(tmp_path, "bad.cu", {"MOK_TRACE": 1})
    message = str(caught.value)
    assert "nothing" in message
    assert "(1)" in message
    assert "MOK_TRACE" in message
    assert "sm_90a" in message


def test_the_cache_answers_by_content(tmp_path, monkeypatch):
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "cache"))
    calls = []
    real = build.compile_source
    monkeypatch.setattr(build, "compile_source", lambda *a, **k: calls.append(1) or real(*a, **k))
    with build.use_sources(str(tmp_path / "csrc")):
        first = build.cubin("barrier.cu", {})
        assert build.cubin("barrier.cu", {}) == first
        assert len(calls) == 1
        header = tmp_path / "csrc" / "include" / "mok" / "flags.cuh"
        header.write_text(header.read_text() + "// changed\n")
        build.cubin("barrier.cu", {})
        assert len(calls) == 2
        build.cubin("barrier.cu", {"MOK_OTHER": 1})
        assert len(calls) == 3
    with build.use_sources(str(tmp_path)), pytest.raises(InputError, match="forward.cu"):
        build.source_folder()


def test_an_unsupported_gpu_is_named_with_what_still_works(monkeypatch):
    import torch

    class Old:
        name, major, minor, multi_processor_count = "NVIDIA A100", 8, 0, 108

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Old)
    driver.check_device.cache_clear()
    with pytest.raises(CapabilityError, match=r"NVIDIA A100 \(SM80\).*SM90.*engine='torch'"):
        driver.check_device(0)
    driver.check_device.cache_clear()
