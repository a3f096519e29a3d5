"""Faults against `hybrid-gemm run`: what is drawn, where it runs, how it is judged."""
