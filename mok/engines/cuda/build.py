"""From kernel source to machine code at first use: NVRTC through `cuda.core`, kept on disk by content.

No compiler and no toolkit is needed, and our headers include no one else's, so a cubin depends on exactly four
things: the source, our headers, the options and the version of NVRTC. Those make its key; a changed byte anywhere
compiles anew, an unchanged one never does. Entries are written under a temporary name and renamed, so two processes
that compile the same kernel at once do not meet.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

from mok.errors import CapabilityError, InputError, MokError

ARCH = "sm_90a"
_STD = "c++17"
_sources: contextvars.ContextVar[str | None] = contextvars.ContextVar("mok_csrc", default=None)


class CompileError(MokError, RuntimeError):
    """NVRTC refused a kernel; the message holds its log (file and line) and the options."""


@contextlib.contextmanager
def use_sources(folder: str | None) -> Iterator[None]:
    """Take kernels from another `csrc` folder inside the block (`Workload.csrc`); None = the installed one."""
    token = _sources.set(folder)
    try:
        yield
    finally:
        _sources.reset(token)


def source_folder() -> pathlib.Path:
    """The folder of the `.cu` files: the one in use, the wheel's, or the checkout's. Raises InputError when absent."""
    return _folder(_sources.get())


@functools.cache  # every launch asks: looking through the file system each time cost 65 us
def _folder(chosen: str | None) -> pathlib.Path:
    package = pathlib.Path(__file__).resolve().parents[2]
    candidates = [pathlib.Path(chosen)] if chosen is not None else [package / "_csrc", package.parent / "csrc"]
    for folder in candidates:
        if (folder / "forward.cu").is_file():
            return folder
    raise InputError(f"no kernel sources (forward.cu) in {', '.join(map(str, candidates))}; pass the csrc folder of a checkout.")


def cache_folder() -> pathlib.Path:
    """MOK_CACHE_DIR, or `mok` under the user's cache folder (XDG_CACHE_HOME)."""
    chosen = os.environ.get("MOK_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "mok"


@functools.cache
def nvrtc_version() -> str:
    """`major.minor` of the run-time compiler. Raises CapabilityError when it is missing."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CapabilityError(
            f"the run-time compiler NVRTC did not load ({error}); install cuda-core and nvidia-cuda-nvrtc, "
            "or use engine='torch', which needs neither."
        ) from None
    return f"{major}.{minor}"


def _key(folder: pathlib.Path, source: str, defines: Mapping[str, int], arch: str) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for path in [folder / source, *sorted((folder / "include").rglob("*.cuh"))]:
        hasher.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    hasher.update(f"{sorted(defines.items())} {arch} {_STD} {nvrtc_version()}".encode())
    return hasher.hexdigest()


def cubin(source: str, defines: Mapping[str, int], arch: str = ARCH) -> bytes:
    """Machine code of `csrc/<source>` compiled with `-Dname=value` for `arch`, from the cache when it is there.

    Raises CompileError with NVRTC's log, CapabilityError without NVRTC.
    """
    folder = source_folder()
    path = cache_folder() / f"{pathlib.Path(source).stem}-{_key(folder, source, defines, arch)}.cubin"
    if path.is_file():
        return path.read_bytes()
    code, _ = compile_source(folder, source, defines, arch)
    with contextlib.suppress(OSError):  # a read-only cache costs time, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(name, path)
    return code


def compile_source(folder: pathlib.Path, source: str, defines: Mapping[str, int], arch: str = ARCH) -> tuple[bytes, str]:
    """(cubin, compiler log with ptxas -v resource lines) of one kernel file; no cache, no device needed."""
    nvrtc_version()
    import io

    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        arch=arch,
        name=str(folder / source),
        std=_STD,
        include_path=[str(folder / "include")],
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())] or None,  # an empty list is refused
        ptxas_options=["-v"],
        lineinfo=True,
    )
    try:
        code = Program((folder / source).read_text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # noqa: BLE001  # cuda.core's own error classes are private
        raise CompileError(
            f"{source} did not compile for {arch} with {dict(defines)} (NVRTC {nvrtc_version()}):\n{log.getvalue()}\n{error}"
        ) from None
    return bytes(code), log.getvalue()
