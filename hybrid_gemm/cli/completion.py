"""`hybrid-gemm completion`: what a shell needs to complete commands, options and names."""

from __future__ import annotations

import click

from .help import Command
from .option_types import Named

SHELLS = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc, after compinit",
    "fish": "~/.config/fish/completions/hybrid-gemm.fish",
}


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
    """Print what makes a shell complete names and options.

    Commands, options, kernels, experiments, values and files are completed.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    root = context.find_root()
    script = found(root.command, {}, "hybrid-gemm", "_HYBRID_GEMM_COMPLETE").source()
    click.echo(f"# hybrid-gemm: completion for {shell}; it belongs into {SHELLS[shell]}")
    click.echo(script.strip())
