"""`hybrid-gemm completion`: what a shell needs to complete commands, options and names."""

from __future__ import annotations

import os

import click

from ..errors import UsageError
from .help import Command
from .option_types import Named

VARIABLE = "_HYBRID_GEMM_COMPLETE"  # by which a shell asks click for completions
_WORDS = {"COMP_WORDS", "COMP_CWORD"}  # what it completes
SHELLS = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc, after compinit",
    "fish": "~/.config/fish/completions/hybrid-gemm.fish",
}


def check_asked() -> None:
    """Raises `UsageError` where completions are asked for in a way that no shell has, or no words
    are there to complete."""
    if not (asked := os.environ.get(VARIABLE, "")):
        return
    known = [f"{shell}_{what}" for what in ("complete", "source") for shell in SHELLS]
    if asked not in known:
        raise UsageError(f"{VARIABLE}={asked}: it takes {', '.join(known)}")
    number = os.environ.get("COMP_CWORD", "0")
    if asked in ("bash_complete", "zsh_complete") and not number.isdecimal():
        raise UsageError(f"COMP_CWORD={number} is no number of a word")
    if asked.endswith("_complete") and not os.environ.keys() >= _WORDS:
        raise UsageError(
            f"{VARIABLE}={asked} is for a shell, which sets {' and '.join(sorted(_WORDS))} too; "
            "`hybrid-gemm completion` prints how"
        )


@click.command(
    cls=Command,
    examples=[
        ("Complete in this bash, and in those to come if it stands in ~/.bashrc:",
         'eval "$(hybrid-gemm completion bash)"'),
        ("The same in zsh:", 'eval "$(hybrid-gemm completion zsh)"'),
        ("In fish, once for all:",
         "hybrid-gemm completion fish > ~/.config/fish/completions/hybrid-gemm.fish"),
    ],
)  # fmt: skip
@click.argument("shell", type=Named(tuple(SHELLS)), metavar="bash|zsh|fish")
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell code that completes names and options.

    Commands, options, kernels, experiments, values and files are completed.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root()
    script = found(root.command, {}, "hybrid-gemm", VARIABLE).source()
    click.echo(f"# hybrid-gemm: completion for {shell}; it belongs into {SHELLS[shell]}")
    click.echo(script.strip())
