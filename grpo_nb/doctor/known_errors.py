"""Table of well-known errors: the pattern that recognises each, its cause, what to change.

The package's own errors explain themselves; these are errors of torch, CUDA, engines and the system, whose texts seldom
lead to the cause. `errors.explain` reads the table, and `make docs` prints it as the page `errors`.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One error that people meet."""

    name: str
    """Name of its section on the page `errors`."""
    pattern: str
    """Regular expression that finds it, whatever the case; the first matching row is taken."""
    cause: str
    change: str

    @property
    def page(self) -> str:
        """Address of its section on the page that `make docs` builds."""
        return f"errors.html#{self.name}"


# Memory and disk

_MEMORY = (
    Known(
        "kv-cache",
        r"memory for (the )?KV cache|No available memory for the cache blocks|"
        r"larger than the maximum number of tokens that can be stored in KV cache",
        "The engine found no room for keys and values next to its weights and the training process.",
        "Lower the engine's share of the memory (vLLM: --gpu-memory-utilization 0.3), its --max-model-len to "
        "sampling.max_prompt_length + sampling.max_completion_length, or spread it with --tensor-parallel-size 2. "
        "`grpo-nb plan` shows what training itself takes",
    ),
    Known(
        "engine-start",
        r"Failed to initialize vLLM|Engine core initialization failed|EngineCore failed to start|EngineDeadError",
        "The vLLM engine did not start. The message above it has the reason; mostly the GPU's memory is full.",
        "Look with nvidia-smi for what holds the memory, then start it with --gpu-memory-utilization 0.5 and "
        "--tensor-parallel-size 1, then look whether this version of vLLM serves the model. rollout.engine='eager' "
        "needs no server and trains meanwhile",
    ),
    Known(
        "out-of-memory",
        r"out of memory|can('|no)t allocate memory|OutOfMemoryError|Unable to allocate",
        "The device's memory is full: the largest things in it are the logits (micro-batch x length x vocabulary) and "
        "the activations that wait for the backward pass.",
        "Halve batch.micro_batch (the gradient stays the same), then set model.gradient_checkpointing=true, then "
        "lower sampling.max_completion_length. `grpo-nb plan` shows which term is the largest. What was saved is "
        "valid: resume",
    ),
    Known(
        "disk-full",
        r"No space left on device|Disk quota exceeded|Cannot save checkpoint|file write failed",
        "The disk is full, or this account's share of it.",
        "Free some space (df -h, quota -s); what was saved before is valid. Of a run's checkpoints only 000000 and the "
        "newest are needed to continue; a new run keeps fewer with a lower run.keep_checkpoints",
    ),
    Known(
        "open-files",
        r"Too many open files",
        "The process has reached its limit of open files.",
        "Restart the kernel; `ulimit -n 4096` before starting it raises the limit",
    ),
)

# Numbers and the graph

