"""Every kernel variant at an odd shape on the GPU, products on tensor cores, and sums of checks,
for compute-sanitizer to watch; some of it with `kernels`, `thin`, `tensor-cores` or `checks`:

compute-sanitizer --tool memcheck python tests/sanitize_gpu.py
compute-sanitizer --tool racecheck python tests/sanitize_gpu.py
"""

import sys

from support.checked_accesses import KINDS, main

for what in sys.argv[1:] or KINDS:
    main("cuda", what)
