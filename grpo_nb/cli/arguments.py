"""The command line: its commands, and the settings that it reads."""

import argparse
from argparse import ArgumentParser
from typing import Any

from grpo_nb import __version__, presets
from grpo_nb.cli import values
from grpo_nb.cli.options import (
    accepting_arguments,
    changed_argument,
    command_of,
    json_argument,
    making_arguments,
    out_argument,
    own_arguments,
    parser_of,
    run_argument,
    yes_argument,
)

OVERVIEW = """\
Train a language model with GRPO and look after the run, from a terminal.
RUN is a run directory: settings, logs, checkpoints and knobs are all in it.
"""

EXAMPLES = """\
a first run, two minutes on two CPU cores:
  grpo-nb train runs/demo --preset demo        makes the run, does SFT, then GRPO
  grpo-nb eval runs/demo --stage sft           measures what GRPO began with
  grpo-nb eval runs/demo                       and what training made of it
  grpo-nb eval runs/demo --compare             both beside each other, with intervals
  grpo-nb diagnose runs/demo                   what went wrong, and what to change

interrupted? the same command goes on where it stopped:
  grpo-nb train runs/demo

a model, data and settings of your own:
  grpo-nb train runs/mine --preset cpu_small \\
      --set model.name=models/SmolLM2-135M-Instruct \\
      --set objectives.fairness.data=data/bbq \\
      --set objectives.hallucination.data=data/halueval/qa_data.json
  grpo-nb settings --preset cpu_small          every key that --set takes, with its meaning
  grpo-nb plan --preset gpu_24gb --gib 24      does it fit, and what to lower if not

exit status: 0 done, 1 findings or failure, 2 usage, 130 interrupted and saved
"""


def parser() -> ArgumentParser:
    """Parser of the complete command line."""
    top: ArgumentParser = parser_of(ArgumentParser, prog="grpo-nb", description=OVERVIEW, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"grpo-nb {__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="log each decision")
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    looking = (_status, _samples, _diagnose, _compare, _report, _bundle, _profile, _runs, _doctor, _plan, _settings)
    for add in (_sft, _train, _tell, _eval, _answer, _score, _export, _sweep, *looking, _notebooks):
        add(verbs)
    return top


def commands() -> dict[str, ArgumentParser]:
    """The parser of every command by name, the complete command line first."""
    top = parser()
    below = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return {"grpo-nb": top} | {f"grpo-nb {name}": command for name, command in below.choices.items()}


def _sft(commands: Any) -> None:
    command = command_of(
        commands,
        "sft",
        "supervised fine-tuning: teach the form of an answer",
        "Train sft.steps steps on gold completions, or continue where an earlier call stopped.",
        "grpo-nb sft runs/demo --preset demo",
    )
    run_argument(command)
    making_arguments(command)
    own_arguments(command)
    accepting_arguments(command)


def _train(commands: Any) -> None:
    command = command_of(
        commands,
        "train",
        "GRPO, after SFT where the run has not had it yet",
        "Train to --steps in total (default: the run's run.steps). A run that stopped, or whose process was "
        "killed, continues from its newest checkpoint. Ctrl-C (or SIGTERM) ends after the current step "
        "and saves; a second one ends at once.",
        "grpo-nb train runs/demo --preset demo --set algorithm.learning_rate=1e-4\n"
        "grpo-nb train runs/demo --steps 120          60 done: does 60 more\n"
        "grpo-nb train runs/demo --gpus 2             on two GPUs; the run is the same on any number",
    )
    run_argument(command)
    making_arguments(command)
    own_arguments(command)
    command.add_argument(
        "--steps",
        type=values.count,
        metavar="N",
        help="GRPO steps to reach in total; a new run keeps it as its run.steps",
    )
    command.add_argument(
        "--debug", action="store_true", help="name the operation behind a nan or a CUDA error; several times slower"
    )
    command.add_argument("--no-sft", action="store_true", help="GRPO at once, whatever SFT has or has not done")
    command.add_argument(
        "--gpus", type=values.count, metavar="N", help="N processes train together, one on each GPU, by torchrun"
    )
    command.add_argument(
        "--nodes", type=values.count, metavar="M", help="with --gpus: print the line that starts it on M machines"
    )
    accepting_arguments(command)


def _sweep(commands: Any) -> None:
    command = command_of(
        commands,
        "sweep",
        "train several settings and seeds, and compare them over seeds",
        "Each arm is a set of settings; the others are compared with the first. Each arm and seed is a run of its own "
        "in FOLDER. Runs with the same SFT share it. Finished runs are not repeated, so the same command continues "
        "after an interrupt; without --arm it opens the existing sweep.",
        "grpo-nb sweep sweeps/kl --arm usual= --arm no-kl=objectives.fairness.beta=0 --seeds 0,1\n"
        "grpo-nb sweep sweeps/kl --devices 0,1\n"
        "grpo-nb sweep sweeps/kl --show",
    )
    command.add_argument("folder", metavar="FOLDER", help="where the study and its runs are")
    making_arguments(command)
    command.add_argument(
        "--arm",
        action="append",
        type=values.arm,
        metavar="NAME=KEY=VALUE,...",
        help="an arm and the settings that it changes; none after the first = is the study's own; may be repeated",
    )
    command.add_argument(
        "--sft-only", action="append", default=[], metavar="NAME", help="an arm of --arm that ends after SFT"
    )
    command.add_argument("--seeds", type=values.seeds, metavar="N,N,...", help="of every arm; default: 0,1,2")
    command.add_argument(
        "--jobs", type=values.count, default=1, metavar="N", help="runs at a time, on each GPU; default: 1"
    )
    command.add_argument(
        "--devices", type=values.seeds, default=(), metavar="N,N,...", help="GPUs that share the runs, by number"
    )
    command.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="train this arm alone; may be repeated"
    )
    command.add_argument("--show", action="store_true", help="show the finished runs and their results; train nothing")
    yes_argument(command)
    json_argument(command)


