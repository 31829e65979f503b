"""From a well-known error to its cause and what to change.

The package's own errors say that themselves; these are the ones of torch, CUDA and the system, whose words
seldom lead to what is wrong.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One error that people meet: how to recognise it, why it comes, what to change."""

    pattern: str
    cause: str
    change: str


KNOWN = (
    Known(
        r"out of memory|can't allocate memory|OutOfMemoryError|Unable to allocate",
        "The device's memory is full: the largest things in it are the logits (micro-batch x length x vocabulary) and "
        "the activations that wait for the backward pass.",
        "Halve batch.micro_batch (the gradient stays the same), then set model.gradient_checkpointing=true, then "
        "lower sampling.max_completion_length. `grpo-nb plan` shows which term is the largest. What was saved is "
        "valid: resume",
    ),
    Known(
        r"backward through the graph a second time",
        "A tensor that carries gradient was made once and used in two backward passes; mostly a KL or log-probs "
        "computed before the loop over inner epochs.",
        "Compute what carries gradient anew in each pass, and old and reference log-probs under torch.no_grad(). Not "
        "retain_graph=True: it keeps the memory and differentiates the old policy",
    ),
    Known(
        r"device-side assert",
        "The GPU met an impossible index or probability. Mostly the logits became nan in an earlier step, or a token "
        "id lies outside the vocabulary.",
        "Restart the kernel (the GPU's context is lost) and resume; then look at `grpo-nb diagnose` for the first "
        "non-finite step. CUDA_LAUNCH_BLOCKING=1 before the start names the line",
    ),
    Known(
        r"probability tensor contains either|probabilities (are|contain) nan",
        "The logits are nan or infinite, so there is no distribution to draw from: an update has damaged the weights.",
        "Resume from the last checkpoint with half the learning rate, and bfloat16 or float32 instead of float16",
    ),
    Known(
        r"no kernel image is available",
        "This torch was built for other GPU architectures than the one here.",
        "Install a build that has it, e.g. pip install torch --index-url https://download.pytorch.org/whl/cu128; "
        "`grpo-nb doctor` lists what the build supports and what the GPU is",
    ),
    Known(
        r"Torch not compiled with CUDA enabled",
        "This torch is a build for CPU only.",
        "Set model.device='cpu', or install a CUDA build: https://pytorch.org/get-started/locally",
    ),
    Known(
        r"Found no NVIDIA driver|driver version is insufficient|CUDA driver initialization failed",
        "The NVIDIA driver is missing or older than this torch needs.",
        "Update the driver, install a torch built for an older CUDA, or set model.device='cpu'",
    ),
    Known(
        r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_NOT_INITIALIZED",
        "A GPU library could not start, nearly always because the GPU's memory is full.",
        "Look with nvidia-smi for other processes (old kernels) that hold it, then lower batch.micro_batch",
    ),
    Known(
        r"does not require grad and does not have a grad_fn",
        "The loss hangs on no trainable parameter: everything is frozen, or the forward pass ran under no_grad.",
        "Look at policy.describe()['trainable'], and take the loss outside of policy.eval_mode()",
    ),
    Known(
        r"modified by an inplace operation",
        "A tensor that the backward pass needs was overwritten after the forward pass.",
        "In your own reward or loss code, write x = x + 1 instead of x += 1 on what came out of the model",
    ),
    Known(
        r"Expected all tensors to be on the same device",
        "Tensors of two devices met in one operation.",
        "Give all of them to policy.device; a reward function should return plain numbers, not tensors",
    ),
    Known(
        r"Error\(s\) in loading state_dict|size mismatch for",
        "The weights belong to another model, or to LoRA of another rank.",
        "Use the model.name and model.lora_rank that the run was made with; they are in its config.json",
    ),
    Known(
        r"No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Free some space; what was saved before is whole. Of a run's checkpoints only 000000 and the newest are needed "
        "to go on; a new run keeps fewer with a lower run.keep_checkpoints",
    ),
    Known(
        r"Too many open files",
        "The process has reached its limit of open files.",
        "Restart the kernel; `ulimit -n 4096` before starting it raises the limit",
    ),
    Known(
        r"No module named",
        "The package is not installed for the Python that runs this kernel, which may be another one than your "
        "terminal's.",
        f"Install it for this one: {sys.executable} -m pip install NAME",
    ),
)


def explain(error: BaseException) -> str | None:
    """Cause and remedy of an error, or of what it was raised from; None where its own words must do.

    >>> explain(RuntimeError("CUDA error: no kernel image is available for execution on the device"))[:44]
    'This torch was built for other GPU architect'
    """
    texts = (f"{type(link).__name__}: {link}" for link in _chain(error))
    return next((words for text in texts if (words := explain_text(text))), None)


def explain_text(text: str) -> str | None:
    """Cause and remedy of an error by its words, as they stand in a log."""
    known = next((known for known in KNOWN if re.search(known.pattern, text, re.IGNORECASE)), None)
    if known is None:
        return None
    size = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    asked = f" ({size[1]} were asked for.)" if size else ""
    module = re.search(r"No module named '([\w]+)", text)
    return f"{known.cause}{asked} {known.change.replace('NAME', module[1]) if module else known.change}."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
