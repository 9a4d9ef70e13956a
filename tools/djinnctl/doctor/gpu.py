"""CUDA as torch sees it, the driver, device memory, copies over the bus, and Triton."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from djinnctl.doctor.result import Result, fail, ok, warn
from djinnctl.doctor.software import parsed
from djinnctl.units import size

if TYPE_CHECKING:
    import torch

SLOW = 10.0  # GB/s: less than PCIe 3.0 x16 gives, and less than streamed weights need
COPY_BYTES = 256 << 20
REPEATS = 5
OLDEST_DRIVER = {12: 525, 13: 580}  # by the CUDA version that torch was built with


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    total: int
    free: int


@dataclass(frozen=True)
class Cuda:
    """`built`: the CUDA version torch was built with, empty for a CPU build. `gpus`: the GPUs that torch can use."""

    built: str
    gpus: tuple[Gpu, ...]


def check() -> Iterator[Result]:
    try:
        cuda = torch_cuda()
    except ImportError as error:
        yield fail("CUDA", f"torch cannot be imported: {error}", "reinstall it: pip install --force-reinstall torch")
        return
    driver = driver_version()
    yield judge_cuda(cuda, driver)
    if driver is not None:
        yield judge_driver(driver, cuda)
    for gpu in cuda.gpus:
        yield judge_memory(gpu)
        yield _copies(gpu)
    yield judge_triton(_triton_version(), _compiler(), bool(cuda.gpus))


def torch_cuda() -> Cuda:
    import torch

    if not torch.cuda.is_available():
        return Cuda(torch.version.cuda or "", ())
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(index, properties.name, (properties.major, properties.minor), total, free))
    return Cuda(torch.version.cuda or "", tuple(gpus))


def driver_version() -> str | None:
    """The version that nvidia-smi reports; None without nvidia-smi, as on a machine without an NVIDIA GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def judge_cuda(cuda: Cuda, driver: str | None) -> Result:
    if cuda.gpus:
        return ok("CUDA", f"torch for CUDA {cuda.built} sees {len(cuda.gpus)} GPU{'s' * (len(cuda.gpus) > 1)}")
    if driver is None:
        return warn(
            "CUDA", "no GPU: djinnd will run on the CPU", "for a GPU install its driver; nvidia-smi must list it"
        )
    if not cuda.built:
        return warn(
            "CUDA", f"driver {driver} is there, but this torch is built for the CPU", "install torch's CUDA build"
        )
    return fail(
        "CUDA",
        f"driver {driver} is there, but torch for CUDA {cuda.built} cannot use a GPU",
        'see why: python -c "import torch; torch.cuda.init()"; check CUDA_VISIBLE_DEVICES and /dev/nvidia*',
    )


def judge_driver(driver: str, cuda: Cuda) -> Result:
    oldest = OLDEST_DRIVER.get(parsed(cuda.built)[0], 0) if cuda.built else 0
    if parsed(driver) < (oldest,):
        return fail("driver", f"{driver}, but torch for CUDA {cuda.built} needs {oldest}", "install a newer driver")
    return ok("driver", driver)


def judge_memory(gpu: Gpu) -> Result:
    major, minor = gpu.capability
    finding = f"{gpu.name}, capability {major}.{minor}, {size(gpu.free)} free of {size(gpu.total)}"
    if gpu.free < gpu.total * 3 // 4:
        return warn(f"cuda:{gpu.index}", finding, "others use it: see nvidia-smi, or lower `djinnd --memory`")
    return ok(f"cuda:{gpu.index}", finding)


def judge_copies(index: int, to_device: float, to_host: float) -> Result:
    """`to_device`, `to_host`: GB/s of large copies from and to pinned memory."""
    finding = f"{to_device:.1f} GB/s to the device, {to_host:.1f} GB/s back, from pinned memory"
    if min(to_device, to_host) < SLOW:
        return warn(
            f"cuda:{index}",
            finding,
            "streamed models will be slow; is it in an x16 slot? `nvidia-smi -q | grep -i width`",
        )
    return ok(f"cuda:{index}", finding)


def judge_triton(version: str | None, compiler: str | None, wanted: bool) -> Result:
    if not wanted:
        return ok("Triton", f"{version or 'not installed'}; not needed without a GPU")
    if version is None:
        return fail("Triton", "not installed", "it comes with torch's CUDA build: reinstall torch")
    if compiler is None:
        return fail("Triton", f"{version}, but no C compiler, which it needs", "install gcc, or set $CC")
    return ok("Triton", f"{version}, with {compiler}")


def _copies(gpu: Gpu) -> Result:
    try:
        return judge_copies(gpu.index, *measure_copies(gpu.index))
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        return fail(f"cuda:{gpu.index}", f"cannot copy from pinned memory: {why}", "raise memlock; see nvidia-smi")


def measure_copies(index: int) -> tuple[float, float]:
    """GB/s to the device and back: the best of a few large copies each way."""
    import torch

    with torch.cuda.device(index):
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        return _rate(device, host), _rate(host, device)


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    import torch

    best = 0.0
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best = max(best, COPY_BYTES / begin.elapsed_time(end) / 1e6)  # elapsed_time: milliseconds
    return best


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _compiler() -> str | None:
    names = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    return next((found for name in names if (found := shutil.which(name))), None)
