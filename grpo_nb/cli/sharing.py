"""The command that writes a run's model for use elsewhere."""

from argparse import Namespace

from grpo_nb.cli.opening import existing_run
from grpo_nb.cli.options import UsageError
from grpo_nb.cli.output import say, show_json

DONE = 0


def export_command(arguments: Namespace) -> int:
    """A stage's model as an adapter, a merged model or a GGUF file."""
    if arguments.public and arguments.push is None:
        raise UsageError("--public sets who may read a pushed model; add --push OWNER/NAME, or leave --public out")
    run = existing_run(arguments.run)
    from grpo_nb.exports import export  # after the check of the path: this import takes seconds

    made = export(
        run,
        arguments.out,
        format=arguments.format,
        stage=arguments.stage,
        push=arguments.push,
        public=arguments.public,
    )
    if arguments.json:
        facts = {"run": str(run.path), "folder": str(made.folder), "format": made.format, "stage": made.stage}
        show_json(facts | {"files": made.files, "address": made.address or None})
    else:
        say(str(made))
    return DONE