def _tell(commands: Any) -> None:
    command = command_of(
        commands,
        "tell",
        "steer a run that trains, wherever it does",
        "The trainer obeys at its next step boundary: pause and resume hold and continue it, stop ends and saves, "
        "step does one step and holds, save and evaluate are done once. Exit status 1 if nothing trains. "
        "KNOB=VALUE turns a knob, whether the run trains or not; KNOB=auto gives a beta back to its controller; undo "
        "takes back the last turn of a knob, and again the one before.",
        "grpo-nb tell runs/demo pause\ngrpo-nb tell runs/demo evaluate\ngrpo-nb tell runs/demo beta/fairness=0.1",
    )
    run_argument(command)
    words = ", ".join(values.ORDERS)
    command.add_argument("what", type=values.order, metavar="WHAT", help=f"{words}, or KNOB=VALUE")


def _eval(commands: Any) -> None:
    command = command_of(
        commands,
        "eval",
        "measure on held-out examples, with 95%% intervals",
        "Evaluate one stage of the run and log it there; with --compare, show every stage evaluated so far "
        "against the first, with paired intervals.",
        "grpo-nb eval runs/demo --stage base\ngrpo-nb eval runs/demo --json\ngrpo-nb eval runs/demo --compare\n"
        "grpo-nb eval runs/mine --probe",
    )
    run_argument(command)
    making_arguments(command)
    own_arguments(command)
    _stage_argument(command)
    command.add_argument("--split", choices=("test", "train"), default="test", help="default: test, the held-out one")
    command.add_argument(
        "--mode", choices=("greedy", "sample"), default="greedy", help="likeliest token (default), or as in training"
    )
    command.add_argument("--limit", type=values.count, metavar="N", help="examples per objective at most")
    command.add_argument("--compare", action="store_true", help="before and after training, from saved evaluations")
    command.add_argument(
        "--probe",
        action="store_true",
        help="40 general questions to base and stage: what training made the model forget",
    )
    accepting_arguments(command)
    json_argument(command)


def _answer(commands: Any) -> None:
    command = command_of(
        commands,
        "answer",
        "write what the model answers, for `score` or any other scorer",
        "The likeliest answer to each item that the run holds out, or to all of another file: JSON lines of "
        "example_id, category where there are several, and answer. Nothing is logged in the run.",
        "grpo-nb answer runs/mine fairness --out answers.jsonl\n"
        "grpo-nb score bbq --data data/bbq --predictions answers.jsonl --field answer --part\n"
        "grpo-nb answer runs/mine fairness --data more/Age.jsonl --stage sft --out answers.jsonl",
    )
    run_argument(command)
    command.add_argument("objective", metavar="OBJECTIVE", help="whose items and whose form of a prompt")
    command.add_argument(
        "--data", metavar="PATH", help="other data of its task, all of it; default: the held-out examples"
    )
    command.add_argument("--out", required=True, metavar="FILE", help="where to write it; a file there is replaced")
    _stage_argument(command)
    changed_argument(command)


