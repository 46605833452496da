"""Triton without a GPU: its own JIT, argument handling and launcher, over an idle driver.

The launcher is linked with `stub_cuda.c` in place of libcuda, and counts there what arrives. A
kernel is parsed and typed for its real arguments, but no machine code is made of it: the
compile gate (tests/kernels/test_compile_gate.py) does that for chosen builds, and it takes a
hundred times as long. Needs a C compiler.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import jit
from triton.runtime.driver import driver

CAPABILITY, PROCESSORS = (9, 0), 132  # as stub_cuda.c has them


class Driver(CudaDriver):
    """One GPU of compute capability 9.0 with its default stream."""

    def __init__(self) -> None:
        self.utils = CudaUtils()
        self.launcher_cls = CudaLauncher
        self.get_device_capability = lambda device=0: CAPABILITY
        self.get_current_stream = lambda device: 0
        self.get_current_device = lambda: 0
        self.set_current_device = lambda device: None


class Launches:
    """Counts the launches that arrive at the driver, by the name of the kernel, and the builds."""

    def __init__(self, stub: ctypes.CDLL) -> None:
        self._ask = stub.stub_launches
        self._ask.argtypes, self._ask.restype = (ctypes.c_char_p,), ctypes.c_long
        self.builds: Counter[str] = Counter()
        self._built: set[Any] = set()
        build = jit.JITFunction._do_compile

        def built(fn: Any, *args: Any, **kwargs: Any) -> Any:
            self.builds[fn.__name__] += 1
            self._built.add(fn)  # also after `builds` was cleared
            return build(fn, *args, **kwargs)

        jit.JITFunction._do_compile = built

    def total(self) -> Counter[str]:
        """Launches so far."""
        names = {fn.__name__ for fn in self._built}
        return Counter({name.strip("_"): self._ask(name.encode()) for name in names})

    def forget(self) -> None:
        """As in a new process: no kernel was built. Triton's cache on disk stays."""
        for fn in self._built:
            fn.device_caches.clear()


def install(folder: Path) -> Launches:
    """Make this process launch on the stub; there is no way back. `folder`: where it is built, and
    for Triton's cache."""
    stub = folder / "libcuda.so.1"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "cc"
    source = Path(__file__).with_name("stub_cuda.c")
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wall", "-Wextra"]
    subprocess.run([compiler, *flags, "-o", stub, source], check=True)
    (folder / "libcuda.so").symlink_to(stub.name)  # what `-lcuda` looks for
    triton.knobs.nvidia.libcuda_path = str(folder)
    triton.knobs.cache.dir = str(folder / "cache")
    loaded = ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    driver.set_active(Driver())
    triton.knobs.runtime.add_stages_inspection_hook = _without_machine_code
    # What the kernels' own code asks torch about the GPU.
    facts = SimpleNamespace(
        multi_processor_count=PROCESSORS, major=CAPABILITY[0], minor=CAPABILITY[1]
    )
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: facts  # type: ignore[assignment]
    return Launches(loaded)


def _without_machine_code(*asked: Any) -> tuple[str, str] | None:
    """Triton's hook over the compiler's stages; without arguments it asks for a cache key."""
    if not asked:
        return "no machine code", "no machine code"
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = asked[1]
    typed = stages["ttir"]

    def last(source: Any, metadata: dict[str, Any]) -> Any:
        name = source.get_entry_func_name()
        sizes = dict.fromkeys(("shared", "tmem_size"), 0)
        for kind in ("global", "profile"):
            sizes |= {f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1}
        metadata |= {"name": name, "tensordesc_meta": None} | sizes
        return typed(source, metadata)

    stages["ttir"] = last
    for stage in ("ttgir", "llir", "ptx"):
        stages[stage] = lambda source, metadata: source
    stages["cubin"] = lambda source, metadata: b"none"
    return None
