"""The `hybrid-gemm` command, which `python -m hybrid_gemm` is too."""

import sys


def main() -> None:
    """Runs the command, or says in one line which package it lacks."""
    try:
        from .cli import main as command
    except (ImportError, AttributeError) as error:
        from .host.installing import unusable

        package = unusable(error)
        if package is None:
            raise
        print(f"hybrid-gemm: {package}", file=sys.stderr)
        sys.exit(package.exit_code)
    command()


if __name__ == "__main__":
    main()
