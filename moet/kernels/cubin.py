"""Find, verify, load and launch prebuilt kernels through the CUDA driver.

Knows the manifest that build.py writes and torch's current stream; knows no kernel by name.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from moet.errors import CubinError, KernelError

MOST_CONFIGS = 4096
PORTABLE_CLUSTER = 8  # CTAs
ARCH_OF_CAPABILITY = {(9, 0): "sm90a", (12, 0): "sm120a"}


def folder() -> Path:
    """Where cubins are: in the package when installed, beside it in a checkout."""
    inside = Path(__file__).parents[1] / "cubins"
    return inside if inside.exists() else Path(__file__).parents[2] / "cubins"


def device_arch(device: torch.device) -> str:
    """The cubin architecture of a CUDA device. Raises CubinError if none is built for it."""
    capability = torch.cuda.get_device_capability(device)
    arch = ARCH_OF_CAPABILITY.get(capability)
    if arch is None:
        built = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        raise CubinError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; cubins exist for {built}"
        )
    return arch


def verified(name: str, arch: str, root: Path | None = None) -> bytes:
    """The bytes of cubins/ARCH/NAME.cubin once its checksum holds. Raises CubinError."""
    root = root or folder()
    path, manifest = root / arch / f"{name}.cubin", root / "MANIFEST.json"
    if not manifest.exists() or not path.exists():
        missing = path if manifest.exists() else manifest
        raise CubinError(f"{missing} is absent; python -m moet.kernels.build makes it")
    facts = json.loads(manifest.read_text())["cubins"].get(f"{arch}/{name}")
    if facts is None:
        raise CubinError(f"{manifest} does not list {arch}/{name}; python -m moet.kernels.build")
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != facts["cubin_sha256"]:
        raise CubinError(
            f"{path} has sha256 {digest[:12]}, its manifest says {facts['cubin_sha256'][:12]}: it "
            "is damaged or was built by hand; reinstall, or python -m moet.kernels.build"
        )
    return data


def _sources(root: Path, arch: str) -> dict[str, str]:
    """Kernel -> name of the cubin that holds it."""
    path = root / "MANIFEST.json"
    if not path.exists():
        raise CubinError(f"{path} is absent; python -m moet.kernels.build makes it")
    listed = json.loads(path.read_text())["cubins"]
    return {
        kernel: key.split("/")[1]
        for key, facts in listed.items()
        if key.startswith(f"{arch}/")
        for kernel in facts["kernels"]
    }


class Kernels:
    """The kernels of one device, found by name over all cubins of its architecture.

    A cubin is verified and loaded when the first of its kernels is launched, so launch everything
    once before a graph is captured.
    """

    def __init__(self, device: torch.device, root: Path | None = None) -> None:
        try:
            from cuda.bindings import driver  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            message = "cuda-python is not installed; run: pip install 'moet[cuda]'"
            raise KernelError(message) from None
        self._driver: Any = driver
        self._root = root or folder()
        self.device = device
        self.arch = device_arch(device)
        properties: Any = torch.cuda.get_device_properties(device)
        self.num_sms: int = properties.multi_processor_count
        self.max_shared_bytes: int = properties.shared_memory_per_block_optin
        self._sources = _sources(self._root, self.arch)
        self._libraries: dict[str, Any] = {}
        self._functions: dict[str, tuple[Any, int]] = {}
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._index: int = device.index if device.index is not None else torch.cuda.current_device()
        torch.zeros(1, device=device)  # makes torch's context current

    def _checked(self, result: tuple[Any, ...], what: str) -> Any:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(result[0])
            raise CubinError(f"{what}: {text.decode() if text else result[0]}")
        return result[1] if len(result) > 1 else None

    def _load(self, kernel: str) -> Any:
        source = self._sources.get(kernel)
        if source is None:
            raise CubinError(f"no cubin for {self.arch} holds {kernel}; see {self._root}")
        if source not in self._libraries:
            data = verified(source, self.arch, self._root)
            loaded = self._driver.cuLibraryLoadData(data, [], [], 0, [], [], 0)
            self._libraries[source] = self._checked(loaded, source)
        found = self._driver.cuLibraryGetKernel(self._libraries[source], kernel.encode())
        return self._checked(self._driver.cuKernelGetFunction(self._checked(found, kernel)), kernel)

    def _function(self, kernel: str, shared_bytes: int, cluster: int) -> Any:
        found, allowed = self._functions.get(kernel, (None, 0))
        if found is None:
            found = self._load(kernel)
            if cluster > PORTABLE_CLUSTER:
                self._allow_clusters(found, kernel)
        if shared_bytes > allowed:
            attribute = self._driver.CUfunction_attribute
            allowed = shared_bytes
            self._checked(
                self._driver.cuFuncSetAttribute(
                    found, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, allowed
                ),
                f"{kernel} with {shared_bytes} bytes of shared memory",
            )
        self._functions[kernel] = (found, allowed)
        return found

    def _allow_clusters(self, function: Any, kernel: str) -> None:
        """Of more CTAs than every device can run at the same time."""
        attribute = self._driver.CUfunction_attribute
        size = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self._checked(self._driver.cuFuncSetAttribute(function, size, 1), kernel)

    def launch(
        self,
        name: str,
        *,
        grid: int | tuple[int, int],
        threads: int,
        shared_bytes: int,
        args: ctypes.Structure,
        overlap: bool = True,
        cluster: int = 1,
    ) -> None:
        """Launch on torch's current stream; `args` is the kernel's one parameter.

        overlap: the kernel may begin before the one ahead of it in the stream has ended; it waits
        for that one itself before it reads what that one wrote. cluster: CTAs, neighbours in x,
        that run at the same time and may read each other's shared memory.
        """
        function = self._function(name, shared_bytes, cluster)
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        config = self._config(grid, threads, shared_bytes, stream, overlap, cluster)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        launched = self._driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
        if launched[0]:
            self._checked(launched, name)

    def _config(
        self,
        grid: int | tuple[int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        overlap: bool,
        cluster: int,
    ) -> Any:
        """Kept once made: making one takes longer than a launch. Nobody writes to it later."""
        key = grid, threads, shared_bytes, stream, overlap, cluster
        config = self._configs.get(key)
        if config is not None:
            return config
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY = grid if isinstance(grid, tuple) else (grid, 1)
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = threads
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = int(overlap)
        attributes = [attribute]
        if cluster > 1:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attributes[-1].value.clusterDim
            dimension.x, dimension.y, dimension.z = cluster, 1, 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        if len(self._configs) == MOST_CONFIGS:  # grids follow the sizes of prompts
            self._configs.clear()
        self._configs[key] = config
        return config