def _export(commands: Any) -> None:
    command = command_of(
        commands,
        "export",
        "write a stage's model for use elsewhere, with a model card",
        "adapter: PEFT; merged: a transformers model; gguf: one file, where it reads back as it was (Llama, Qwen2, "
        "Qwen3). README.md is filled from the run: data, settings, curves, evaluations. --push uploads it with the "
        "token in HF_TOKEN.",
        "grpo-nb export runs/mine --out exported\n"
        "grpo-nb export runs/mine --out exported --format merged --stage best\n"
        "grpo-nb export runs/mine --out exported --push ada/fair-qwen",
    )
    run_argument(command)
    command.add_argument("--out", required=True, metavar="FOLDER", help="where to write it; must be missing or empty")
    command.add_argument(
        "--format",
        choices=("adapter", "merged", "gguf"),
        help="default: adapter where LoRA trains, else merged",
    )
    command.add_argument(
        "--stage",
        type=values.exported_stage,
        default="latest",
        metavar="STAGE",
        help="latest (default), sft, a step, best (between the objectives), or best/OBJECTIVE",
    )
    command.add_argument("--push", metavar="OWNER/NAME", help="upload it to this repository, made private if missing")
    command.add_argument("--public", action="store_true", help="with --push: a new repository can be read by anyone")
    json_argument(command)


def _stage_argument(command: ArgumentParser) -> None:
    command.add_argument(
        "--stage", type=values.stage, metavar="STAGE", help="base, sft, latest or a step; default: the newest there is"
    )


def _score(commands: Any) -> None:
    command = command_of(
        commands,
        "score",
        "any model's answers to BBQ or HaluEval, from files, with 95%% intervals",
        "BBQ: accuracies, bias scores, unknown and unparsed rates by category. HaluEval: accuracy, hallucinated and "
        "abstention rates of answers; where an answer is an object of 'right' and 'hallucinated', a yes or no each, "
        "recognition with the length-only baseline beside it. Predictions are JSON lines that join by example_id "
        "(and category, for BBQ), or lie in the data's own rows. Answers are read as in training: the part after the "
        "model's thinking, behind the strongest marker that it has; a plain option or a letter does.",
        "grpo-nb score bbq --data BBQ/data --predictions preds_Age.jsonl --field prediction\n"
        "grpo-nb score bbq --data preds_Age.jsonl --field unifiedqa-t5-11b_pred_race --json\n"
        "grpo-nb score halueval --data qa_data.json --predictions answers.jsonl --field answer",
    )
    command.add_argument("benchmark", choices=("bbq", "halueval"), help="whose files and whose measures")
    command.add_argument("--data", required=True, metavar="PATH", help="its file, folder, glob, or hub id")
    command.add_argument("--predictions", metavar="PATH", help="the answers; default: they lie in the data's own rows")
    command.add_argument("--field", required=True, metavar="NAME", help="name of the field that holds the answers")
    command.add_argument("--part", action="store_true", help="measure the answered items though others are not")
    json_argument(command)


def _status(commands: Any) -> None:
    command = command_of(
        commands,
        "status",
        "what a run is doing, and its newest numbers",
        "State, step, who trains it, what ended it, and reward, KL, beta, length and truncation of the newest step.",
        "grpo-nb status runs/demo\ngrpo-nb status demo --json",
    )
    run_argument(command)
    json_argument(command)


def _samples(commands: Any) -> None:
    command = command_of(
        commands,
        "samples",
        "read what the model wrote",
        "Prompt, completion, label, reward, advantage and stop reason, newest first; no answer comes twice.",
        "grpo-nb samples runs/demo\ngrpo-nb samples runs/demo --step 40 -n 8 --objective fairness",
    )
    run_argument(command)
    command.add_argument("--step", type=values.count, metavar="N", help="of this step; default: the newest of any")
    command.add_argument(
        "-n", type=values.count, default=4, metavar="K", dest="limit", help="at most so many (default: 4)"
    )
    command.add_argument("--objective", metavar="NAME", help="of this objective; default: of all")
    json_argument(command)


def _compare(commands: Any) -> None:
    command = command_of(
        commands,
        "compare",
        "two or more runs side by side",
        "Of two: settings and versions that differ, each metric over the steps that both have (last, mean, standard "
        "deviation over steps), and the findings of each. Of more: the settings that differ and where each run stands. "
        "With --out: a page with the curves of all in one set of plots. Any of them may still be training.",
        "grpo-nb compare runs/demo runs/other\ngrpo-nb compare demo ~/elsewhere/run --json\n"
        "grpo-nb compare runs/a runs/b runs/c --out compared.html",
    )
    command.add_argument("a", metavar="A", help="run directory, or name of a run")
    command.add_argument("b", metavar="B", help="the other one")
    command.add_argument("more", metavar="MORE", nargs="*", help="further ones")
    command.add_argument("--out", metavar="FILE", help="write a page there, with curves")
    json_argument(command)


def _diagnose(commands: Any) -> None:
    command = command_of(
        commands,
        "diagnose",
        "read a run's log: what went wrong, the evidence, what to change",
        "Findings of severity warning or error give exit status 1; notes do not.",
        "grpo-nb diagnose runs/demo --json",
    )
    run_argument(command)
    json_argument(command)