_NUMBERS = (
    Known(
        "backward-twice",
        r"backward through the graph a second time",
        "A tensor that carries gradient was made once and used in two backward passes; mostly a KL or log-probs "
        "computed before the loop over optimizer passes.",
        "Compute what carries gradient anew in each pass, and old and reference log-probs under torch.no_grad(). Not "
        "retain_graph=True: it keeps the memory and differentiates the old policy",
    ),
    Known(
        "device-assert",
        r"device-side assert|illegal memory access|unspecified launch failure",
        "The GPU met an impossible index or probability. Mostly the logits became nan in an earlier step, or a token "
        "id lies outside the vocabulary.",
        "Restart the kernel (the GPU's context is lost) and resume; then look at `grpo-nb diagnose` for the first "
        "non-finite step. CUDA_LAUNCH_BLOCKING=1 before the start (`doctor.debug_mode()`) names the line",
    ),
    Known(
        "nan-probabilities",
        r"probability tensor contains either|probabilities (are|contain) nan",
        "The logits are nan or infinite, so there is no distribution to draw from: an update has damaged the weights.",
        "Resume from the last checkpoint with half the learning rate, and bfloat16 or float32 instead of float16",
    ),
    Known(
        "nan-loss",
        r"returned nan values in its|(loss|gradient|grad_?norm)['\"]?( is|:)? ?nan\b|\bnan (loss|gradient)|"
        r"attempting to unscale FP16 gradients",
        "The loss or a gradient became nan: float16 overflows, a learning rate is too high, or a reward is not finite.",
        "Use bfloat16 or float32 (model.dtype), halve algorithm.learning_rate, and keep algorithm.max_grad_norm at 1 "
        "or less. `doctor.debug_mode()` names the operation; `grpo-nb diagnose` the first such step",
    ),
    Known(
        "index-out-of-range",
        r"index out of range in self",
        "A token id is beyond the rows of the embedding: the tokenizer has tokens that the model lacks, or belongs to "
        "another model.",
        "Take the tokenizer of the same folder as the weights (model.name); a token of your own needs "
        "model.resize_token_embeddings before the run begins",
    ),
    Known(
        "no-gradient",
        r"does not require grad and does not have a grad_fn",
        "The loss depends on no trainable parameter: everything is frozen, or the forward pass ran under no_grad.",
        "Look at policy.describe()['trainable'], and take the loss outside of policy.eval_mode()",
    ),
    Known(
        "in-place",
        r"modified by an inplace operation",
        "A tensor that the backward pass needs was overwritten after the forward pass.",
        "In your own reward or loss code, write x = x + 1 instead of x += 1 on what came out of the model",
    ),
    Known(
        "two-devices",
        r"Expected all tensors to be on the same device",
        "Tensors of two devices met in one operation.",
        "Give all of them to policy.device; a reward function should return plain numbers, not tensors",
    ),
    Known(
        "number-type",
        r"not implemented for '(Half|BFloat16)'|BFloat16 is not supported|expected m1 and m2 to have the same dtype|"
        r"expected scalar type \w+ but found",
        "An operation does not exist for this number type on this device, or two types met in one operation.",
        "Set model.dtype='float32' (on CPU and on GPUs older than Ampere), or 'bfloat16' on newer ones",
    ),
    Known(
        "deterministic",
        r"does not have a deterministic implementation|CUBLAS_WORKSPACE_CONFIG",
        "run.deterministic allows only operations that give the same bits each time, and this one does not.",
        "Set run.deterministic=false in a new run, or set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the kernel starts "
        "where the message names it",
    ),
)

# The batch, the engine, the sampler

_ROLLOUT = (
    Known(
        "no-rollouts",
        r"num_rollouts_per_episodes?",
        "The batch of an update is smaller than the completions of a step, so that a count of rollouts was rounded to "
        "0. Here a step always draws batch.prompts x batch.group_size completions, and the settings refuse a "
        "batch.mini_batch that does not divide them.",
        "Elsewhere, set train_batch_size to rollout_batch_size x n_samples_per_prompt or more. Here, read the numbers "
        "with `print(config.geometry)`",
    ),
    Known(
        "flags-ignored",
        r"generation flags are not valid and may be ignored|generation_config.* is ignored",
        "generate() was given sampling settings that it does not apply: greedy decoding is on, or they reached it in "
        "a place that it does not read.",
        "Draw with this package's engine (rollout.engine), which applies sampling.temperature itself and measures the "
        "distance to it each step; in your own engine pass do_sample=True with temperature, top_p and top_k",
    ),
    Known(
        "engine-asleep",
        r"Engine (is )?already (sleeping|asleep)|Engine is sleeping",
        "The engine was sent to sleep twice, or got a request while it slept.",
        "Wake it before each rollout and let one place alone send it to sleep; for debugging leave sleep mode off",
    ),
    Known(
        "slow-rollouts",
        r"(slow|low) (rollouts?|generation|sampling|decoding)\b|(rollouts?|generation|sampling|decoding)( speed)? "
        r"(is|are) (very |too |so |extremely )?(slow|low)\b|generation throughput: [\d.]+ tok",
        "Each token waits for the launches of every layer, or so few rows are drawn together that the weights are read "
        "for little.",
        "Set rollout.engine='auto', which takes the graph engine on CUDA where it serves the model; `engine_reason` in "
        "events.jsonl has the reason. `grpo-nb profile` shows how far the rollout is from its floor. Then lower "
        "sampling.max_completion_length; batch.group_size last, since a smaller group has a noisier baseline",
    ),
    Known(
        "chat-template",
        r"chat_template is not set|does not have a chat template",
        "This tokenizer has no chat template, so a conversation cannot be written as the model expects it.",
        "Take the instruct model of the family (its tokenizer has one), or set tokenizer.chat_template before the run "
        "begins",
    ),
    Known(
        "compiler",
        r"Failed to find C compiler|InvalidCxxCompiler|BackendCompilerFailed|PTXASError|PassManager::run failed",
        "Kernels are compiled when they are first used, and the compiler is missing or failed.",
        "Install gcc (or set CC), or set rollout.engine='eager' and batch.passes='model', which compile nothing",
    ),
)

