"""The other matrix units compile to the instructions they were written for: mma.sync everywhere, tcgen05 on SM100 and SM103."""

from __future__ import annotations

import pathlib
import re

import pytest
from test_kernels import CSRC, sass

from mok.engines.cuda import backward_kernel, build, megakernel, tiles
from mok.errors import CapabilityError, InputError
from mok.session import verdicts

try:
    build.nvrtc_version()
except CapabilityError as error:
    pytest.skip(f"NVRTC: {error}", allow_module_level=True)

PORTABLE, SM100 = tiles.TILES["portable"], tiles.TILES["sm_100a"]
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def compiled(source: str, defines: dict[str, int], arch: str) -> tuple[bytes, list[int]]:
    """(code, bytes of stack frame, spill stores, spill loads)."""
    code, log = build.compile_source(CSRC, source, defines, arch)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills, log
    return code, [int(number) for number in spills[0]]


def forward(tile: tiles.Tile, *, combine: str = "epilogue", mxfp8: bool = False, trace: bool = False) -> dict[str, int]:
    return megakernel.defines(combine=combine, mxfp8=mxfp8, trace=trace, tile=tile)


@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_103a", marks=pytest.mark.slow)])
def test_the_tcgen05_forward_multiplies_in_tensor_memory(arch, tmp_path):
    code, spills = compiled("forward.cu", forward(SM100), arch)
    text = sass(code, tmp_path)
    for needed in ("UTCHMMA.2CTA", "UTMALDG.2D.2CTA", "UTMALDG.3D.2CTA", "LDTM.16dp256bit", "UTCBAR.2CTA.MULTICAST"):
        assert needed in text, needed
    assert "HGMMA" not in text
    assert re.search(r"\bHMMA", text) is None
    assert spills[1] <= (0 if arch == "sm_100a" else 8), spills  # two words of one epilogue, on SM103 alone


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["comm", "epilogue"])
@pytest.mark.parametrize("mxfp8", [False, True])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_every_tcgen05_forward_compiles(arch, combine, mxfp8):
    for trace in (False, True):
        _, spills = compiled("forward.cu", forward(SM100, combine=combine, mxfp8=mxfp8, trace=trace), arch)
        assert spills[1] <= 64, spills


@pytest.mark.parametrize(
    "arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow), pytest.param("sm_103a", marks=pytest.mark.slow)]
)
def test_the_portable_forward_multiplies_by_mma_sync_without_spills(arch, tmp_path):
    code, spills = compiled("forward.cu", forward(PORTABLE), arch)
    text = sass(code, tmp_path)
    assert "HMMA.16816.F32.BF16" in text
    assert "LDSM.16.M88.4" in text
    assert "UTMALDG.3D.MULTICAST" in text
    assert "HGMMA" not in text
    assert "UTCHMMA" not in text
    assert spills == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_portable_backward_compiles_and_reads_operands_both_ways(arch, tmp_path):
    defines = backward_kernel.defines(combine="epilogue", mxfp8=False, trace=False, tile=PORTABLE)
    code, _ = compiled("backward.cu", defines, arch)  # it spills a little: the fall-back is right first
    text = sass(code, tmp_path)
    assert "LDSM.16.MT88.4" in text
    assert "LDSM.16.M88.4" in text
    assert "HGMMA" not in text


# PTX ISA 8.7, "Instruction descriptor" of tcgen05, .kind::f16, and "Shared memory descriptor layout".
INSTRUCTION = {"d_format": (4, 2), "a_format": (7, 3), "b_format": (10, 3), "n_8": (17, 6), "m_16": (24, 5)}
MATRIX = {"address_16": (0, 14), "leading_16": (16, 14), "stride_16": (32, 14), "version": (46, 2), "layout": (61, 3)}


def holds(tmp_path: pathlib.Path, statement: str) -> bool:
    """Whether the compiler accepts a static_assert about tile_sm100.cuh."""
    if not (tmp_path / "include").exists():
        (tmp_path / "include").symlink_to(CSRC / "include")
    head = '#include "mok/tile_sm100.cuh"\nusing namespace mok;\n'
    (tmp_path / "one.cu").write_text(f'{head}static_assert({statement}, "");\nextern "C" __global__ void k() {{}}\n')
    try:
        build.compile_source(tmp_path, "one.cu", {"MOK_TILE": 2}, "sm_100a")
    except build.CompileError:
        return False
    return True


def word(places: dict[str, tuple[int, int]], /, **values: int) -> int:
    """The word with these fields; every other bit is 0."""
    assert all(value < 1 << places[name][1] for name, value in values.items())
    return sum(value << places[name][0] for name, value in values.items())


def test_descriptors_are_the_isas(tmp_path):
    right = []
    for m, n in ((256, 256), (128, 64), (256, 8)):
        expected = word(INSTRUCTION, d_format=1, a_format=1, b_format=1, n_8=n // 8, m_16=m // 16)
        right.append(f"instruction_descriptor({m}, {n}) == {expected:#x}u")
    for address in (0, 1024, 0x38000 - 1024):
        expected = word(MATRIX, address_16=address // 16, leading_16=1, stride_16=64, version=1, layout=2)
        right.append(f"tensor_descriptor({address}u) == {expected:#x}ull")
    assert holds(tmp_path, " && ".join(right))
    for statement in right:
        assert not holds(tmp_path, statement.replace("==", "!="))


def test_a_gpu_gets_the_tile_that_needs_no_verdict(monkeypatch):
    monkeypatch.delenv("MOK_TILE", raising=False)
    assert tiles.chosen("sm_90a").name == "sm_90a"
    assert {tiles.chosen(arch, phase).name for arch in ("sm_100a", "sm_103a") for phase in ("forward", "backward")} == {
        "portable"
    }
    assert tiles.arch_of((12, 0)) is None
    monkeypatch.setenv("MOK_TILE", "sm_100a")
    assert tiles.chosen("sm_103a").name == "sm_100a"
    assert tiles.chosen("sm_103a", "backward").name == "portable"
    with pytest.raises(CapabilityError, match=r"sm_100a, sm_103a, and this GPU is sm_90a.*MOK_TILE=portable"):
        tiles.chosen("sm_90a")
    monkeypatch.setenv("MOK_TILE", "portabel")
    with pytest.raises(InputError, match="did you mean 'portable'"):
        tiles.chosen("sm_90a")
    monkeypatch.setenv("MOK_TILE", "portable")
    assert tiles.chosen("sm_90a").number == 1


def test_the_pairs_tile_wants_rows_in_pairs_of_blocks():
    megakernel.check_tile(SM100, 256, 512, 256)
    with pytest.raises(InputError, match=r"multiples of 256, got 256, 512, 128; use MoKConfig\(row_block=256\)"):
        megakernel.check_tile(SM100, 256, 512, 128)
    megakernel.check_tile(PORTABLE, 128, 128, 128)


def test_verdicts_know_every_tile():
    assert {tile.name for tile in verdicts.TILES} == set(tiles.TILES)
    for tile in verdicts.TILES:
        assert tile.select == {"MOK_TILE": tile.name}
        assert {arch.rstrip("a") for arch in tiles.TILES[tile.name].archs} == set(tile.archs)
    assert verdicts.running("sm_100").name == "portable"
    assert verdicts.running("sm_90").name == "sm_90a"
