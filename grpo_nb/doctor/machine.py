"""Checks of the machine and the environment: what was found, whether it is sufficient, what to change."""

import functools
import importlib.util
import inspect
import os
import platform
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PACKAGE = "grpo_nb"
LITTLE_RAM_GIB, LITTLE_DISK_GIB = 2.0, 2.0
"""The demo takes about 1 GiB of memory; three checkpoints of a small LoRA run and its logs stay under 2 GiB of disk."""
GIB = 2**30


@dataclass(frozen=True)
class Check:
    """Result of one check: `ok`, `info`, `warning` (may work) or `error` (will not work)."""

    name: str
    status: Literal["ok", "info", "warning", "error"]
    found: str
    advice: str = ""


def environment() -> list[Check]:
    """Python, packages, kernel, torch against the GPU, memory, disk, keys. Changes nothing."""
    checks = (_python, _kernel, _code, _packages, _vllm, _torch, _devices, _memory, _disk, _keys, _processes)
    return [result for check in checks for result in _guarded(check)]


def _guarded(check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Run a check; an exception of it becomes a warning, so that the other checks still run."""
    try:
        yield from check()
    except Exception as error:
        yield Check(check.__name__.strip("_"), "warning", f"could not be checked: {type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    wanted, have = _project()[0], platform.python_version()
    fits = SpecifierSet(wanted).contains(have, prereleases=True)
    found = f"{have} on {platform.system()} {platform.machine()}"
    advice = "" if fits else f"needs Python {wanted}: make an environment with one"
    yield Check("python", "ok" if fits else "error", found, advice)


def _kernel() -> Iterator[Check]:
    """Check the kernel, which is often another Python, or another copy of the package, than the terminal's."""
    package = Path(__file__).parents[1]
    found = f"{sys.executable}, package from {package}"
    beside = next(
        (f / PACKAGE for f in (Path.cwd(), *Path.cwd().parents) if (f / PACKAGE / "__init__.py").is_file()), None
    )
    if beside is not None and beside.resolve() != package.resolve():
        yield Check("kernel", "warning", found, f"you stand in another copy, {beside}: pip install -e {beside.parent}")
    else:
        yield Check("kernel", "ok", found)


def _code() -> Iterator[Check]:
    """Check for code that was edited after this process loaded it."""
    loaded = [module for name, module in sys.modules.copy().items() if name.split(".")[0] == PACKAGE]
    stale = sorted(module.__name__ for module in loaded if stale_functions(module))
    if stale:
        yield Check(
            "code", "warning", f"edited since it was loaded: {', '.join(stale)}", "restart the kernel to use it"
        )
    else:
        yield Check("code", "ok", f"{len(loaded)} modules loaded, all as on disk")


def stale_functions(module: ModuleType) -> list[str]:
    """Functions of a module whose loaded code differs from its file, by qualified name."""
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py") or not Path(path).is_file():
        return []
    on_disk = _compiled(path, Path(path).read_text(encoding="utf-8"))
    loaded = [f.__code__ for f in _functions(module) if f.__code__.co_filename == path]
    return [code.co_qualname for code in loaded if _differ(code, on_disk.get(code.co_qualname))]


@functools.lru_cache(maxsize=1024)  # compiling the package is most of the doctor's time, and most files stay
def _compiled(path: str, source: str) -> dict[str, CodeType]:
    return {code.co_qualname: code for code in _codes(compile(source, path, "exec", dont_inherit=True))}


def _packages() -> Iterator[Check]:
    """Check the installed versions against pyproject.toml's ranges; missing extras are no error."""
    good = []
    for requirement, optional in _project()[1]:
        have = installed_version(requirement.name)
        if have is None and not optional:
            yield Check("packages", "error", f"{requirement.name} is missing", f"pip install '{requirement}'")
        elif have is not None and not requirement.specifier.contains(have, prereleases=True):
            status: Literal["warning", "error"] = "warning" if optional else "error"
            yield Check("packages", status, f"{requirement.name} {have}", f"pip install '{_bare(requirement)}'")
        elif have is not None and not optional:
            good.append(f"{requirement.name} {have}")
    yield Check("packages", "ok", ", ".join(good))


def _vllm() -> Iterator[Check]:
    """Check whether vLLM is installed and fits the other packages; by metadata, since an import is slow.

    Nothing here needs it.
    """
    have, unneeded = (
        installed_version("vllm"),
        "not needed here: rollout.engine='vllm' asks a server, which has an environment of its own",
    )
    if have is None:
        yield Check("vllm", "ok", f"not installed, and {unneeded}")
        return
    misfits = [*_misfits("trl", "vllm"), *_misfits("vllm", "torch"), *_misfits("vllm", "transformers")]
    if importlib.util.find_spec("vllm") is None:
        misfits.append("its metadata is installed, its code is not")
    advice = "install vLLM in an environment of its own and talk to it over HTTP" if misfits else ""
    yield Check("vllm", "info" if misfits else "ok", "; ".join([f"vllm {have}", *misfits, unneeded]), advice)


def _misfits(package: str, other: str) -> Iterator[str]:
    """Conflicts where the `other` package is installed in a version that `package` excludes, extras included."""
    have = installed_version(other)
    if have is None or installed_version(package) is None:
        return
    for requirement in map(Requirement, metadata.requires(package) or ()):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": other})
        if requirement.name == other and applies and not requirement.specifier.contains(have, prereleases=True):
            yield f"{package} {installed_version(package)} needs {_bare(requirement)}, here is {have}"


def _torch() -> Iterator[Check]:
    """Check whether this build of torch can use the machine's GPU."""
    import torch

    build = f"torch {torch.__version__}, built for " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU")
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        advice = "an NVIDIA driver is installed, but this torch cannot use it: " + (
            "update the driver or take a build for an older CUDA"
            if torch.version.cuda
            else "install a CUDA build, https://pytorch.org/get-started/locally"
        )
        yield Check("torch", "warning" if driver else "ok", build, advice if driver else "")
        return
    architectures = torch.cuda.get_arch_list()
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        fits = runs_on(capability, architectures)
        found = f"{build}; {torch.cuda.get_device_name(i)} (sm_{capability[0]}{capability[1]})"
        advice = f"this build has {', '.join(architectures)}: install one with sm_{capability[0]}{capability[1]}"
        yield Check("torch", "ok" if fits else "error", found, "" if fits else advice)


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code built for `architectures` runs on a GPU: binaries of its major version, or PTX that is not newer.

    >>> runs_on((8, 6), ["sm_80", "sm_90"]), runs_on((12, 0), ["sm_80", "sm_90"]), runs_on((12, 0), ["compute_90"])
    (True, False, True)
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:
            return True
    return False


def _devices() -> Iterator[Check]:
    import torch

    from grpo_nb.policy.loading import available_devices, pick_device, pick_dtype

    device = pick_device("auto")
    dtype = str(pick_dtype("auto", device, full=False)).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} of {os.cpu_count()} cores in use" if device.type == "cpu" else ""
    yield Check("device", "ok", f"{device}, {dtype} for LoRA{threads}; there are {', '.join(available_devices())}")


