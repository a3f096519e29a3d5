"""The `hybrid-gemm` command, which `python -m hybrid_gemm` is too."""

import os
import sys


def main() -> None:
    """Runs the command, or says in one line which package it lacks."""
    # OpenBLAS's threads sleep at once after a product: by default they look for work for 0.1 s, on
    # the cores that verify it. It reads this where NumPy is imported.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
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