def _report(commands: Any) -> None:
    command = command_of(
        commands,
        "report",
        "write what a run's files say as one page",
        "Curves, findings, before and after, the front, answers, events and settings as one HTML file that needs "
        "nothing else. With --out FILE.csv or FILE.parquet: its metrics as a table. The run may be training meanwhile.",
        "grpo-nb report runs/demo\ngrpo-nb report runs/demo --out demo.html\ngrpo-nb report runs/demo --out demo.csv",
    )
    run_argument(command)
    out_argument(command, "report.html")
    json_argument(command)


def _bundle(commands: Any) -> None:
    command = command_of(
        commands,
        "bundle",
        "one zip for a bug report, without secrets",
        "Versions, hardware, environment, settings, the last metrics and events, findings and the traceback. Keys are "
        "struck out and home folders shortened; prompts, completions and weights are left out.",
        "grpo-nb bundle runs/demo\ngrpo-nb bundle runs/demo --out report.zip",
    )
    run_argument(command)
    out_argument(command, "bug-report.zip")
    json_argument(command)


def _profile(commands: Any) -> None:
    command = command_of(
        commands,
        "profile",
        "a few steps under torch's profiler: seconds by phase and operator",
        "Trains a copy from the run's newest weights; the run is not touched. Judges are not asked. The trace is for "
        "https://ui.perfetto.dev. --memory shows the live tensors at the end of the last step, too.",
        "grpo-nb profile runs/demo\ngrpo-nb profile runs/demo --steps 1 --memory",
    )
    run_argument(command)
    command.add_argument("--steps", type=values.count, default=3, metavar="N", help="steps to measure (default: 3)")
    command.add_argument("--out", metavar="FILE", help="where to write the trace; default: trace.json.gz in the run")
    command.add_argument("--memory", action="store_true", help="live tensors by shape, the largest first")
    json_argument(command)


def _runs(commands: Any) -> None:
    command = command_of(commands, "runs", "list the runs in a folder", "State, step and owner of every run.")
    command.add_argument("root", nargs="?", default="runs", metavar="ROOT", help="folder of runs (default: runs)")
    json_argument(command)


def _doctor(commands: Any) -> None:
    command = command_of(
        commands,
        "doctor",
        "check this machine, or with --lint the settings in a file",
        "Python, PyTorch, GPU, memory, disk; exit status 1 if a check fails. With --lint: settings in a notebook, a "
        "script, a config.json or a run that are refused, do nothing, or undo each other; the file is not run.",
        "grpo-nb doctor\ngrpo-nb doctor --lint notebooks/01_load.ipynb",
    )
    command.add_argument("--lint", metavar="FILE", help="look at the settings in this file in place of the machine")
    command.add_argument(
        "--preset",
        choices=sorted(presets.PRESETS),
        help="complete the settings of --lint FILE with this one (default: the preset it names, else class defaults)",
    )
    json_argument(command)


def _plan(commands: Any) -> None:
    command = command_of(
        commands,
        "plan",
        "memory by term, whether it fits, which settings to lower",
        "Of an existing RUN, or of --preset and --set. Exit status 1 if it does not fit.",
        "grpo-nb plan --preset gpu_24gb --gib 24\n"
        "grpo-nb plan --preset gpu_24gb --model Qwen/Qwen2.5-1.5B-Instruct --gib 8",
    )
    command.add_argument("run", nargs="?", metavar="RUN", help="run directory whose settings to plan")
    making_arguments(command)
    command.add_argument("--model", metavar="NAME", help="short for --set model.name=NAME")
    command.add_argument(
        "--gib", type=values.gib, metavar="N", help="memory of the device in GiB (default: this machine's)"
    )
    json_argument(command)


def _notebooks(commands: Any) -> None:
    command = command_of(
        commands,
        "notebooks",
        "copy the project's notebooks, to work in",
        "What you run and edit in a copy is no change of the project. Called again, it renews the copies that you have "
        "not edited, and leaves the others as they are.",
        "grpo-nb notebooks                            then: jupyter lab lab/01_load.ipynb\ngrpo-nb notebooks mine",
    )
    command.add_argument("folder", nargs="?", metavar="FOLDER", help="for the copies (default: lab in the project)")
    json_argument(command)


def _settings(commands: Any) -> None:
    command = command_of(
        commands,
        "settings",
        "every key that --set takes: value and meaning",
        "The settings of --preset (default: demo) or of an existing RUN.",
    )
    command.add_argument("run", nargs="?", metavar="RUN", help="run directory whose settings to show")
    making_arguments(command)
    json_argument(command)
