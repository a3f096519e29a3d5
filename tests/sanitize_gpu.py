"""Every kernel variant at an odd shape on the GPU, for compute-sanitizer to watch:

compute-sanitizer --tool memcheck python tests/sanitize_gpu.py
compute-sanitizer --tool racecheck python tests/sanitize_gpu.py
"""

from support.checked_accesses import main

main("cuda", "kernels")