# The installation

_INSTALLATION = (
    Known(
        "wrong-architecture",
        r"no kernel image is available",
        "This torch was built for other GPU architectures than the one here.",
        "Install a build that has it, e.g. pip install torch --index-url https://download.pytorch.org/whl/cu128; "
        "`grpo-nb doctor` lists what the build supports and what the GPU is",
    ),
    Known(
        "cpu-build",
        r"Torch not compiled with CUDA enabled",
        "This torch is a build for CPU only.",
        "Set model.device='cpu', or install a CUDA build: https://pytorch.org/get-started/locally",
    ),
    Known(
        "driver",
        r"Found no NVIDIA driver|driver version is insufficient|CUDA driver initialization failed|"
        r"forward compatibility was attempted",
        "The NVIDIA driver is missing or older than this torch needs.",
        "Update the driver, install a torch built for an older CUDA, or set model.device='cpu'",
    ),
    Known(
        "cuda-mismatch",
        r"detected CUDA version .{,20}mismatches|lib(cudart|cublas|cudnn|nvrtc|nccl)[\w.-]*: cannot open shared|"
        r"undefined symbol: \w*(c10|torch|cuda)\w*",
        "A package was built for another CUDA or another torch than the installed one.",
        "Compare `nvcc --version` with torch.version.cuda (`grpo-nb doctor`), and install that package anew in this "
        "environment, after torch",
    ),
    Known(
        "gpu-library",
        r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_NOT_INITIALIZED",
        "A GPU library could not start, nearly always because the GPU's memory is full.",
        "Look with nvidia-smi for other processes (old kernels) that hold it, then lower batch.micro_batch",
    ),
    Known(
        "attention-package",
        r"FlashAttention2 has been toggled on|flash_attn.*(not installed|seems to be not)|requires the following "
        r"packages.*flash_attn",
        "The model asks for FlashAttention, which is not installed.",
        "Nothing here needs it: load the model with its usual attention (sdpa). To use it, pip install flash-attn "
        "--no-build-isolation on Ampere or newer",
    ),
    Known(
        "wheel",
        r"Failed (building wheel for|to build)|Could not build wheels for",
        "pip found no ready wheel for this Python, CUDA and system, and could not compile one.",
        "Install it in an environment of its own and talk to it over HTTP (vLLM is a server, no dependency here); "
        "else `pip install ninja packaging wheel` and `pip install --no-build-isolation PACKAGE`",
    ),
    Known(
        "not-installed",
        r"No module named",
        "The package is not installed for the Python that runs this kernel, which may be another one than your "
        "terminal's.",
        f"Install it for this one: {sys.executable} -m pip install NAME",
    ),
    Known(
        "hub",
        r"couldn't connect to 'https://huggingface\.co|is not a local folder and is not a valid model identifier|"
        r"gated repo|Cannot reach https://huggingface|outgoing traffic has been disabled",
        "The model or the data is no folder here and could not be fetched from the hub: no network, a wrong name, or "
        "a model whose licence has to be accepted.",
        "Set model.name to a folder on this machine, or check the name; for a gated model accept its licence on its "
        "page and set HF_TOKEN",
    ),
)

# Several processes

