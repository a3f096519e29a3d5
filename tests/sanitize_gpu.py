"""Every kernel variant at an odd shape on the GPU, and products on tensor cores, for
compute-sanitizer to watch; one of the two with `kernels` or `tensor-cores` after it:

compute-sanitizer --tool memcheck python tests/sanitize_gpu.py
compute-sanitizer --tool racecheck python tests/sanitize_gpu.py
"""

import sys

from support.checked_accesses import main

for what in sys.argv[1:] or ("kernels", "tensor-cores"):
    main("cuda", what)
