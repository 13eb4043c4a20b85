"""Define the options of `layoutmap checkpoint describe | history | verify | relayout | export | convert`.

The commands are in `checkpoint_commands`. That module loads numpy, which takes as long as the rest of the command line.
"""

from __future__ import annotations

import argparse
from typing import Any

from layoutmap.cli import interrupts
from layoutmap.cli.output import add_wide_option
from layoutmap.cli.sizes import parse_size

_EXAMPLES = """examples:
  layoutmap checkpoint describe runs/llama
  layoutmap checkpoint describe runs/llama --step 1000 --match "blocks\\.0\\." --json - | jq .variables
  layoutmap checkpoint describe runs/llama --html checkpoint.html
  layoutmap checkpoint history runs/llama
  layoutmap checkpoint verify runs/llama --all     in a job at night: exit code 1 if a byte has changed
  layoutmap checkpoint relayout runs/llama serving/llama --rules rules.yaml --mesh batch=1,model=8
  layoutmap checkpoint export runs/llama llama-hf --names llama --max-shard 5GiB     for transformers and others
  layoutmap checkpoint convert model.pt runs/converted --part model     a file of torch.save; none of its code runs
  layoutmap checkpoint describe llama-hf     files of Hugging Face, Keras, orbax and DCP are described, too

exit codes:
  0  the output was printed, and all is well
  1  something is damaged; stdout says which variables of which files
  2  something went wrong; stderr says what
"""


def add_checkpoint_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `layoutmap checkpoint` and their options to a parser."""
    parser.epilog = _EXAMPLES
    commands = parser.add_subparsers(
        required=True, metavar="describe | history | verify | relayout | export | convert"
    )

    def add_subcommand(name: str, summary: str, *, has_step: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=summary, description=summary, epilog=_EXAMPLES, formatter_class=parser.formatter_class
        )
        made.set_defaults(checkpoint_command=name)
        made.add_argument(
            "directory", metavar="DIRECTORY", help="what the checkpoint was saved to, or files of others"
        )
        if has_step:
            made.add_argument("--step", metavar="N", type=int, help="the step; default: the last one")
        return made

    shown = add_subcommand(
        "describe", "Print what is in a checkpoint: its facts and its variables, the largest first."
    )
    shown.add_argument(
        "--match", metavar="REGEX", help="only variables in whose paths the regex is found; bytes are theirs"
    )
    add_wide_option(shown)
    shown.add_argument("--json", metavar="FILE", help='also write it for programs; "-": to stdout')
    shown.add_argument("--html", metavar="FILE", help='also write it as a page for a browser; "-": to stdout')
    add_subcommand("history", "Print which step came from which, as a tree.", has_step=False)
    verify = add_subcommand("verify", "Read all, and name each file and chunk that is not as it was written.")
    verify.add_argument(
        "--html",
        metavar="FILE",
        help='also write a page with what is in it and what is damaged; "-": to stdout',
    )
    verify.add_argument("--all", action="store_true", help="verify every step")
    moved = add_subcommand(
        "relayout",
        "Write a step once more, in the layouts of other rules: devices of their mesh then read whole chunks.",
    )
    moved.add_argument("new", metavar="NEW", help="the directory of the new checkpoint; it may exist")
    moved.add_argument(
        "--rules", metavar="FILE", required=True, help="the rules file, as LayoutMap.to_yaml writes it"
    )
    moved.add_argument(
        "--mesh", metavar="DIMS", help='the mesh, as in "batch=2,model=4"; default: that of the rules file'
    )
    out = add_subcommand(
        "export", "Write the weights in a format of other libraries, by default as Hugging Face's read them."
    )
    out.add_argument("new", metavar="NEW", help="the folder to write; if it is there, it is empty")
    out.add_argument("--format", metavar="NAME", default="safetensors", help="default: %(default)s")
    out.add_argument(
        "--names",
        metavar="FILE|TABLE",
        help='what the variables are called there: a YAML file, or a table of the library, such as "llama"; '
        "default: as here",
    )
    out.add_argument(
        "--max-shard",
        metavar="SIZE",
        type=parse_size,
        default=5 << 30,
        help='how large a file becomes, as in "2GB"; default: 5GiB',
    )
    converted = add_subcommand(
        "convert",
        "Write the tensors of a file of torch.save as a checkpoint. Nothing of the file is run.",
        has_step=False,
    )
    converted.add_argument("new", metavar="NEW", help="the directory of the new checkpoint; it may exist")
    converted.add_argument(
        "--part",
        metavar="KEY",
        help='which entry of the file, as in "model" or "model.encoder"; default: all',
    )


def run_checkpoint_command(options: Any) -> int:
    """Run the subcommand of `layoutmap checkpoint` that the options name, and return the exit code."""
    from layoutmap.cli import checkpoint_commands

    with interrupts.allow_interrupts():
        return getattr(checkpoint_commands, f"run_{options.checkpoint_command}_command")(options)
