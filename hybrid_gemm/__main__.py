"""`python -m hybrid_gemm` is the `hybrid-gemm` command."""

from .cli import main

main()
