"""Each row of the table of errors is found by the words that torch, CUDA, vLLM, pip and the system really use."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_nb.dev import docs
from grpo_nb.doctor import explain
from grpo_nb.doctor.errors import explain_text, recognise
from grpo_nb.doctor.known_errors import KNOWN
from grpo_nb.jupyter import kernel

REAL = {
    "kv-cache": [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
        "RuntimeError: Failed to allocate memory for KV cache",
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in "
        "KV cache (8192). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    ],
    "engine-start": [
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "RuntimeError: Failed to initialize vLLM engine",
    ],
    "out-of-memory": [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 39.39 GiB of "
        "which 5.56 MiB is free.",
        "RuntimeError: CUDA out of memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)",
        "RuntimeError: Cannot allocate memory",
        "MemoryError: Unable to allocate 3.0 GiB for an array with shape (20000, 20000) and data type float64",
    ],
    "disk-full": [
        "OSError: [Errno 28] No space left on device: 'checkpoints/000040/policy.safetensors'",
        "OSError: [Errno 122] Disk quota exceeded",
        "RuntimeError: Cannot save checkpoint",
        "RuntimeError: [enforce fail at inline_container.cc:668] . PytorchStreamWriter failed writing file data/4: "
        "file write failed",
    ],
    "slow-rollouts": [
        "Rollouts are slow",
        "generation speed is very low",
        "INFO 05-11 10:12:01 [loggers.py:116] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
        "throughput: 41.3 tokens/s, Running: 1 reqs",
    ],
    "open-files": ["OSError: [Errno 24] Too many open files: 'metrics.jsonl'"],
    "backward-twice": [
        "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they "
        "have already been freed). Saved intermediate values of the graph are freed when you call .backward() or "
        "autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or if you "
        "need to access saved tensors after calling backward.",
    ],
    "device-assert": [
        "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported "
        "at some other API call, so the stacktrace below might be incorrect.",
        "AcceleratorError: CUDA error: an illegal memory access was encountered",
    ],
    "nan-probabilities": ["RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"],
    "nan-loss": [
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "Loss: nan",
        "Gradient: nan",
        "NaN loss",
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-06}",
    ],
    "index-out-of-range": ["IndexError: index out of range in self"],
    "no-gradient": ["RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"],
    "in-place": [
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: "
        "[torch.FloatTensor [4]], which is output 0 of AddBackward0, is at version 2; expected version 1 instead.",
    ],
    "two-devices": [
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    ],
    "number-type": [
        "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
        "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
    ],
    "deterministic": [
        "RuntimeError: cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'.",
        "RuntimeError: Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
        "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment "
        "variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or "
        "CUBLAS_WORKSPACE_CONFIG=:16:8.",
    ],
    "no-rollouts": [
        "AssertionError: num_rollouts_per_episodes should be > 0",
        "num_rollouts_per_episodes = 0",
    ],
    "flags-ignored": [
        "The following generation flags are not valid and may be ignored: ['temperature', 'top_p']. Set "
        "`TRANSFORMERS_VERBOSITY=info` for more details.",
    ],
    "engine-asleep": ["RuntimeError: Engine already sleeping", "AssertionError: Engine is already sleeping"],
    "chat-template": [
        "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template "
        "argument was passed!",
    ],
    "compiler": [
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build",
        "InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, "
        "'g++')",
    ],
    "wrong-architecture": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: no kernel image is available for execution",
    ],
    "cpu-build": ["AssertionError: Torch not compiled with CUDA enabled"],
    "driver": [
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a "
        "driver from http://www.nvidia.com/Download/index.aspx",
        "RuntimeError: The NVIDIA driver on your system is too old; CUDA driver version is insufficient for CUDA "
        "runtime version",
    ],
    "cuda-mismatch": [
        "RuntimeError: \nThe detected CUDA version (11.8) mismatches the version that was used to compile\nPyTorch "
        "(12.8). Please make sure to use the same CUDA versions.",
        "ImportError: libcudart.so.11.0: cannot open shared object file: No such file or directory",
        "ImportError: flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
    ],
    "gpu-library": ["RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"],
    "attention-package": [
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the "
        "package flash_attn seems to be not installed.",
    ],
    "wheel": ["ERROR: Failed building wheel for vllm", "ERROR: Failed to build installable wheels for some pyproject"],
    "not-installed": ["ModuleNotFoundError: No module named 'lightrft'"],
    "hub": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the "
        "cached files.",
        "OSError: qwen3 is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        "OSError: You are trying to access a gated repo.",
    ],
    "rank-lost": [
        "RankError: rank 1 of 2 died ([gloo] Connection closed by peer [127.0.0.1]:6355), at 'gradients'.",
        "grpo_nb.ranks.link.RankError: rank 3 of 8 has not answered for 1800 s (run.rank_timeout), at 'draw'.",
        "RankError: rank 0 has ended (Connection closed by peer); this rank ends",
    ],
    "ranks-never-met": [
        "RankError: rank 0 of 2 waited 300 s at host:29500 and rank [1] never came.",
        "Initializing process group: MASTER_ADDR=localhost, MASTER_PORT=29500",
    ],
    "nccl-timeout": [
        "RuntimeError: NCCL timeout",
        "[E ProcessGroupNCCL.cpp] Caught collective operation timeout",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, "
        "NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.",
    ],
    "nccl": [
        "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3",
    ],
    "process-group": [
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR "
        "expected, but not set",
        "DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 1).",
        "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE",
    ],
    "other-weights": [
        "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for model.norm.weight",
        "RuntimeError: Error loading state dict",
    ],
    "damaged-file": [
        "SafetensorError: Error while deserializing header: HeaderTooLarge",
        "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "UnpicklingError: Weights only load failed. This file can still be loaded",
    ],
    "checkpoint-missing": [
        "FileNotFoundError: Checkpoint not found",
        "FileNotFoundError: [Errno 2] No such file or directory: 'runs/a/checkpoints/000040/policy.safetensors'",
    ],
    "local-name": [
        "UnboundLocalError: cannot access local variable 'torch' where it is not associated with a value",
    ],
    "undefined-name": ["NameError: name 'delta' is not defined"],
    "event-loop": ["RuntimeError: asyncio.run() cannot be called from a running event loop"],
}


def test_every_row_has_its_cases() -> None:
    assert REAL.keys() == {known.name for known in KNOWN}
    assert len({known.name for known in KNOWN}) == len(KNOWN)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in REAL.items() for text in texts])
def test_a_real_text_finds_its_own_row(name: str, text: str) -> None:
    known = recognise(text)
    assert known is not None and known.name == name
    words = explain_text(text) or ""
    assert words.startswith(known.cause) and known.page in words and words.endswith(".")


@pytest.mark.parametrize(
    "text",
    [
        "loss = nan: applying this update would turn all weights into nan, so it is left out.",
        "ConfigError: batch.mini_batch=48 does not divide the 64 completions of a step",
        "RunError: runs/demo holds a run already; open it (`Run.open`), or choose another folder",
        "KeyError: 'reward'",
        "ZeroDivisionError: division by zero",
    ],
)
def test_an_error_that_says_it_itself_is_left_alone(text: str) -> None:
    assert recognise(text) is None


def test_the_page_has_a_section_for_every_row(tmp_path: Path) -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in docs.write(tmp_path)}
    assert all(f'<h2 id="{known.name}">' in pages["errors"] for known in KNOWN)
    assert all(known.page == f"errors.html#{known.name}" for known in KNOWN)


def test_a_failed_cell_is_explained_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(kernel, "notify", shown.append)
    error = RuntimeError(REAL["backward-twice"][0])
    kernel.explain_failure(SimpleNamespace(error_in_exec=error))
    assert shown == [explain(error)]
    for silent in (SimpleNamespace(error_in_exec=None), SimpleNamespace(error_in_exec=KeyError("a")), None):
        kernel.explain_failure(silent)
    assert len(shown) == 1