def _memory() -> Iterator[Check]:
    import torch

    free = available_ram_gib()
    if free is not None:
        low = free < LITTLE_RAM_GIB
        advice = "close other kernels: even the demo takes about 1 GiB" if low else ""
        yield Check("memory", "warning" if low else "ok", f"{free:.1f} GiB available", advice)
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        unused, total = (n / GIB for n in torch.cuda.mem_get_info(i))
        low = unused < total / 2
        advice = "other processes hold the rest: nvidia-smi lists them" if low else ""
        yield Check("gpu memory", "warning" if low else "ok", f"cuda:{i}: {unused:.1f} of {total:.1f} GiB free", advice)


def available_ram_gib(root: Path = Path("/")) -> float | None:
    """Memory that a process could still get, within the container's limit; None where the system does not say."""
    info = root / "proc/meminfo"
    if not info.is_file():
        return None
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    free = float(lines["MemAvailable"].split()[0]) / 2**20
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, (int(most) - int(used.read_text())) / GIB)
    return free


def _disk() -> Iterator[Check]:
    usage = shutil.disk_usage(Path.cwd())
    low = usage.free / GIB < LITTLE_DISK_GIB
    advice = "checkpoints need room: free some, or make new runs with a lower run.keep_checkpoints" if low else ""
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.0f} GiB free in {Path.cwd()}"
    yield Check("disk", "warning" if low else "ok", found, advice)


def _keys() -> Iterator[Check]:
    """Report whether API keys are set; never their values."""
    for name, use in (("OPENAI_API_KEY", "an LLM judge"), ("HF_TOKEN", "gated models of the hub")):
        yield Check("keys", "info", f"{name} is {'set' if os.environ.get(name) else 'not set'}; only used for {use}")


def _processes() -> Iterator[Check]:
    """Check whether this process was started as one of several, which would each train the same run."""
    world, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK")
    if not world.isdigit() or int(world) < 2:
        return
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    met = f"MASTER_ADDR={host}, MASTER_PORT={port}"
    if host and port and port.isdigit():
        met += " answers" if _answers(host, int(port)) else " does not answer"
    yield Check(
        "processes",
        "warning",
        f"process {rank} of {world} ({met})",
        "grpo_nb trains in one process, and a run's lock refuses a second: start it without torchrun, srun or "
        "accelerate launch, and give each GPU a run of its own with CUDA_VISIBLE_DEVICES",
    )


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _project() -> tuple[str, list[tuple[Requirement, bool]]]:
    """The Python range, and the requirements with whether each is optional: of the installation, else the checkout."""
    try:
        about = metadata.metadata(PACKAGE)
        wanted, lines = about["Requires-Python"] or ">=3.11", metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        tree: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))[
            "project"
        ]
        wanted, lines = tree["requires-python"], list(tree["dependencies"])
    parsed = [Requirement(line) for line in lines]
    return wanted, [(r, r.marker is not None and "extra" in str(r.marker)) for r in parsed if r.name != PACKAGE]


def _bare(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def installed_version(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Functions and methods defined in a module, decorators peeled off."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    members = [member for value in own if isinstance(value, type) for member in vars(value).values()]
    for value in (*own, *members):
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        inner = inspect.unwrap(inner) if callable(inner) else inner
        if isinstance(inner, FunctionType):
            yield inner


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _differ(loaded: CodeType, on_disk: CodeType | None) -> bool:
    """Whether the two do different things; their position in the file does not matter."""
    if on_disk is None:
        return True
    return _meaning(loaded) != _meaning(on_disk)


def _meaning(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, code.co_varnames, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _meaning(value)
    return type(value), sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