_DISTRIBUTED = (
    Known(
        "rank-lost",
        r"rank \d+ of \d+ (died|raised|has not answered)|rank 0 (has ended|gives no sign of life)",
        "One of the processes that train together died, raised or hangs, so that all have ended; rank 0 has saved the "
        "newest step where it lives.",
        "Read that rank's own output above torchrun's table (exit status -9 is mostly the system, for want of memory), "
        "then start the run again: it resumes, also with fewer GPUs (--gpus). A rank that was only slow, in a step "
        "that takes long, needs a higher run.rank_timeout, in seconds; `rank_late` in events.jsonl shows where it was",
    ),
    Known(
        "ranks-never-met",
        r"waited \d+ s at \S+ and (rank|lost)|found nobody at \S+ within|Initializing process group",
        "The processes of a training wait for each other at its start: one never started, or has another address.",
        "Start with `grpo-nb train RUN --gpus N`, or on several machines with the line that --nodes M prints: the same "
        "MASTER_ADDR and MASTER_PORT (29500) for all, open between the machines, and WORLD_SIZE processes. "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL shows who is missing",
    ),
    Known(
        "nccl-timeout",
        r"NCCL timeout|collective operation timeout|Watchdog caught collective",
        "One process waited for the others longer than the time limit: another one died, is still loading, or took "
        "another path through the code.",
        "Read the log of every rank for the first error. If all are alive, raise the limit: run.rank_timeout here, in "
        "seconds, elsewhere init_process_group(timeout=timedelta(seconds=1800)); NCCL_DEBUG=INFO shows what it waits "
        "for. The run resumes from its newest checkpoint",
    ),
    Known(
        "nccl",
        r"NCCL error|nccl\w*Error|DistBackendError",
        "The processes cannot reach each other over NCCL.",
        "Set NCCL_DEBUG=INFO to see which step fails, NCCL_SOCKET_IFNAME to the network's name (ip addr), and "
        "NCCL_IB_DISABLE=1 where InfiniBand is broken; init_process_group('gloo') separates a network fault from "
        "a GPU fault",
    ),
    Known(
        "process-group",
        r"environment variable (MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE) expected|DistNetworkError|"
        r"client socket has timed out|Timed out (after .* )?waiting for clients|EADDRINUSE|Address already in use",
        "The process group could not be formed: an address, a port or a rank is missing, taken or blocked.",
        "Start with torchrun --nproc_per_node=N --master_addr=HOST --master_port=29500, with a free port, the same "
        "WORLD_SIZE everywhere and a RANK of each; TORCH_DISTRIBUTED_DEBUG=DETAIL shows who is missing",
    ),
)

# Files, and the notebook

_FILES = (
    Known(
        "other-weights",
        r"Error\(?s?\)? (in )?loading (the )?state_?\s?dict|size mismatch for",
        "The weights belong to another model, or to LoRA of another rank.",
        "Use the model.name and model.lora_rank that the run was made with; they are in its config.json",
    ),
    Known(
        "damaged-file",
        r"while deserializing header|HeaderTooLarge|MetadataIncompleteBuffer|PytorchStreamReader failed|"
        r"invalid magic number|Weights only load failed|unexpected EOF",
        "The file is cut off, is no file of weights, or is a pointer that git-lfs left in its place.",
        "Compare its size with the original's and fetch it again; of this package's checkpoints, a resume takes the "
        "newest valid one by itself",
    ),
    Known(
        "checkpoint-missing",
        r"Checkpoint not found|No such file or directory: '[^']*(checkpoint|\.safetensors|\.pt|\.bin)",
        "There is no checkpoint under this path.",
        "List the runs with `grpo-nb runs` and name the run's folder, not a checkpoint's: resuming finds the "
        "newest valid one",
    ),
    Known(
        "local-name",
        r"cannot access local variable '\w+'|local variable '\w+' referenced before assignment",
        "The name is assigned or imported somewhere in this function, so Python takes it as local in all of it, and it "
        "was read before that.",
        "Import at the top of the file, not inside the function; or give it a value before it is read",
    ),
    Known(
        "undefined-name",
        r"name '\w+' is not defined",
        "No cell that ran in this kernel has defined the name: the kernel was restarted, or a cell was skipped or "
        "renamed.",
        "Run the cells above it (Run All Above); a run itself needs nothing of that: grpo_nb.attach('runs/NAME')",
    ),
    Known(
        "event-loop",
        r"asyncio\.run\(\) cannot be called from a running event loop|This event loop is already running",
        "A notebook's kernel runs an event loop already, and there can be one.",
        "Write `await session.wait()` in the cell instead of asyncio.run(...)",
    ),
)

KNOWN = (*_MEMORY, *_NUMBERS, *_ROLLOUT, *_INSTALLATION, *_DISTRIBUTED, *_FILES)
