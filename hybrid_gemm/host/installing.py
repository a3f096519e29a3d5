"""What to type to install what is missing."""

from __future__ import annotations

from pathlib import Path


def pip_install(extra: str) -> str:
    """The command that brings one of the package's extras: from this checkout, or by name."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'hybrid-gemm[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"
