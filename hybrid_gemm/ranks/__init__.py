"""Products over MPI ranks."""
